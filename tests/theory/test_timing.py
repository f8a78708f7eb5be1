"""The timing simulation beside the coordinator itself, beside closed forms, and on its own."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.delays import DELAYS, Constant, Delay, Exponential, KeyedDelays
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import (
    PROTOCOLS,
    AdaSync,
    BoundedProtocol,
    Coordinator,
    KAsync,
    KBatchSync,
    KSync,
    OnStale,
    Protocol,
    with_bound,
)
from gruppetto.protocols.messages import (
    TOO_STALE,
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Discard,
    Event,
)
from gruppetto.theory import timing_draws
from gruppetto.theory.timing import Timing, simulate, update_blocks
from gruppetto.theory.timing_draws import BLOCK, Delays, Ring, Rounds

#: Both ways, where both are installed.
WAYS = (False, True) if find_spec("numba") else (False,)
needs_numba = pytest.mark.skipif(len(WAYS) == 1, reason="numba is not installed")
CELLS = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")
LAWS = ("exponential:mean=1", "shifted-exponential:shift=1,mean=1", "pareto:shape=2,scale=1",
        "uniform:low=0.5,high=1.5", "lognormal:median=1,sigma=1", "gamma:shape=2,scale=0.5",
        "weibull:shape=0.5,scale=1", "bimodal:fast=1,slow=4,p_slow=0.3",
        "constant:value=0.1")  # fmt: skip


# ------------------------------------------------------------- the reference


class NoGradients:
    """A server and a learner that do nothing."""

    loss, num_samples = 0.0, 1
    needs_past = False

    def snapshot(self) -> None:
        return None

    def compute(self, mini_batch: int, weights: object) -> NoGradients:
        return self

    def apply(self, contributions: Sequence[Any], gradients: Sequence[Any], past: Any = ()) -> None:
        pass


class Watch:
    """What the coordinator did, up to an update."""

    def __init__(self, engine: VirtualEngine, num_learners: int, num_updates: int) -> None:
        self.engine = engine
        self.num_updates = num_updates
        self.times: list[float] = []
        self.staleness: list[list[int]] = []
        self.num_cancelled = 0
        self.num_discarded = 0
        self.busy = 0.0
        self.num_learners = num_learners
        self._began: dict[int, float] = {}

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        pass

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        if len(self.times) == self.num_updates:
            return
        self.busy += time - self._began.pop(getattr(event, "lease", -1), time)
        for command in commands:
            match command:
                case Compute():
                    self._began[command.lease] = time
                case Discard(_, reason):
                    self.num_discarded += reason == TOO_STALE
                case Cancel():
                    self.num_cancelled += 1
                    self.busy += time - self._began.pop(command.lease)
                case ApplyUpdate():
                    self.times.append(time)
                    self.staleness.append([c.staleness for c in command.contributions])
        if len(self.times) == self.num_updates:
            self.busy += sum(time - began for began in self._began.values())
            self.engine.request_stop("enough")

    @property
    def idle_fraction(self) -> float:
        whole = self.num_learners * self.times[-1]
        return 1.0 - self.busy / whole if whole else 0.0


def reference(protocol: Protocol, delays: Any, num_learners: int, num_updates: int) -> Watch:
    """The coordinator, driven by the virtual engine."""
    nothing = NoGradients()
    engine = VirtualEngine(nothing, nothing, delays, num_learners)
    watch = Watch(engine, num_learners, num_updates)
    engine.run(Coordinator(protocol, range(num_learners), None), watch)
    return watch


def sequence(
    protocol: Protocol, delays: Delays, num_learners: int, num_updates: int, compiled: bool
) -> tuple[list[float], list[list[int]]]:
    """The simulation's updates in the reference's form."""
    k = protocol.num_to_wait(num_learners)
    times: list[float] = []
    staleness: list[list[int]] = []
    for block in update_blocks(protocol, delays, num_learners, num_updates, compiled=compiled):
        times += block.times.tolist()
        zeros = np.zeros((len(block.times), k), dtype=np.int64)
        rows = (zeros if block.staleness is None else block.staleness).tolist()
        staleness += [[value for value in row if value >= 0] for row in rows]
    return times, staleness


class Listed:
    """Delays from a short list of each slot, over and over: many ties."""

    def __init__(self, delays: list[list[float]]) -> None:
        self.delays = delays

    def draw(self, slot: int, n: int) -> float:
        return self.delays[slot][n % len(self.delays[slot])]


@st.composite
def protocols(draw: st.DrawFn, num_learners: int) -> Protocol:
    name = draw(st.sampled_from([*CELLS, "hardsync", "softsync", "async", "backup", "rennala",
                                 "ringmaster", "ssp"]))  # fmt: skip
    if name in ("ringmaster", "ssp"):
        key = {"ringmaster": "r", "ssp": "s"}[name]
        return PROTOCOLS.parse(f"{name}:{key}={draw(st.integers(1, 12))}")
    protocol = draw(unbounded(name, num_learners))
    if isinstance(protocol, BoundedProtocol) and draw(st.booleans()):
        on_stale = draw(st.sampled_from(get_args(OnStale)))
        k = protocol.num_to_wait(num_learners)
        least = -(-num_learners // k) - 1 if on_stale == "wait" else 0
        return with_bound(protocol, least + draw(st.integers(0, 3)), on_stale)
    return protocol


@st.composite
def unbounded(draw: st.DrawFn, name: str, num_learners: int) -> Protocol:
    if name in ("hardsync", "async"):
        return PROTOCOLS.parse(name)
    if name == "softsync":
        return PROTOCOLS.parse(f"softsync:n={draw(st.integers(1, num_learners))}")
    if name == "backup":
        return PROTOCOLS.parse(f"backup:b={draw(st.integers(0, num_learners - 1))}")
    most = num_learners if name in ("k-sync", "k-async") else 2 * num_learners + 1
    return PROTOCOLS.parse(f"{name}:k={draw(st.integers(1, most))}")


@st.composite
def settings_of_runs(draw: st.DrawFn) -> tuple[Protocol, Any, int]:
    num_learners = draw(st.integers(1, 12))
    protocol = draw(protocols(num_learners))
    if draw(st.booleans()):
        values = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.0])
        rows = st.lists(st.lists(values, min_size=1, max_size=5),
                        min_size=num_learners, max_size=num_learners)  # fmt: skip
        return protocol, Listed(draw(rows)), num_learners
    law = DELAYS.parse(draw(st.sampled_from(LAWS)))
    own: dict[int, Delay] = {}
    if draw(st.booleans()):
        own[draw(st.integers(0, num_learners - 1))] = DELAYS.parse(draw(st.sampled_from(LAWS)))
    delays = KeyedDelays(draw(st.integers(0, 2**64 - 1)), law, own, num_learners)
    return protocol, delays, num_learners


@settings(max_examples=150, deadline=None)
@given(run=settings_of_runs(), num_updates=st.integers(1, 60))
def test_the_updates_are_the_coordinators_own(
    run: tuple[Protocol, Any, int], num_updates: int
) -> None:
    protocol, delays, num_learners = run
    expected = reference(protocol, delays, num_learners, num_updates)
    for compiled in WAYS:
        found = sequence(protocol, delays, num_learners, num_updates, compiled)
        assert found == (expected.times, expected.staleness)
        timing = simulate(protocol, delays, num_learners, num_updates, compiled=compiled)
        assert timing.mini_batches_cancelled == expected.num_cancelled
        assert timing.mini_batches_discarded == expected.num_discarded
        assert timing.mini_batches_applied == sum(map(len, expected.staleness))
        assert timing.idle_fraction == pytest.approx(expected.idle_fraction, abs=1e-9)


@pytest.mark.parametrize("spec", [f"{cell}:k=3" for cell in CELLS])
@pytest.mark.parametrize("law", ["exponential:mean=1", "bimodal:fast=1,slow=2,p_slow=0.5"])
def test_also_when_draws_were_made_again_and_again(spec: str, law: str) -> None:
    """One learner is thirty times as fast as the others and uses many blocks of draws."""
    protocol = PROTOCOLS.parse(spec)
    own = {2: DELAYS.parse("uniform:low=0.03,high=0.04")}
    delays = KeyedDelays(7, DELAYS.parse(law), own, 5)
    expected = reference(protocol, delays, 5, 8000)
    for compiled in WAYS:
        found = sequence(protocol, delays, 5, 8000, compiled)
        assert found == (expected.times, expected.staleness)


@needs_numba
@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("law", [LAWS[0], "pareto:shape=1.1,scale=1", *LAWS[-2:]])
def test_compiled_rounds_are_the_plain_ones_whatever_k(k: int, law: str) -> None:
    """Also for more mini-batches than learners."""
    delays = KeyedDelays(2, DELAYS.parse(law), {5: Constant(value=0.01)}, 64)
    plain, compiled = (
        sequence(KBatchSync(k=k), delays, 64, 40, compiled) for compiled in (False, True)
    )
    assert plain == compiled


@needs_numba
@given(
    seed=st.integers(0, 2**65),
    takes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), max_size=5),
    count=st.integers(1, 300),
)
def test_compiled_uniforms_are_numpys(seed: int, takes: list[list[int]], count: int) -> None:
    compiled = import_module("gruppetto.theory.timing_compiled").Uniforms(seed, 5)
    plain = timing_draws.Uniforms(seed, 5)
    for slots in takes:
        assert np.array_equal(compiled.take(slots, count), plain.take(slots, count))


@needs_numba
@given(numbers=st.lists(st.integers(0, 30), max_size=60), copies=st.integers(1, 60))
def test_entries_are_sorted_by_end_and_lease(numbers: list[int], copies: int) -> None:
    """As many as take all gaps of the sort, with many ties."""
    numbers = numbers * copies
    leases = np.random.default_rng(len(numbers)).permutation(len(numbers))
    ends, learners = np.array(numbers, dtype=np.float64), leases * 3
    expected = sorted(zip(ends.tolist(), leases.tolist(), learners.tolist(), strict=True))
    import_module("gruppetto.theory.timing_compiled")._sort(ends, leases, learners, len(numbers))
    assert list(zip(ends.tolist(), leases.tolist(), learners.tolist(), strict=True)) == expected


@needs_numba
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("learners", [1, 40, 300])
def test_compiled_and_plain_give_the_same_bits(cell: str, learners: int) -> None:
    protocol = PROTOCOLS.parse(f"{cell}:k={max(1, learners // 3)}")
    delays = KeyedDelays(1, Exponential(mean=1.0), {0: Constant(value=0.3)}, learners)
    plain, compiled = (
        simulate(protocol, delays, learners, 500, compiled=compiled) for compiled in (False, True)
    )
    assert plain == compiled


# ------------------------------------------------------------------- the draws


@pytest.mark.parametrize("law", LAWS)
def test_a_ring_holds_the_draws_of_one_at_a_time(law: str) -> None:
    delays = KeyedDelays(3, DELAYS.parse(law), {1: Exponential(mean=2.0)}, 3)
    ring = Ring(delays, 3)
    for steps in ((BLOCK, 10, 0), (ring.size - BLOCK, 2 * BLOCK, 1)):
        ring.started += np.array(steps)
        ring.refill()
        assert (ring.filled - ring.started > ring.size - BLOCK).all()
        for slot in range(3):
            for n in range(int(ring.started[slot]), int(ring.filled[slot])):
                assert ring.delays[slot, n % ring.size] == delays.draw(slot, n)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("near", [0.0, 2.0])
def test_the_shortest_of_a_round_are_those_of_one_at_a_time(
    law: str, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether uniforms decide or, near ties, seconds do; far from ties both give the same."""
    monkeypatch.setattr(timing_draws, "_NEAR", near)
    delays = KeyedDelays(3, DELAYS.parse(law), {}, 7)
    rounds = Rounds(delays, 7, 4)
    found = np.concatenate([rounds.shortest(BLOCK), rounds.shortest(2 * BLOCK)])
    expected = [sorted(delays.draw(slot, n) for slot in range(7))[:4] for n in range(3 * BLOCK)]
    assert np.sort(found, axis=1).tolist() == expected


# ------------------------------------------------------------ the closed forms


def harmonic(n: int) -> float:
    return sum(1.0 / i for i in range(1, n + 1))


P, MEMORYLESS = 20, Exponential(mean=1.0)


def pareto_order_statistic(k: int) -> float:
    """E[X_{K:P}] of the Pareto law with shape 2 and scale 1."""
    g = math.lgamma
    return math.exp(g(P + 1) + g(P - k + 0.5) - g(P - k + 1) - g(P + 0.5))


@pytest.mark.parametrize("k", range(1, P + 1))
def test_time_per_update_is_the_closed_form(k: int) -> None:
    def update_time(spec: str, law: str, seed: int = 0) -> float:
        delays = KeyedDelays(seed, DELAYS.parse(law), {}, P)
        protocol = PROTOCOLS.parse(f"{spec}:k={k}")
        return simulate(protocol, delays, P, 20_000, compiled=WAYS[-1]).mean_update_time

    near = 0.02
    order = harmonic(P) - harmonic(P - k)
    for spec in ("k-sync", "k-async"):
        assert update_time(spec, "exponential:mean=1") == pytest.approx(order, rel=near)
    assert update_time("k-batch-sync", "exponential:mean=1") == pytest.approx(k / P, rel=near)
    for law, mean in (("exponential:mean=1", 1.0), ("shifted-exponential:shift=1,mean=1", 2.0),
                      ("pareto:shape=2,scale=1", 2.0)):  # fmt: skip
        assert update_time("k-batch-async", law) == pytest.approx(k * mean / P, rel=near)
    shifted = update_time("k-sync", "shifted-exponential:shift=1,mean=1")
    assert shifted == pytest.approx(1.0 + order, rel=near)
    assert update_time("k-async", "shifted-exponential:shift=1,mean=1") <= shifted * 1.001
    # Near K = P the variance is infinite.
    repeats = 7 if k > P - 3 else 1
    median = statistics.median(
        update_time("k-sync", "pareto:shape=2,scale=1", seed) for seed in range(repeats)
    )
    assert median == pytest.approx(pareto_order_statistic(k), rel=near)


@pytest.mark.parametrize("law", ["exponential:mean=1", "shifted-exponential:shift=1,mean=1",
                                 "pareto:shape=2,scale=1", "uniform:low=1,high=2"])  # fmt: skip
@pytest.mark.parametrize("spec", [f"{cell}:k={k}" for cell in CELLS for k in (1, 4, 16, 20)])
def test_mean_staleness_is_the_closed_form(spec: str, law: str) -> None:
    protocol = PROTOCOLS.parse(spec)
    delays = KeyedDelays(0, DELAYS.parse(law), {}, P)
    timing = simulate(protocol, delays, P, 20_000, compiled=WAYS[-1])
    expected = protocol.expected_mean_staleness(P)
    assert timing.mean_staleness == pytest.approx(expected, rel=0.03, abs=0.01)
    if protocol.cell.cancels:
        assert timing.max_staleness == timing.p95_staleness == 0 and timing.fresh_fraction == 1.0


def test_staleness_is_counted_as_everywhere() -> None:
    """Mean, quantile, maximum and share of 0 agree with a plain list of all contributions."""
    protocol = PROTOCOLS.parse("async")
    delays = KeyedDelays(0, DELAYS.parse("pareto:shape=1.1,scale=1"), {3: Exponential(mean=50)}, 8)
    timing = simulate(protocol, delays, 8, 3000)
    values = sorted(s for row in sequence(protocol, delays, 8, 3000, False)[1] for s in row)
    assert timing.mean_staleness == pytest.approx(statistics.mean(values))
    assert timing.p95_staleness == values[math.ceil(0.95 * len(values)) - 1]
    assert timing.max_staleness == values[-1]
    assert timing.fresh_fraction == values.count(0) / len(values)


# ----------------------------------------------------------------- the fine print


def test_nothing_that_takes_no_time_is_a_problem() -> None:
    for cell in CELLS:
        for compiled in WAYS:
            delays = KeyedDelays(0, Constant(value=0.0), {}, 3)
            timing = simulate(PROTOCOLS.parse(f"{cell}:k=2"), delays, 3, 10, compiled=compiled)
            assert timing.total_time == timing.idle_fraction == 0.0


def test_memory_does_not_grow_with_updates() -> None:
    def peak(num_updates: int) -> int:
        tracemalloc.start()
        simulate(KSync(k=2), KeyedDelays(0, MEMORYLESS, {}, 4), 4, num_updates)
        simulate(KAsync(k=2), KeyedDelays(0, MEMORYLESS, {}, 4), 4, num_updates, compiled=WAYS[-1])
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(600_000) < 1.1 * peak(150_000)


def test_progress_is_told() -> None:
    told: list[tuple[int, float]] = []
    delays = KeyedDelays(0, MEMORYLESS, {}, 64)
    timing = simulate(KSync(k=2), delays, 64, 9000, progress=lambda *news: told.append(news))
    assert len(told) > 1 and told == sorted(told)
    assert told[-1] == (9000, timing.total_time)


@pytest.mark.parametrize(
    ("protocol", "learners", "updates", "words"),
    [
        (KSync(k=5), 4, 10, "k-sync:k=5 waits for 5 distinct learners of 4"),
        (KBatchSync(k=5), 0, 10, "learners: expected at least 1, got 0"),
        (KBatchSync(k=5), 4, 0, "updates: expected at least 1, got 0"),
        (AdaSync("k-sync", 1, 60.0), 4, 1, "adasync:over=k-sync,k0=1,interval=60.0 follows the"),
        ("async", 4, 1, "expected a protocol, like async, got 'async'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    protocol: Any, learners: int, updates: int, words: str
) -> None:
    delays = KeyedDelays(0, MEMORYLESS, {}, max(1, learners))
    with pytest.raises(InvalidSetting, match=words):
        simulate(protocol, delays, learners, updates)


def test_without_numba_all_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = KeyedDelays(0, MEMORYLESS, {}, 4)
    expected = simulate(KAsync(k=2), delays, 4, 300_000)
    monkeypatch.setitem(sys.modules, "gruppetto.theory.timing_compiled", None)
    assert simulate(KAsync(k=2), delays, 4, 300_000) == expected
    with pytest.raises(InvalidSetting, match=r"install gruppetto\[fast\]"):
        simulate(KAsync(k=2), delays, 4, 10, compiled=True)


def test_simulating_does_not_wait_for_torch_nor_for_numba() -> None:
    code = (
        "import gruppetto.theory.timing, sys; sys.exit('torch' in sys.modules or "
        "'numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_result_is_a_plain_record() -> None:
    timing = simulate(KAsync(k=2), KeyedDelays(0, MEMORYLESS, {}, 4), 4, 100)
    assert isinstance(timing, Timing)
    for name, value in vars(timing).items():
        assert type(value) in (int, float), name
