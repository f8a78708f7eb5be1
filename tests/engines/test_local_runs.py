"""Runs with real processes as users see them: delays, evaluation, stopping and resuming."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import local_tasks
import psutil
import pytest
from local_processes import descendants, wait_until

import gruppetto as gp
from gruppetto.delays import DELAYS, KeyedDelays
from gruppetto.engines.local.forkserver import ForkServer
from gruppetto.errors import InvalidSetting, RunFailed
from gruppetto.protocols.messages import GradientPushed, LearnerJoined, LearnerLost
from gruppetto.runs.execute import Run
from gruppetto.runs.folder import RunFolder
from gruppetto.testing import reference
from gruppetto.testing.checks import Story, check_accounts, check_trace, tell
from gruppetto.trace import EvaluationRow, EventRow, Row, UpdateRow, follow_rows, read_trace

CELLS = ("k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2")
#: Much shorter than any sleep that has to be cut short; much longer than a run without takes.
SOON = 20.0


def train(out: Path, task: str | None = None, **settings: Any) -> Run:
    """Two learners on mini-batches of one size."""
    chosen = {"engine": "local", "learners": 2, "progress": False, **settings}
    return gp.train(task or local_tasks.name("even"), out=out, **chosen)


def at_row(number: int) -> Any:
    """Asks for a stop when an event row is written."""
    return lambda row: isinstance(row, EventRow) and row.row >= number


def checked(run: Run, epochs: int = 3) -> Story:
    """Its trace adds up and gives the same bits."""
    total = epochs * local_tasks.BATCHES_PER_EPOCH
    story = tell(run.folder.path, total)
    check_trace(story)
    check_accounts(story, local_tasks.SAMPLES)
    again = gp.replay(run.folder.path, progress=False)
    assert again["matches"], again["difference"]
    if run.result["stopped_by"] == "epochs":
        assert story.applied() == dict.fromkeys(range(total), 1)
    return story


# ----------------------------------------------------------------------- delays


def slept_as_drawn(story: Story, law: str, learners: int) -> None:
    """The n-th job of a slot sleeps for the n-th number of its stream, whatever came between."""
    delays = KeyedDelays(story.settings.seed, DELAYS.parse(law), {}, learners)
    drawn: dict[int, float] = {}
    started = [0] * learners
    for lease, compute in story.given.items():
        slot = compute.learner % learners
        drawn[lease] = delays.draw(slot, started[slot])
        started[slot] += 1
    rows = [row for row in story.trace.work if row.outcome == "pushed"]
    late = [row.delay - drawn[row.lease] for row in rows]
    assert len(rows) >= story.coordinator.ledger.num_applied
    assert min(late) > -1e-4
    assert statistics.median(late) < 0.05


@pytest.mark.parametrize("protocol", ["hardsync", "k-batch-async:k=2"])
def test_learners_sleep_as_drawn(tmp_path: Path, protocol: str) -> None:
    law = "exponential:mean=0.02"
    run = train(tmp_path / "out", protocol=protocol, delay=law, evaluate="off")
    slept_as_drawn(checked(run), law, 2)
    assert run.result["time"] >= sum(row.delay for row in read_trace(run.folder.trace).work) / 2.1


def test_a_cancel_ends_a_sleep_at_once(tmp_path: Path) -> None:
    """One of two learners sleeps half a minute each time, and is never waited for."""
    run = train(
        tmp_path / "out", protocol="k-sync:k=1", delays={1: "constant:value=30"}, evaluate="off"
    )
    story = checked(run)
    assert run.result["wall_time"] < SOON
    cancelled = [row for row in story.trace.work if row.learner == 1]
    assert cancelled
    assert {row.outcome for row in cancelled} == {"cancelled"}
    assert max(row.delay for row in cancelled) < SOON


def test_a_run_ends_although_its_learners_sleep(tmp_path: Path) -> None:
    """By its limit, and because somebody asks."""
    sleeping = {"delay": "constant:value=300", "evaluate": "off"}
    run = train(tmp_path / "limit", max_time=0.2, **sleeping)
    assert run.result["stopped_by"] == "max-time"
    assert 0.2 <= run.result["time"] < SOON
    run = train(tmp_path / "asked", on_event=at_row(1), **sleeping)
    assert run.result["stopped_by"] == "callback"
    assert run.result["wall_time"] < SOON


# ------------------------------------------------------------------- evaluation


def without_times(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "time"} for row in run.history]


def test_it_does_not_matter_where_and_when_versions_are_evaluated(tmp_path: Path) -> None:
    """In another process, after the clock has stopped, in virtual time: the same numbers."""
    settings = {"protocol": "hardsync", "task": local_tasks.name("even", norm=True)}
    live = train(tmp_path / "live", evaluate_every=0.5, **settings)
    deferred = train(tmp_path / "deferred", evaluate_every=0.5, evaluate="deferred", **settings)
    virtual = train(tmp_path / "virtual", evaluate_every=0.5, engine="virtual", **settings)
    assert [row["version"] for row in live.history] == [2, 3, 5, 6, 8, 9]
    assert without_times(live) == without_times(deferred) == without_times(virtual)
    rows = list(follow_rows(deferred.folder.trace))
    kinds = [type(row) for row in rows if isinstance(row, EventRow | EvaluationRow)]
    assert kinds.index(EvaluationRow) > len(kinds) - 1 - kinds[::-1].index(EventRow)
    for run in (live, deferred):
        published = {row.version: row.time for row in read_trace(run.folder.trace).updates}
        assert [row["time"] for row in run.history] == [
            published[int(row["version"] or 0)] for row in run.history
        ]


def test_no_evaluation_where_none_is_wanted(tmp_path: Path) -> None:
    run = train(tmp_path / "out", evaluate="off")
    assert (run.history, run.result["test_accuracy"]) == ([], None)
    assert not read_trace(run.folder.trace).evaluations


def test_a_target_ends_the_run_when_it_is_seen(tmp_path: Path) -> None:
    """It is noted for the time at which the version was published."""
    run = train(tmp_path / "out", target="accuracy=0", epochs=500, delay="constant:value=0.005")
    assert run.result["stopped_by"] == "target"
    assert run.result["updates"] < 1500
    assert run.result["target_reached_at"] == run.history[0]["time"]
    checked(run, 500)


@pytest.mark.parametrize("evaluate", ["live", "deferred"])
def test_an_evaluation_that_raises_fails_the_run(tmp_path: Path, evaluate: str) -> None:
    task = local_tasks.name("evaluates", how="raise")
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "out", task, evaluate=evaluate)
    text = str(caught.value)
    assert "cannot be evaluated" in text
    assert "nothing can be measured" in text
    assert "\n" not in text
    assert caught.value.result["run"] == str(tmp_path / "out")


def test_an_evaluator_that_falls_behind_leaves_out_the_oldest(tmp_path: Path, capfd: Any) -> None:
    """It is at the first when the run ends; sixteen wait, the last version is among them."""
    task = local_tasks.name("evaluates", how="wait", folder=tmp_path)

    def go_on(row: Row) -> None:
        if isinstance(row, UpdateRow) and row.version == 30:
            (tmp_path / "go").touch()

    run = train(
        tmp_path / "out",
        task,
        learners=1,
        epochs=5,
        evaluate_every=1 / local_tasks.BATCHES_PER_EPOCH,
        on_event=go_on,
        progress=None,
    )
    versions = [row["version"] for row in run.history]
    assert (versions[0], versions[-1]) == (1, 30)
    assert 17 <= len(versions) < 30
    assert versions[-16:] == list(range(15, 31))
    assert "evaluation falls behind: version 2 is skipped" in capfd.readouterr().err


# ------------------------------------------------------------ stopping, resuming


@pytest.mark.parametrize("protocol", CELLS)
@pytest.mark.parametrize("row", [1, 6, 13])
def test_stopped_anywhere_and_resumed(tmp_path: Path, protocol: str, row: int) -> None:
    """Nothing is lost, nothing counts twice, all learners are new."""
    out = tmp_path / "out"
    law = "exponential:mean=0.01"
    train(out, protocol=protocol, learners=3, delay=law, on_event=at_row(row), evaluate="off")
    saved, _, _ = RunFolder(out).load_checkpoint()
    resumed = gp.resume(out, progress=False)
    assert resumed.result["stopped_by"] == "epochs"
    story = checked(resumed)
    after = [event for event, _ in story.log[saved + 1 :]]
    assert {e.learner for e in after if isinstance(e, LearnerJoined)} == {3, 4, 5}
    assert {e.learner for e in after if isinstance(e, LearnerLost)} == {0, 1, 2}
    slept_as_drawn(story, law, 3)


def test_held_gradients_survive(tmp_path: Path) -> None:
    """Stopped while an update waits for more, the run applies them, as old as they are."""
    out = tmp_path / "out"

    def stop(row: Row) -> bool:
        return isinstance(row, EventRow) and row.row >= 7

    train(out, protocol="k-batch-async:k=5", delay="constant:value=0.15", on_event=stop)
    saved, tensors, _ = RunFolder(out).load_checkpoint()
    resumed = gp.resume(out, progress=False)
    story = checked(resumed)
    before = [event for event, _ in story.log[: saved + 1] if isinstance(event, GradientPushed)]
    applied = [c for update in story.updates for c in update.contributions]
    held = [c for c in applied if f"held/{c.lease}/flat/0" in tensors]
    assert held
    assert [c.lease for c in held] == [e.lease for e in before][-len(held) :]
    assert resumed.result["max_staleness"] > 0


def test_resumed_again_and_again(tmp_path: Path) -> None:
    """Every time all learners are lost, and no mini-batch is to blame for that."""
    out = tmp_path / "out"

    def stop(row: Row) -> bool:
        return isinstance(row, EventRow) and row.type == "LearnerJoined"

    train(out, learners=6, epochs=1, delay="constant:value=1", on_event=stop, evaluate="off")
    for _ in range(3):
        gp.resume(out, progress=False, on_event=stop)
    checked(gp.resume(out, progress=False), 1)


# --------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"faults": "random:die=0.1"}, "expected engine virtual"),
        ({"target": "accuracy=0.9", "evaluate": "deferred"}, "expected evaluate live"),
        ({"target": "accuracy=0.9", "evaluate": "off"}, "expected evaluate live"),
        ({"max_restarts": -1}, "max restarts"),
        ({"engine": "remote"}, "engine"),
        ({"protocol": "k-sync:k=3"}, "3"),
        ({"target": "f1=0.9"}, "no 'f1'"),
        ({"memory": 1e-9}, "memory"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidSetting) as caught:
        train(tmp_path / "out", **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------- resources


def test_many_runs_leave_nothing_behind(tmp_path: Path) -> None:
    """No descriptor, no process, no zombie, no memory, here and in the fork server."""

    def run(n: int) -> None:
        train(tmp_path / str(n), reference(), epochs=1, learners=1)
        wait_until(lambda: descendants(os.getpid()) <= {server()})

    def server() -> int:
        current = ForkServer._current
        assert current is not None
        return current._process.pid

    def counts() -> tuple[int, int]:
        return (len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server()}/fd")))

    shm = set(os.listdir("/dev/shm"))
    for n in range(5):
        run(n)
    before, memory = counts(), psutil.Process().memory_info().rss
    for n in range(5, 30):
        run(n)
    assert counts() == before
    assert psutil.Process().memory_info().rss < memory + 30e6
    assert set(os.listdir("/dev/shm")) <= shm
