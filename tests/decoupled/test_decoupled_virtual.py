"""The virtual engine: the bits of the smallest one, the times of the timeline, stops, failures."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import CPU, run
from test_module import deep, spec_of
from torch import Tensor

from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.module import Forwarded
from gruppetto.decoupled.network import Network
from gruppetto.decoupled.pass_times import PassTimes
from gruppetto.decoupled.schedule import COMPLETED, NetworkProgram, Schedule
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.decoupled.timeline import simulate
from gruppetto.engines.decoupled.virtual import VirtualModules
from gruppetto.errors import GruppettoError
from gruppetto.protocols.messages import (
    NOT_FINITE,
    Command,
    Event,
    ForwardFinished,
    ModuleUpdated,
    PassFailed,
    StopRequested,
)
from gruppetto.trace import ModuleRow
from gruppetto.training.learner import NotFinite
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.optimizers import parse_optimizer
from gruppetto.training.randomness import one_thread
from gruppetto.training.server import AppliedUpdate, Updating


class Recorder:
    """A journal that only remembers; it may ask for a stop after so many events."""

    def __init__(self, engine: VirtualModules, stop_after: int | None = None) -> None:
        self.engine = engine
        self.stop_after = stop_after
        self.events: list[tuple[float, Event]] = []
        self.rows: list[ModuleRow] = []

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        self.events.append((time, event))
        if isinstance(event, ModuleUpdated) and self.engine.rows:
            [row] = self.engine.rows
            self.rows.append(row)
            self.engine.rows.clear()

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        if len(self.events) == self.stop_after:
            self.engine.request_stop("asked")
            self.engine.request_stop("asked again")


@dataclass
class Fake:
    """A module whose payloads say whose they are."""

    number: int
    last: int
    version: int = 0
    flying: set[int] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    #: What goes wrong: pass or step -> error.
    fails: dict[str, Exception] = field(default_factory=dict)
    last_update: AppliedUpdate = field(default_factory=lambda: AppliedUpdate(0.1, (0.5,)))

    @property
    def in_flight(self) -> int:
        return len(self.flying)

    def _do(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]
        self.done.append(what)

    def forward(self, mini_batch: int, inputs: Any, batch: Any, num_samples: int) -> Forwarded:
        self._do(f"F{mini_batch}")
        assert inputs == (None if self.number == 1 else (self.number - 1, "F", mini_batch))
        is_end = self.number in (1, self.last)
        assert batch == (f"batch {mini_batch}" if is_end else None)
        assert num_samples == 7 + mini_batch
        self.flying.add(mini_batch)
        is_last = self.number == self.last
        payload: Any = None if is_last else (self.number, "F", mini_batch)
        return Forwarded(payload, 0.25 if is_last else None, self.version)

    def backward(self, mini_batch: int, gradients: Any) -> Any:
        self._do(f"B{mini_batch}")
        is_last = self.number == self.last
        assert gradients == (None if is_last else (self.number + 1, "B", mini_batch))
        self.flying.remove(mini_batch)
        return None if self.number == 1 else (self.number, "B", mini_batch)

    def step(self, mini_batch: int) -> None:
        self._do(f"S{mini_batch}")
        assert mini_batch == self.version
        self.version += 1


class FakeData:
    def __init__(self) -> None:
        self.fetched: list[int] = []

    def fetch(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
        self.fetched.append(mini_batch)
        return f"batch {mini_batch}", 7 + mini_batch


def _fakes(schedule: Schedule, version: int = 0) -> list[Fake]:
    last = schedule.num_modules
    modules = [Fake(k, last, version) for k in range(1, last + 1)]
    for module in modules:
        if version:
            ahead = version + schedule.delay(module.number)
            module.flying = set(range(version, min(ahead, schedule.num_mini_batches or ahead)))
    return modules


def _times(schedule: Schedule) -> PassTimes:
    return PassTimes.from_operations([1.0 + k for k in range(schedule.num_modules)])


def _run(
    schedule: Schedule, stop_after: int | None = None, max_time: float | None = None
) -> tuple[list[Fake], Recorder, str, FakeData]:
    modules, data = _fakes(schedule), FakeData()
    engine = VirtualModules(modules, data, schedule, _times(schedule), max_time=max_time)
    recorder = Recorder(engine, stop_after)
    return modules, recorder, engine.run(NetworkProgram(schedule), recorder), data


DELAYS = [(0,), (0, 0), (1, 0), (2, 1, 0), (4, 2, 0), (1, 1, 0)]


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("tail", ["drain", "drop"])
@pytest.mark.parametrize("barrier", [False, True])
def test_passes_come_at_the_times_of_the_simulation(
    delays: tuple[int, ...], tail: Any, barrier: bool
) -> None:
    schedule = Schedule(delays, 7, tail, barrier)
    modules, recorder, reason, data = _run(schedule)
    assert reason == COMPLETED
    times = _times(schedule)
    predicted = simulate(schedule, times.forward, times.backward)
    ends = {p.action: p.end for p in predicted.passes}
    for time, event in recorder.events:
        if isinstance(event, ForwardFinished):
            column = list(schedule.column(event.module))
            action = next(a for a in column if (a.kind, a.mini_batch) == ("F", event.mini_batch))
            assert time == ends[action]
    clock = [time for time, _ in recorder.events]
    assert clock == sorted(clock) and clock[-1] == predicted.makespan
    for module in modules:
        column = [str(a)[1:] for a in schedule.column(module.number)]
        assert [d for d in module.done if d[0] != "S"] == column
        own = [r for r in recorder.rows if r.module == module.number]
        assert [r.mini_batch for r in own] == list(range(schedule.last_version(module.number) or 0))
        assert [r.staleness for r in own] == [min(r.mini_batch, delays[module.number - 1])
                                              for r in own]  # fmt: skip
        assert all((r.learning_rate, r.factor) == (0.1, 0.5) for r in own)
        # All of a module's time is in its rows, up to its last update.
        spent = sum(
            r.forward + r.backward + r.waiting_for_inputs + r.waiting_for_gradients
            + r.waiting_for_others for r in own
        )  # fmt: skip
        assert not own or spent == pytest.approx(own[-1].time)
        assert max((r.in_flight for r in own), default=0) <= delays[module.number - 1]
    assert data.fetched == list(range(7)), "each mini-batch is fetched once"


def test_a_run_in_time_is_as_fast_as_predicted() -> None:
    schedule = Schedule((1, 0), 20)
    modules = _fakes(schedule)
    engine = VirtualModules(modules, FakeData(), schedule, PassTimes((0.5, 0.5), (1.0, 1.0)))
    recorder = Recorder(engine)
    engine.run(NetworkProgram(schedule), recorder)
    times = [row.time for row in recorder.rows if row.module == 2]
    assert times[-1] - times[-2] == 1.5
    assert engine.now() == 0.5 + 20 * 1.5 + 1.0


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(DELAYS),
    st.integers(1, 7),
    st.integers(1, 90),
    st.booleans(),
    st.sampled_from(["drain", "drop"]),
)
def test_a_stop_at_any_moment_ends_at_one_version(
    delays: tuple[int, ...], total: int, stop_after: int, barrier: bool, tail: Any
) -> None:
    schedule = Schedule(delays, total, tail, barrier)
    modules, recorder, reason, _ = _run(schedule, stop_after)
    told = [event for _, event in recorder.events if isinstance(event, StopRequested)]
    assert len(told) <= 1 and all(event.reason == "asked" for event in told)
    if reason == COMPLETED:
        return
    assert reason == "asked"
    [version] = {module.version for module in modules}
    rest = _fakes(schedule, version)
    engine = VirtualModules(rest, FakeData(), schedule, _times(schedule), time=50.0)
    sent = {
        k: {b: ((k, "F", b), 7 + b) for b in sorted(modules[k - 1].flying - modules[k].flying)}
        for k in range(1, len(modules))
    }
    engine.restore(sent)
    again = Recorder(engine)
    assert engine.run(NetworkProgram(schedule, version), again) == COMPLETED
    for before, after in zip(modules, rest, strict=True):
        column = [str(a)[1:] for a in schedule.column(before.number)]
        assert [d for d in before.done + after.done if d[0] != "S"] == column
    assert all(row.time > 50.0 for row in again.rows)
    rows = [*recorder.rows, *again.rows]
    assert all(r.staleness == schedule.staleness(r.module, r.mini_batch) for r in rows)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("delays", DELAYS)
def test_a_run_of_so_many_updates(delays: tuple[int, ...], barrier: bool) -> None:
    schedule = Schedule(delays, 9, barrier=barrier, updates=4)
    modules, recorder, reason, _ = _run(schedule)
    assert reason == "updates" and {module.version for module in modules} == {4}
    assert not [event for _, event in recorder.events if isinstance(event, StopRequested)]


def test_time_runs_out_once() -> None:
    schedule = Schedule((2, 1, 0))
    modules, recorder, reason, _ = _run(schedule, max_time=9.0)
    assert reason == "max-time"
    [version] = {module.version for module in modules}
    assert version >= 2
    [(time, _)] = [(t, e) for t, e in recorder.events if isinstance(e, StopRequested)]
    assert time == 9.0
    # What was begun is brought to one version.
    assert recorder.events[-1][0] > 9.0


@pytest.mark.parametrize("what", ["F2", "B1", "S1"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("error", [NotFinite("loss nan"), ValueError("two\nlines")])
def test_a_pass_that_raises_ends_the_run(what: str, number: int, error: Exception) -> None:
    schedule = Schedule((2, 1, 0), 6)
    modules = _fakes(schedule)
    modules[number - 1].fails = {what: error}
    engine = VirtualModules(modules, FakeData(), schedule, _times(schedule))
    recorder = Recorder(engine)
    is_nan = isinstance(error, NotFinite)
    reason = NOT_FINITE if is_nan else "ValueError: two lines"
    assert engine.run(NetworkProgram(schedule), recorder) == reason
    assert recorder.events[-1][1] == PassFailed(number, int(what[1:]), reason)
    assert set(engine.tracebacks) == (set() if is_nan else {number})
    assert is_nan or "ValueError: two" in engine.tracebacks[number]
    assert modules[number - 1].version <= int(what[1:])


def test_data_that_cannot_be_read_is_a_failure_of_module_1() -> None:
    class Broken(FakeData):
        def fetch(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
            if mini_batch == 2:
                raise OSError("the disk is gone")
            return super().fetch(mini_batch, device)

    schedule = Schedule((1, 0), 6)
    engine = VirtualModules(_fakes(schedule), Broken(), schedule, _times(schedule))
    reason = engine.run(NetworkProgram(schedule), Recorder(engine))
    assert reason == "OSError: the disk is gone" and 1 in engine.tracebacks


def test_a_program_that_tells_nobody_anything_is_found_out() -> None:
    class Silent:
        def handle(self, event: Event) -> list[Command]:
            return []

    schedule = Schedule((1, 0), 6)
    engine = VirtualModules(_fakes(schedule), FakeData(), schedule, _times(schedule))
    with pytest.raises(GruppettoError, match="nothing is left to happen"):
        engine.run(Silent(), Recorder(engine))


# ------------------------------------------------------------------- with real modules

NUM = 24
CUTS = ["1", "3"]


class Snapshots(Recorder):
    """Takes each module's state when its program has finished, as runs do."""

    def __init__(self, engine: VirtualModules, modules: Sequence[Any], program: NetworkProgram,
                 stop_after: int | None = None) -> None:  # fmt: skip
        super().__init__(engine, stop_after)
        self._modules, self._program = modules, program
        self.snapshots: dict[int, Snapshot] = {}
        self.losses: list[float] = []

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        super().record(event, commands, time)
        if isinstance(event, ForwardFinished) and event.loss is not None:
            self.losses.append(event.loss)
        for module in self._modules:
            number = module.number
            if self._program.modules[number - 1].finished and number not in self.snapshots:
                self.snapshots[number] = module.snapshot(with_state=True)


@one_thread()
def _train(
    spec: str, stop_after: int | None = None, since: dict[int, Snapshot] | None = None
) -> tuple[Network, Snapshots]:
    task, method = deep(), METHODS.parse(spec)
    mini_batches = MiniBatches(task, 16, 0)
    rules = Updating(parse_optimizer("sgd:lr=0.05,momentum=0.9,nesterov=true"))
    network = Network(task, method, CUTS, rules, 0, mini_batches, CPU)
    modules = [network.module(k) for k in range(1, method.modules + 1)]
    sent = {}
    if since is not None:
        sent = {m.number: m.restore(since[m.number], lambda b: mini_batches.fetch(b, CPU))
                for m in modules}  # fmt: skip
    schedule = Schedule(method.delays, NUM, barrier=method.schedule == "barrier")
    engine = VirtualModules(modules, mini_batches, schedule, _times(schedule).of(method))
    engine.restore(sent)
    program = NetworkProgram(schedule, modules[0].version)
    journal = Snapshots(engine, modules, program, stop_after)
    engine.run(program, journal)
    return network, journal


@functools.cache
def _whole(spec: str) -> tuple[str, list[float]]:
    """A run that nobody stops: its state and losses."""
    network, journal = _train(spec)
    return network.state_sha256(journal.snapshots), journal.losses


SPECS = ("bp", "ddg", "fr", "fdg:beta=0.7", "ddg:stash=none", "ddg:lookahead=0.5")


@pytest.mark.parametrize("method", SPECS)
def test_the_bits_of_the_smallest_engine(method: str) -> None:
    spec = spec_of(method)
    reference = run(deep(), spec, CUTS, NUM, optimizer="sgd:lr=0.05,momentum=0.9,nesterov=true")
    assert _whole(spec) == (reference.state, reference.losses)


def test_a_barrier_changes_no_bit() -> None:
    assert _whole("ddg:modules=3,schedule=barrier") == _whole("ddg:modules=3")


@pytest.mark.parametrize(
    ("method", "stop_after"), list(zip(SPECS, (29, 71, 40, 55, 62, 47), strict=True))
)
def test_stopped_and_gone_on_with_gives_the_same_bits(method: str, stop_after: int) -> None:
    spec = spec_of(method)
    _, first = _train(spec, stop_after)
    [version] = {s.version for s in first.snapshots.values()}
    assert 0 < version < NUM
    copied = {k: Snapshot.from_bytes(s.to_bytes()) for k, s in first.snapshots.items()}
    rest, second = _train(spec, since=copied)
    losses = first.losses + second.losses
    assert (rest.state_sha256(second.snapshots), losses) == _whole(spec)


def test_payloads_are_not_changed_by_who_receives_them() -> None:
    """Where they are handed over as they are, the sender's graph still needs them."""
    task = deep()
    mini_batches = MiniBatches(task, 16, 0)
    method = METHODS.parse("ddg:modules=3")
    rules = Updating(parse_optimizer("sgd:lr=0.05"))
    network = Network(task, method, CUTS, rules, 0, mini_batches, CPU)
    modules = [network.module(k) for k in (1, 2, 3)]
    schedule = Schedule(method.delays, 6)
    engine = VirtualModules(modules, mini_batches, schedule, _times(schedule))
    kept: list[tuple[Tensor, Tensor]] = []
    real = modules[0].forward

    def forward(*given: Any) -> Forwarded:
        forwarded = real(*given)
        kept.extend((t, t.clone()) for t in forwarded.outputs or ())
        return forwarded

    modules[0].forward = forward  # type: ignore[method-assign]
    engine.run(NetworkProgram(schedule), Recorder(engine))
    assert len(kept) == 6 and all(torch.equal(now, then) for now, then in kept)
