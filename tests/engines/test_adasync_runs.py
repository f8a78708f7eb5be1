"""Runs that measure progress and adapt K: in virtual time, replayed, resumed, with processes."""

from __future__ import annotations

import bisect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.engines.local import engine as local_engine
from gruppetto.engines.local.engine import LocalEngine
from gruppetto.engines.local.memory import MemoryPlan
from gruppetto.engines.local.wire import pair
from gruppetto.engines.measuring import Measuring
from gruppetto.errors import InvalidSetting, RunFailed
from gruppetto.protocols.adaptive import Over
from gruppetto.protocols.messages import (
    GradientFailed,
    ProgressMeasured,
    StopRequested,
)
from gruppetto.testing import reference
from gruppetto.trace import EventRow, Row, read_trace

OVERS = get_args(Over)
HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
FAULTS = "random:seed={},die=0.06,hang=0.06,late=0.1,duplicate=0.1,reorder=0.1,fail=0.05"


def adasync(over: str, interval: float, k0: int = 1) -> str:
    return f"adasync:over={over},k0={k0},interval={interval}"


def train(out: Path, task: Any = None, **settings: Any) -> gp.Run:
    """Three learners, three epochs of 6 mini-batches, in virtual time."""
    chosen = {
        "engine": "virtual",
        "learners": 3,
        "epochs": 3,
        "delay": "exponential:mean=1.0",
        "progress": False,
        **settings,
    }
    return gp.train(reference() if task is None else task, out=out, **chosen)


def measurements(run: gp.Run) -> list[tuple[float, float | None]]:
    """(run time, loss) of each."""
    rows = [row for row in read_trace(run.folder.trace).events if row.type == "ProgressMeasured"]
    return [(row.time, row.decode().loss) for row in rows]  # type: ignore[union-attr]


def easy_task(loss: Any = None) -> gp.Task:
    """Five classes of 44 samples, told apart after a few updates."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (44,), generator=generator)
    features = 4.0 * nn.functional.one_hot(labels, 5) + torch.randn(44, 5, generator=generator)
    return gp.Task(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
        train=TensorDataset(features, labels),
        loss=loss,
        optimizer="sgd:lr=0.5",
        batch_size=8,
    )


def hashes(run: gp.Run) -> list[str]:
    return [run.result[key] for key in HASHES]


class At:
    """Asks a run to stop when an event row with a number is written."""

    def __init__(self, row: int) -> None:
        self.row = row

    def __call__(self, row: Row) -> bool:
        return isinstance(row, EventRow) and row.row == self.row


# ------------------------------------------------------------------- K grows, and when


@pytest.mark.parametrize("over", OVERS)
def test_k_grows_while_something_is_learned(tmp_path: Path, over: str) -> None:
    """From one gradient per update to several, never more than the loss measured last allows."""
    run = train(
        tmp_path / "out",
        easy_task(),
        protocol=adasync(over, 1.5),
        learners=8,
        epochs=20,
    )
    trace = read_trace(run.folder.trace)
    times, losses = zip(*measurements(run), strict=True)
    protocol: Any = gp.AdaSync(over, 1, 1.5)  # type: ignore[arg-type]
    by_hand = [(protocol := protocol.measured(loss, 8)).k for loss in losses]
    sizes = [len(row.staleness) for row in trace.updates]
    assert (by_hand[0], sizes[0]) == (1, 1)
    assert by_hand[-1] >= 3
    # The last updates, which wait for what is left, may be smaller.
    for row, size in zip(trace.updates[:-8], sizes, strict=False):
        assert size == by_hand[bisect.bisect(times, row.time) - 1], f"update {row.version}"


def test_measured_at_the_start_and_at_every_multiple(tmp_path: Path) -> None:
    """Before any update, exactly on time, and not after the last push."""
    run = train(tmp_path / "out", protocol=adasync("k-async", 0.7))
    times = [time for time, _ in measurements(run)]
    assert times == [0.7 * n for n in range(len(times))]
    assert 0 <= run.result["time"] - times[-1] <= 0.7
    assert read_trace(run.folder.trace).updates[0].time > 0
    assert len({loss for _, loss in measurements(run)}) > 3


def test_pushes_of_the_same_moment_come_after_a_measurement(tmp_path: Path) -> None:
    """Constant delays of 1 s: joins and the measurement at 0, the one at 1 s before its pushes."""
    run = train(
        tmp_path / "out", protocol=adasync("k-sync", 1), delay="constant:value=1.0", epochs=1
    )
    rows = [(row.time, row.type) for row in read_trace(run.folder.trace).events]
    assert [kind for time, kind in rows if time == 0] == 3 * ["LearnerJoined"] + [
        "ProgressMeasured"
    ]
    assert [kind for time, kind in rows if time == 1][:2] == ["ProgressMeasured", "GradientPushed"]


def test_other_runs_are_not_measured(tmp_path: Path) -> None:
    assert measurements(train(tmp_path / "out", protocol="k-async:k=2")) == []


def test_a_run_without_end_stops_at_its_time(tmp_path: Path) -> None:
    """The measurement at the limit itself is made; none keeps the run alive."""
    run = train(tmp_path / "out", protocol=adasync("k-async", 1.0), epochs=None, max_time=6.0)
    assert (run.result["stopped_by"], run.result["time"]) == ("max-time", 6.0)
    assert [time for time, _ in measurements(run)] == [0, 1, 2, 3, 4, 5, 6]


def test_nothing_is_measured_when_all_learners_are_lost(tmp_path: Path) -> None:
    kills: dict[str, Any] = {"faults": "random:seed=1,die=1.0,rejoin=0.0"}
    with pytest.raises(gp.LearnersLost):
        train(tmp_path / "out", protocol=adasync("k-sync", 0.5), max_given_up=9, **kills)
    rows = read_trace(tmp_path / "out" / "trace").events
    assert [row.type for row in rows[-2:]] == ["LearnerLost", "StopRequested"]


def test_a_warmup_is_measured_and_ends_as_it_would(tmp_path: Path) -> None:
    """Three at a time for an epoch, then as K of the losses since the start says."""
    settings: dict[str, Any] = {"learners": 3, "warmup": "hardsync:epochs=1"}
    run = train(tmp_path / "out", protocol=adasync("k-batch-async", 0.5), **settings)
    sizes = [len(row.staleness) for row in read_trace(run.folder.trace).updates]
    assert sizes[:2] == [3, 3]
    assert sizes[2] == 1
    assert measurements(run)[0][0] == 0
    assert gp.replay(tmp_path / "out", progress=False)["matches"]


# ----------------------------------------------------------------- measuring itself


@pytest.mark.parametrize("learners", [1, 3])
def test_measuring_moves_nothing(tmp_path: Path, learners: int) -> None:
    """BatchNorm, dropout, noise from numpy: a run whose K stays 1 has the bits of k = 1."""
    plain = train(tmp_path / "a", protocol="k-sync:k=1", learners=learners)
    # The loss of three epochs of this task falls by less than what makes K 2.
    run = train(tmp_path / "b", protocol=adasync("k-sync", 0.3), learners=learners)
    assert len(measurements(run)) > 10
    assert [len(row.staleness) for row in read_trace(run.folder.trace).updates] == 18 * [1]
    for key in ("weights_sha256", "state_sha256", "time", "test_loss"):
        assert run.result[key] == plain.result[key], key


def test_the_loss_is_the_mean_over_the_training_set(tmp_path: Path) -> None:
    """Of 44 samples all are measured; at the end the weights are those of the model returned."""
    task = easy_task()
    features, labels = task.train.tensors
    settings: dict[str, Any] = {"task": task, "protocol": adasync("k-sync", 1.0)}
    events = read_trace(train(tmp_path / "whole", **settings).folder.trace).events
    last = [row.row for row in events if row.type == "ProgressMeasured"][-1]
    run = train(tmp_path / "out", on_event=At(last), **settings)
    assert read_trace(run.folder.trace).events[-2].type == "ProgressMeasured"
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(run.model(features), labels))
    assert measurements(run)[-1][1] == pytest.approx(loss, rel=1e-6)


def test_a_loss_that_is_not_finite_is_none_and_leaves_k(tmp_path: Path) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        if not outputs.requires_grad:  # as it is measured
            return torch.tensor(float("nan"))
        return nn.functional.cross_entropy(outputs, batch[-1])

    task = easy_task(loss)
    run = train(tmp_path / "out", task, protocol=adasync("k-batch-sync", 0.5))
    assert {loss for _, loss in measurements(run)} == {None}
    assert {len(row.staleness) for row in read_trace(run.folder.trace).updates} == {1}
    assert gp.replay(tmp_path / "out", task=task, progress=False)["matches"]


def test_a_task_that_cannot_be_measured_fails_the_run(tmp_path: Path) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        if not outputs.requires_grad:
            raise ValueError("this is no time\nfor measuring")
        return nn.functional.cross_entropy(outputs, batch[-1])

    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "out", easy_task(loss), protocol=adasync("k-sync", 0.5))
    assert str(caught.value) == (
        "measuring the loss on 44 training samples failed: ValueError: this is no time for "
        f"measuring; the run is in {tmp_path / 'out'}"
    )


# --------------------------------------------------------------- replayed and resumed


def test_another_loss_in_the_trace_is_a_mismatch(tmp_path: Path) -> None:
    """Also where K comes out the same."""
    train(tmp_path / "out", protocol=adasync("k-sync", 1.0))
    path = tmp_path / "out" / "trace" / "000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    number = next(i for i, row in enumerate(rows) if row.get("type") == "ProgressMeasured")
    rows[number]["event"]["loss"] += 1e-9
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    replayed = gp.replay(tmp_path / "out", progress=False)
    assert not replayed["matches"]
    assert (
        f"event row {rows[number]['row']} says loss {rows[number]['event']['loss']!r}, and it"
        in (replayed["difference"])
    )


@pytest.mark.parametrize("over", OVERS)
def test_stopped_at_any_row_and_resumed(tmp_path: Path, over: str) -> None:
    """Before, at and after measurements: the bits, rows and times of a run never stopped."""
    settings: dict[str, Any] = {"protocol": adasync(over, 0.9), "task": easy_task()}
    whole = train(tmp_path / "whole", **settings)
    events = read_trace(whole.folder.trace).events
    first = next(row.row for row in events if row.type == "ProgressMeasured" and row.row > 6)
    assert max(len(row.staleness) for row in read_trace(whole.folder.trace).updates) > 1
    for row in (0, 3, first - 1, first, first + 1, len(events) - 2):
        out = tmp_path / str(row)
        assert train(out, on_event=At(row), **settings).result["stopped_by"] == "callback"
        resumed = gp.resume(out, task=settings["task"], progress=False)
        assert hashes(resumed) == hashes(whole), f"row {row}"
        assert measurements(resumed) == measurements(whole)
        assert gp.replay(out, task=settings["task"], progress=False)["matches"]


@pytest.mark.parametrize("over", ["k-async", "k-batch-sync"])
def test_resumed_under_a_fault_plan(tmp_path: Path, over: str) -> None:
    settings: dict[str, Any] = {
        "protocol": adasync(over, 1.3),
        "faults": FAULTS.format(2),
        "max_given_up": 100,
        "learners": 4,
    }
    whole = train(tmp_path / "whole", **settings)
    assert whole.result["learners_lost"] > 0
    for row in range(4, len(read_trace(whole.folder.trace).events) - 1, 9):
        train(tmp_path / str(row), on_event=At(row), **settings)
        resumed = gp.resume(tmp_path / str(row), progress=False)
        assert hashes(resumed) == hashes(whole), f"row {row}"


def test_a_resumed_trace_must_have_its_measurements(tmp_path: Path) -> None:
    """One that is missing is not passed over."""
    out = tmp_path / "out"
    train(out, protocol=adasync("k-sync", 1.0), on_event=At(12))
    path = out / "trace" / "000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    at = [i for i, row in enumerate(rows) if row.get("type") == "ProgressMeasured"][1]
    # Nothing follows from a failure of a lease that is closed, so the decisions stay the same.
    rows[at] |= {"type": "GradientFailed", "event": {"lease": 0, "reason": "bad data"}}
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    with pytest.raises(gp.GruppettoError, match="expected the trace to go on with a measurement"):
        gp.resume(out, progress=False)


# ------------------------------------------------------------------------ what it needs


def test_memory_counts_all_learners(tmp_path: Path) -> None:
    """K may come to hold a gradient of each of 60, though it begins with one."""
    common: dict[str, Any] = {"learners": 60, "memory": 1e-4}
    train(tmp_path / "fits", protocol="k-sync:k=1", **common)
    with pytest.raises(InvalidSetting, match="this run needs about"):
        train(tmp_path / "out", protocol=adasync("k-sync", 1.0), **common)


# ------------------------------------------------------------------------ real processes


@pytest.mark.parametrize("over", ["k-async", "k-batch-async"])
def test_real_processes_adapt_and_their_trace_replays(tmp_path: Path, over: str) -> None:
    """Losses of the server's process come out the same here; at most one in an interval."""
    run = train(
        tmp_path / "out",
        "digits",
        engine="local",
        protocol=adasync(over, 0.02),
        delay="exponential:mean=0.002",
        learners=3,
        epochs=2,
    )
    taken = measurements(run)
    assert taken[0][0] < read_trace(run.folder.trace).updates[0].time
    assert len(taken) >= 3
    numbers = [int(time / 0.02 + 1e-9) for time, _ in taken]
    assert numbers == sorted(set(numbers))
    assert run.result["expected_update_time"] is None
    assert max(len(row.staleness) for row in read_trace(run.folder.trace).updates) > 1
    replayed = gp.replay(tmp_path / "out", progress=False)
    assert replayed["matches"], replayed["difference"]


class Clock:
    """A clock that only moves when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(local_engine.time, "perf_counter", lambda: self.now)


def test_run_time_stands_still_while_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes 5 s, and the next measurement is still 2 s of run time away."""
    clock = Clock(monkeypatch)

    def measure() -> float:
        clock.now += 5.0
        return 0.25

    ours, theirs = pair()
    with ours, theirs:
        memory: Any = SimpleNamespace(plan=MemoryPlan.for_run(1, 1))
        server: Any = SimpleNamespace(needs_past=False)
        engine = LocalEngine(server, memory, None, theirs, 0, 7.5, Measuring(2.0, measure))
        monkeypatch.setattr(engine._versions, "publish", lambda version, server: None)
        engine.start()
        engine._num_coming = 1  # somebody is expected, so nobody stops the run
        looked: list[float | None] = []

        def look(timeout: float | None) -> None:
            looked.append(timeout)
            clock.now += 3.0 if timeout is None else timeout

        monkeypatch.setattr(engine, "_look", look)
        told = []
        while True:
            event = engine.wait()
            told.append((event, engine.now()))
            if isinstance(event, StopRequested):
                break
        engine.close()
    loss = ProgressMeasured(0.25)
    assert told == [(loss, 0), (loss, 2), (loss, 4), (loss, 6), (StopRequested("max-time"), 7.5)]
    assert looked == [2.0, 2.0, 2.0, 1.5]


def test_missed_measurements_are_not_made_up_for() -> None:
    """Ten intervals late, one is made; the next is due at the next multiple."""
    measuring = Measuring(0.1, lambda: 1.0)
    assert measuring.next_at == 0.0
    measuring.take(0.0)
    assert measuring.next_at == 0.1
    measuring.take(1.04)
    assert measuring.next_at == pytest.approx(1.1)
    for n in range(11, 2000):  # taken on time, no multiple is left out or taken twice
        assert measuring.number == n
        measuring.take(measuring.next_at)


def test_events_are_heard_between_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the interval is shorter than what handling an event takes."""
    clock = Clock(monkeypatch)
    ours, theirs = pair()
    with ours, theirs:
        memory: Any = SimpleNamespace(plan=MemoryPlan.for_run(1, 1))
        server: Any = SimpleNamespace(needs_past=False)
        engine = LocalEngine(server, memory, None, theirs, 0, None, Measuring(1e-9, lambda: 1.0))
        monkeypatch.setattr(engine._versions, "publish", lambda version, server: None)
        engine.start()
        engine._events.extend(GradientFailed(lease, "bad data") for lease in range(3))
        told = []
        for _ in range(6):
            told.append(type(engine.wait()))
            clock.now += 1.0
        engine.close()
    assert told == 3 * [ProgressMeasured, GradientFailed]
