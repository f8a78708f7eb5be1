"""The reference engine by itself: its clock, its agenda, what it computes and what it keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gruppetto as gp
from gruppetto.delays import DELAYS, KeyedDelays
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.errors import GruppettoError, InvalidSetting
from gruppetto.protocols import PROTOCOLS, Coordinator
from gruppetto.protocols.messages import (
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Event,
    GradientPushed,
    LearnerJoined,
)
from gruppetto.testing import NullLearner, NullServer, NullWeights, reference
from gruppetto.trace import read_trace

HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
CELLS = ("k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2")


class NullRun:
    """A run of the virtual engine without tensors, and everything it did."""

    def __init__(
        self,
        protocol: str,
        learners: int,
        mini_batches: int | None,
        delay: str = "constant:value=1.0",
        *,
        laws: dict[int, str] | None = None,
        seed: int = 0,
        updates: int | None = None,
        max_time: float | None = None,
    ) -> None:
        self.coordinator = Coordinator(PROTOCOLS.parse(protocol), range(learners), mini_batches)
        self.server, self.learner = NullServer(), NullLearner()
        per_learner = {n: DELAYS.parse(law) for n, law in (laws or {}).items()}
        delays = KeyedDelays(seed, DELAYS.parse(delay), per_learner, learners)
        self.engine = VirtualEngine(self.server, self.learner, delays, learners, max_time=max_time)
        self.updates = updates
        self.log: list[tuple[float, Event, list[Command]]] = []
        self.update_times: list[float] = []
        self.most_versions = self.longest_agenda = 0

    def handle(self, event: Event) -> list[Command]:
        """The program."""
        return self.coordinator.handle(event)

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """The journal."""
        self.log.append((time, event, list(commands)))
        self.update_times += [time for c in commands if isinstance(c, ApplyUpdate)]

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """The journal."""
        self.most_versions = max(self.most_versions, len(self.engine.gradients.in_use()))
        self.longest_agenda = max(self.longest_agenda, len(self.engine._agenda))
        if self.server.version == self.updates:
            self.engine.request_stop("updates")

    def run(self) -> NullRun:
        """To the end."""
        self.reason = self.engine.run(self, self)
        return self

    def pushes(self) -> list[tuple[float, int]]:
        """(time, lease) of every push."""
        return [(t, e.lease) for t, e, _ in self.log if isinstance(e, GradientPushed)]

    def given(self) -> dict[int, tuple[float, Compute]]:
        """lease -> when it was given, and what it names."""
        return {c.lease: (t, c) for t, _, cs in self.log for c in cs if isinstance(c, Compute)}


# ------------------------------------------------------------- same, different


def _train(out: Path, **settings: Any) -> gp.Run:
    chosen = {"learners": 3, "delay": "exponential:mean=1.0", "progress": False, **settings}
    return gp.train(reference(), out=out, **chosen, engine="virtual")


@pytest.mark.parametrize("protocol", CELLS)
def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path, protocol: str) -> None:
    """All four hashes repeat with the seed, and all but none change with it."""
    first = _train(tmp_path / "a", protocol=protocol, seed=3).result
    again = _train(tmp_path / "b", protocol=protocol, seed=3).result
    other = _train(tmp_path / "c", protocol=protocol, seed=4).result
    assert [first[h] for h in HASHES] == [again[h] for h in HASHES]
    assert first["time"] == again["time"]
    for name in ("weights_sha256", "state_sha256", "events_sha256"):
        assert first[name] != other[name]


def test_delays_change_the_order_of_events_and_so_the_bits(tmp_path: Path) -> None:
    """The same seed under another law is another run of the same initial weights."""
    slow = _train(tmp_path / "a", protocol="async").result
    fast = _train(tmp_path / "b", protocol="async", delay="uniform:low=0.5,high=1.5").result
    assert slow["commands_sha256"] != fast["commands_sha256"]
    assert slow["weights_sha256"] != fast["weights_sha256"]


# ------------------------------------------------------------------- the clock


def test_hardsync_with_a_constant_delay_takes_updates_times_the_delay() -> None:
    """Not about: exactly, for a value that floats can add."""
    run = NullRun("hardsync", 4, 400, "constant:value=0.5").run()
    assert run.reason == "epochs"
    assert run.engine.now() == 100 * 0.5
    assert run.update_times == [0.5 * n for n in range(1, 101)]


def test_without_a_delay_a_mini_batch_takes_one_virtual_second(tmp_path: Path) -> None:
    """12 mini-batches, 3 learners, 4 updates of 1."""
    assert _train(tmp_path / "out", delay=None, protocol="hardsync").result["time"] == 4.0


def test_a_job_ends_its_slots_nth_delay_after_it_was_given() -> None:
    """End = start + the draw keyed by (seed, slot, n); cancelled jobs count as started."""
    run = NullRun("k-sync:k=2", 3, 60, "exponential:mean=1.0", seed=8).run()
    delays = KeyedDelays(8, DELAYS.parse("exponential:mean=1.0"), {}, 3)
    counts = [0, 0, 0]
    end = {}
    for lease, (start, compute) in sorted(run.given().items()):
        end[lease] = start + delays.draw(compute.learner, counts[compute.learner])
        counts[compute.learner] += 1
    assert all(time == end[lease] for time, lease in run.pushes())
    assert run.coordinator.num_cancelled > 10


def test_a_learner_with_a_law_of_its_own_is_the_slow_one() -> None:
    """Its jobs take 5, the others' 1; who pushes how often follows."""
    run = NullRun("async", 3, 110, laws={1: "constant:value=5.0"}).run()
    given = run.given()
    took: dict[int, set[float]] = {}
    for time, lease in run.pushes():
        start, compute = given[lease]
        took.setdefault(compute.learner, set()).add(time - start)
    assert took == {0: {1.0}, 1: {5.0}, 2: {1.0}}
    pushed = [given[lease][1].learner for _, lease in run.pushes()]
    assert pushed.count(1) == pytest.approx(110 / 11, abs=1)
    assert NullRun("async", 3, 110).run().engine.now() < run.engine.now()


def test_simultaneous_pushes_come_in_the_order_of_their_leases() -> None:
    """Four equal learners: all push at the same moments, lowest lease first."""
    run = NullRun("k-batch-async:k=3", 4, 40).run()
    pushes = run.pushes()
    assert pushes == sorted(pushes)
    assert {time for time, _ in pushes} == {float(n) for n in range(1, 11)}


def test_joins_come_first_and_in_order() -> None:
    """At time 0, even if a job takes no time at all."""
    run = NullRun("async", 3, 12, "constant:value=0.0").run()
    first = [event for _, event, _ in run.log[:3]]
    assert first == [LearnerJoined(0), LearnerJoined(1), LearnerJoined(2)]
    assert run.engine.now() == 0.0
    assert run.reason == "epochs"


def test_max_time_stops_at_that_time(tmp_path: Path) -> None:
    """What is due at the limit still happens; what is due after it does not."""
    run = NullRun("hardsync", 2, None, "constant:value=2.0", max_time=6.0).run()
    assert (run.reason, run.server.version, run.engine.now()) == ("max-time", 3, 6.0)
    run = NullRun("hardsync", 2, None, "constant:value=2.0", max_time=7.5).run()
    assert (run.reason, run.server.version, run.engine.now()) == ("max-time", 3, 7.5)
    result = _train(tmp_path / "out", epochs=None, max_time=3.0).result
    assert (result["stopped_by"], result["time"]) == ("max-time", 3.0)
    assert result["mini_batches_left"] == 3


# -------------------------------------------------- the numbers of the theory


@pytest.mark.parametrize(("k", "learners"), [(1, 4), (2, 4), (3, 4), (4, 4), (5, 8)])
def test_k_sync_takes_the_kth_of_p_per_update(k: int, learners: int) -> None:
    """E[X_{K:P}] of exponential delays is the sum of 1/i over i = P-K+1..P; 3,000 updates."""
    run = NullRun(
        f"k-sync:k={k}", learners, None, "exponential:mean=1.0", updates=3000, seed=1
    ).run()
    expected = sum(1.0 / i for i in range(learners - k + 1, learners + 1))
    assert run.engine.now() / 3000 == pytest.approx(expected, rel=0.05)
    assert set(run.server.staleness) == {0}


@pytest.mark.parametrize("law", ["exponential:mean=1.0", "uniform:low=0.5,high=1.5"])
@pytest.mark.parametrize(("k", "learners"), [(1, 4), (2, 4), (3, 8)])
def test_mean_staleness_is_that_of_the_closed_forms(k: int, learners: int, law: str) -> None:
    """(P-K)/K for k-async and (P-1)/K for k-batch-async, whatever the law."""
    for name, late in (("k-async", learners - k), ("k-batch-async", learners - 1)):
        run = NullRun(f"{name}:k={k}", learners, None, law, updates=2000, seed=2).run()
        mean = sum(run.server.staleness) / len(run.server.staleness)
        assert mean == pytest.approx(late / k, rel=0.02)


def test_k_batch_async_takes_k_pth_of_a_job_per_update() -> None:
    """K·E[X]/P: nobody ever waits."""
    run = NullRun(
        "k-batch-async:k=3", 4, None, "uniform:low=0.5,high=1.5", updates=2000, seed=3
    ).run()
    assert run.engine.now() / 2000 == pytest.approx(3 / 4, rel=0.02)


# ---------------------------------------------------------- work and memory


@pytest.mark.parametrize("protocol", CELLS)
def test_a_cancelled_gradient_is_never_computed(protocol: str) -> None:
    """As many computations as pushes, each for an open lease."""
    run = NullRun(protocol, 4, 100, "exponential:mean=1.0").run()
    cancelled = {c.lease for _, _, cs in run.log for c in cs if isinstance(c, Cancel)}
    pushed = [lease for _, lease in run.pushes()]
    assert len(run.learner.computed) == len(pushed) == len(run.server.applied) == 100
    assert not cancelled & set(pushed)
    assert bool(cancelled) == PROTOCOLS.parse(protocol).cell.cancels


@pytest.mark.parametrize("protocol", [*CELLS, "async", "hardsync", "softsync:n=2"])
def test_a_version_is_freed_when_nobody_holds_it(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the newest, one per learner and one per held gradient; none once it is over."""
    made: weakref.WeakSet[NullWeights] = weakref.WeakSet()
    snapshot = NullServer.snapshot

    def watched(server: NullServer) -> NullWeights:
        weights = snapshot(server)
        made.add(weights)
        return weights

    monkeypatch.setattr(NullServer, "snapshot", watched)
    run = NullRun(protocol, 4, 200, "exponential:mean=1.0", seed=5).run()
    k = PROTOCOLS.parse(protocol).num_to_wait(4)
    assert run.most_versions <= 4 + k + 1
    if PROTOCOLS.parse(protocol).cell.cancels:
        assert run.most_versions == 1
    else:
        assert run.most_versions > 1
    gc.collect()
    assert {weights.version for weights in made} == {run.server.version}


@pytest.mark.parametrize("protocol", CELLS)
def test_the_agenda_does_not_grow(protocol: str) -> None:
    """At most one job per learner is waited for, however many were cancelled before."""
    run = NullRun(protocol, 4, 2000, "exponential:mean=1.0").run()
    assert run.longest_agenda <= 50


def test_the_agenda_does_not_grow_with_cancelled_jobs_far_in_the_future() -> None:
    """A learner that takes a million seconds is cancelled each second; its jobs are forgotten."""
    laws = {0: "constant:value=1000000.0"}
    run = NullRun("k-sync:k=2", 3, 4000, laws=laws).run()
    assert run.coordinator.num_cancelled == 2000 - 1
    assert run.longest_agenda <= 200


def test_too_much_memory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """In a sentence that says how much, and what to do."""
    with pytest.raises(InvalidSetting, match=r"this run needs about .* GiB") as caught:
        _train(tmp_path / "out", memory=1e-9)
    assert "use fewer learners, a smaller k, or raise memory" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_program_that_waits_for_what_cannot_come_is_an_error() -> None:
    """It gives nobody work: the engine says so, it does not hang."""

    class Deaf:
        def handle(self, event: Event) -> list[Command]:
            return []

    run = NullRun("async", 2, 4)
    with pytest.raises(GruppettoError, match="nothing is left to happen although learners"):
        run.engine.run(Deaf(), run)


def test_the_first_reason_to_stop_is_the_one_recorded() -> None:
    """A second request changes nothing."""
    run = NullRun("async", 2, 40, updates=5)
    carried_out = run.carried_out

    def twice(*args: Any) -> None:
        carried_out(*args)
        if run.server.version == 5:
            run.engine.request_stop("later")

    run.carried_out = twice  # type: ignore[assignment,method-assign]
    assert run.run().reason == "updates"
    assert run.server.version == 5


def test_event_times_in_the_trace_are_virtual(tmp_path: Path) -> None:
    """Whole seconds with a constant delay of one, and wall times beside them."""
    run = _train(tmp_path / "out", delay="constant:value=1.0", protocol="hardsync")
    trace = read_trace(run.folder.trace)
    assert [row.time for row in trace.updates] == [1.0, 2.0, 3.0, 4.0]
    assert [row.time for row in trace.evaluations] == [2.0, 4.0]
    assert all(row.wall_time > 0 for row in trace.events)
