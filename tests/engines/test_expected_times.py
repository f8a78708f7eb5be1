"""What updates take by the delays drawn: equal to virtual time, and of the run's own draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import local_tasks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gruppetto as gp
from gruppetto.delays import DELAYS, KeyedDelays
from gruppetto.engines.faults import FaultPlan
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.protocols import PROTOCOLS, Coordinator
from gruppetto.protocols.messages import (
    ApplyUpdate,
    Command,
    Compute,
    Event,
    GradientFailed,
    LearnerJoined,
    LearnerLost,
)
from gruppetto.runs.execute import Run
from gruppetto.runs.expected import RoundTimes, expected_update_time
from gruppetto.runs.folder import RunFolder
from gruppetto.testing.checks import tell
from gruppetto.trace import EventRow

LAWS = (
    "constant:value=1",
    "exponential:mean=1",
    "shifted-exponential:shift=0.5,mean=0.5",
    "pareto:shape=2.5,scale=0.6",
    "bimodal:fast=1,slow=2,p_slow=0.5",
    "regimes:fast=1,slow=4,jobs=3",
)
CANCELLING = ("hardsync", "k-sync:k={}", "k-batch-sync:k={}", "backup:b={}", "rennala:k={}")
GOING_ON = ("k-async:k={}", "k-batch-async:k={}", "softsync:n={}", "async")


class Nothing:
    """A server, a learner and its gradient: this is about times alone."""

    needs_past = False
    loss = 1.0
    num_samples = 1

    def snapshot(self) -> None:
        return None

    def apply(self, *_: Any) -> None:
        pass

    def compute(self, *_: Any) -> Nothing:
        return self


class Longer:
    """Delays that each take up to so much more, as jobs of real processes do."""

    def __init__(self, delays: KeyedDelays, most: float) -> None:
        self._delays = delays
        self._most = most

    def draw(self, slot: int, n: int) -> float:
        return self._delays.draw(slot, n) + self._most * ((7 * slot + 3 * n) % 5) / 4


class Watch:
    """Tells a RoundTimes everything; keeps when updates were and what had been started."""

    def __init__(self, rounds: RoundTimes | None, num_learners: int) -> None:
        self._rounds = rounds
        self.enough: Callable[[int], object] = id
        self._started = [0] * num_learners
        self.times: list[float] = []
        self.sizes: list[int] = []
        #: Jobs started on each slot before each round, and whether it saw a failure.
        self.begun = [[0] * num_learners]
        self.failed = [False]

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        pass

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        if self._rounds is not None:
            self._rounds.take(event, commands)
        self.failed[-1] |= isinstance(event, GradientFailed)
        for command in commands:
            if isinstance(command, Compute):
                self._started[command.learner] += 1
            elif isinstance(command, ApplyUpdate):
                self.times.append(time)
                self.sizes.append(len(command.contributions))
                self.begun.append(list(self._started))
                self.failed.append(False)
                self.enough(len(self.times))

    def rounds(self) -> list[tuple[list[int], int]]:
        """Jobs started before each round, and the size of its update."""
        return list(zip(self.begun, self.sizes, strict=False))


def virtual(
    protocol: str,
    law: str,
    learners: int,
    seed: int,
    num_mini_batches: int | None,
    *,
    updates: int | None = None,
    longer: float = 0.0,
    faults: FaultPlan | None = None,
    **more: Any,
) -> tuple[RoundTimes, Watch, KeyedDelays]:
    """A run, its rounds told by delays that may be shorter than those it takes."""
    delays = KeyedDelays(seed, DELAYS.parse(law), {}, learners)
    coordinator = Coordinator(PROTOCOLS.parse(protocol), range(learners), num_mini_batches, **more)
    rounds = RoundTimes(delays, coordinator, learners)
    watch = Watch(rounds, learners)
    taken: Any = Longer(delays, longer) if longer else delays
    engine = VirtualEngine(Nothing(), Nothing(), taken, learners, faults=faults)
    if updates is not None:
        watch.enough = lambda done: engine.request_stop("enough") if done == updates else None
    assert engine.run(coordinator, watch) == ("epochs" if updates is None else "enough")
    return rounds, watch, delays


@st.composite
def runs(draw: st.DrawFn, names: Sequence[str]) -> dict[str, Any]:
    learners = draw(st.integers(1, 6))
    name = draw(st.sampled_from(names))
    most = learners
    if name.startswith(("k-batch", "rennala")):
        most = 2 * learners
    elif name.startswith("backup"):
        most = learners - 1
    least = 0 if name.startswith("backup") else 1
    return {
        "protocol": name.format(draw(st.integers(least, most))),
        "law": draw(st.sampled_from(LAWS)),
        "learners": learners,
        "seed": draw(st.integers(0, 2**31)),
        "num_mini_batches": draw(st.integers(1, 60)),
    }


# ---------------------------------------------------------------- virtual time


@settings(max_examples=300, deadline=None)
@given(
    chosen=runs(CANCELLING),
    on_late=st.sampled_from(["requeue", "drop"]),
    warmup=st.integers(0, 20),
)
def test_rounds_take_what_virtual_time_says(
    chosen: dict[str, Any], on_late: str, warmup: int
) -> None:
    """To rounding, the tail of the run and a warm-up included."""
    rounds, watch, _ = virtual(**chosen, on_late=on_late, warmup_mini_batches=warmup)
    assert rounds.mean == pytest.approx(watch.times[-1] / len(watch.times), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(chosen=runs(GOING_ON), updates=st.integers(1, 40), warmup=st.sampled_from([None, 1]))
def test_simulated_runs_take_what_virtual_time_says(
    chosen: dict[str, Any], updates: int, warmup: int | None
) -> None:
    """Cells that go on, after a warm-up too."""
    learners, total = chosen["learners"], chosen["num_mini_batches"]
    coordinator = Coordinator(
        PROTOCOLS.parse(chosen["protocol"]), range(learners), total,
        warmup_mini_batches=5 if warmup else 0,
    )  # fmt: skip
    delays = KeyedDelays(chosen["seed"], DELAYS.parse(chosen["law"]), {}, learners)
    parts: Any = SimpleNamespace(
        settings=SimpleNamespace(
            protocol=chosen["protocol"], learners=learners, modulation="none", on_late="requeue",
            max_attempts=3, max_given_up=0, guard="off", engine="local",
            warmup="hardsync:epochs=1" if warmup else None,
        ),
        has_delays=True, coordinator=coordinator, delays=delays,
        mini_batches=SimpleNamespace(per_epoch=5),
    )  # fmt: skip
    assert RoundTimes.of(parts) is None
    watch = Watch(None, learners)
    VirtualEngine(Nothing(), Nothing(), delays, learners).run(coordinator, watch)
    updates = min(updates, len(watch.times))
    told = expected_update_time(parts, {"updates": updates, "learners_lost": 0}, None)
    assert told == pytest.approx(watch.times[updates - 1] / updates, rel=1e-9)


# ------------------------------------------------------- the draws that were taken


def by_hand(protocol: str, delays: KeyedDelays, begun: Sequence[int], size: int) -> float:
    """When the size-th arrives, where mini-batches do not run out."""
    distinct = PROTOCOLS.parse(protocol).cell.distinct
    arrivals = []
    for slot, n in enumerate(begun):
        time = 0.0
        for job in range(1 if distinct else size):
            time += delays.draw(slot, n + job)
            arrivals.append(time)
    return sorted(arrivals)[size - 1]


@settings(max_examples=100, deadline=None)
@given(chosen=runs(CANCELLING), longer=st.sampled_from([0.01, 0.3, 2.0]))
def test_rounds_are_of_the_draws_that_the_run_took(chosen: dict[str, Any], longer: float) -> None:
    """However its jobs came in, each round is told from where the run really was."""
    endless = {**chosen, "num_mini_batches": None}
    rounds, watch, delays = virtual(**endless, updates=30, longer=longer)
    told = [by_hand(chosen["protocol"], delays, *round_) for round_ in watch.rounds()]
    took = [after - before for before, after in pairwise([0.0, *watch.times])]
    assert len(told) == 30
    assert rounds.mean == pytest.approx(sum(told) / 30, rel=1e-9)
    assert all(t <= real + 1e-9 for t, real in zip(told, took, strict=True))


def test_where_the_run_parts_from_virtual_time_the_run_counts() -> None:
    """Jobs that take a little longer let others be cancelled: from there on it takes other draws
    than the same run in virtual time."""
    chosen = {"law": LAWS[1], "learners": 4, "seed": 5, "num_mini_batches": None, "updates": 50}
    same, alike, _ = virtual("k-batch-sync:k=4", **chosen)
    other, watch, _ = virtual("k-batch-sync:k=4", **chosen, longer=0.05)
    assert watch.begun[0] == alike.begun[0] and watch.begun[50] != alike.begun[50]
    assert other.mean != same.mean


def test_rounds_with_failures_are_left_out() -> None:
    """What is told is of the others alone."""
    faults, protocol = FaultPlan(seed=3, fail=0.05), "k-batch-sync:k=3"
    rounds, watch, delays = virtual(
        protocol, LAWS[1], 4, 2, None, updates=50, faults=faults, max_attempts=50
    )
    told = [
        by_hand(protocol, delays, *round_)
        for round_, failed in zip(watch.rounds(), watch.failed, strict=False)
        if not failed
    ]
    assert 20 < len(told) < 50
    assert rounds.mean == pytest.approx(sum(told) / len(told), rel=1e-9)


@pytest.mark.parametrize("kind", ["late", "duplicate"])
def test_what_comes_too_late_breaks_no_round(kind: str) -> None:
    """A gradient or failure of a lease that is closed changes nothing."""
    faults = FaultPlan(seed=3, **{kind: 0.3})
    rounds, watch, delays = virtual("k-sync:k=2", LAWS[1], 4, 2, None, updates=50, faults=faults)
    told = [by_hand("k-sync:k=2", delays, *round_) for round_ in watch.rounds()]
    assert rounds.mean == pytest.approx(sum(told) / 50, rel=1e-9)


# ----------------------------------------------------------------- real processes


def train(out: Path, task: str | None = None, **settings: Any) -> Run:
    """Three learners with delays, no evaluation."""
    chosen = {
        "engine": "local", "learners": 3, "progress": False, "evaluate": "off",
        "delay": "exponential:mean=0.01", **settings,
    }  # fmt: skip
    return gp.train(task or local_tasks.name("even"), out=out, **chosen)


def told_from_trace(run: Run, total: int) -> RoundTimes:
    """By its trace, from beginning to end: of a run that nothing interrupted."""
    story = tell(run.folder.path, total)
    delays = KeyedDelays(story.settings.seed, DELAYS.parse("exponential:mean=0.01"), {}, 3)
    coordinator = Coordinator(PROTOCOLS.parse(story.settings.protocol), range(3), total)
    rounds = RoundTimes(delays, coordinator, 3)
    for event, _ in story.log:
        rounds.take(event, coordinator.handle(event))
    return rounds


@pytest.mark.parametrize("protocol", ["hardsync", "k-batch-sync:k=4"])
def test_a_run_tells_what_its_draws_would_have_taken(tmp_path: Path, protocol: str) -> None:
    run = train(tmp_path / "out", protocol=protocol)
    total = 3 * local_tasks.BATCHES_PER_EPOCH
    rounds = told_from_trace(run, total)
    assert rounds.state()["rounds"] == run.result["updates"]
    assert run.result["expected_update_time"] == rounds.mean
    assert 0 < run.result["expected_update_time"] <= run.result["mean_update_time"]


@pytest.mark.parametrize("row", [1, 8, 13])
def test_a_resumed_run_goes_on_telling(tmp_path: Path, row: int) -> None:
    """Without the round that was broken off; the others are by the draws of each slot."""
    out, protocol = tmp_path / "out", "k-sync:k=2"

    def stop(event: Any) -> bool:
        return isinstance(event, EventRow) and event.row >= row

    train(out, protocol=protocol, epochs=50, updates=9, on_event=stop)
    saved, _, plain = RunFolder(out).load_checkpoint()
    run = gp.resume(out, progress=False)
    story = tell(run.folder.path, 50 * local_tasks.BATCHES_PER_EPOCH)
    delays = KeyedDelays(story.settings.seed, DELAYS.parse("exponential:mean=0.01"), {}, 3)
    begun, started = [[0] * 3], [0] * 3
    is_broken, told = [False], []
    for number, (event, commands) in enumerate(story.log):
        if isinstance(event, LearnerLost):
            is_broken[-1] = True
        if number == saved + 1:
            started = list(plain["jobs_started"])
        for command in commands:
            if isinstance(command, Compute) and (number <= saved or command.learner >= 3):
                started[command.learner % 3] += 1
            elif isinstance(command, ApplyUpdate):
                if not is_broken[-1]:
                    told.append(by_hand(protocol, delays, begun[-1], len(command.contributions)))
                begun.append(list(started))
                is_broken.append(False)
    joined = {e.learner for e, _ in story.log if isinstance(e, LearnerJoined)}
    assert {3, 4, 5} <= joined
    assert sum(is_broken) == 1 and len(told) >= 7
    assert run.result["learners_lost"] == 3
    assert run.result["expected_update_time"] == pytest.approx(sum(told) / len(told), rel=1e-9)


def test_a_run_that_lost_a_learner_does_not_tell(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = train(out, local_tasks.name("dies", marks=tmp_path), protocol="hardsync")
    assert run.result["learners_lost"] > 0
    assert run.result["expected_update_time"] is None


@pytest.mark.parametrize("protocol", ["hardsync", "async"])
def test_nothing_is_told_without_delays(tmp_path: Path, protocol: str) -> None:
    run = train(tmp_path / "out", protocol=protocol, delay=None)
    assert run.result["expected_update_time"] is None
