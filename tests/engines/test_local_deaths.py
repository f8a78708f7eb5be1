"""Processes of a run die, in every way and place: the run goes on, or says why not, and can be
resumed; no process and no mini-batch is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import local_tasks
import pytest
from local_processes import children_named, descendants, wait_until

import gruppetto as gp
from gruppetto.engines.local.forkserver import ForkServer
from gruppetto.errors import LearnersLost, RunFailed, TooManyGivenUp
from gruppetto.runs.execute import Run
from gruppetto.testing.checks import Story, check_accounts, check_trace, tell
from gruppetto.trace import EventRow, Row, UpdateRow, read_trace

TOTAL = 2 * local_tasks.BATCHES_PER_EPOCH


def train(out: Path, task: str, **settings: Any) -> Run:
    """Two learners, no evaluation."""
    chosen = {
        "engine": "local",
        "learners": 2,
        "protocol": "async",
        "evaluate": "off",
        "progress": False,
        **settings,
    }
    return gp.train(task, out=out, **chosen)


def checked(run: Run, total: int = TOTAL) -> Story:
    """Every mini-batch was applied once, and all bits come out again."""
    assert run.result["stopped_by"] == "epochs"
    story = tell(run.folder.path, total)
    check_trace(story)
    check_accounts(story, local_tasks.SAMPLES)
    assert story.applied() == dict.fromkeys(range(total), 1)
    again = gp.replay(run.folder.path, progress=False)
    assert again["matches"], again["difference"]
    return story


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def nobody_is_left() -> None:
    """The fork server alone is, to be used by the next run."""
    server = ForkServer._current
    assert server is not None
    wait_until(lambda: descendants(os.getpid()) <= {server._process.pid})


# --------------------------------------------------------------------- learners


@pytest.mark.parametrize(
    ("how", "where", "said"),
    [
        ("sigkill", "learner", "was killed by SIGKILL"),
        ("exit", "learner", "ended with exit code 3"),
        ("sys-exit", "learner", "ended with exit code 3"),
        ("sigkill", "loader", "ended with exit code 1"),
        ("exit", "loader", "ended with exit code 1"),
        ("sys-exit", "loader", "ended with exit code 1"),
    ],
)
def test_a_learner_that_dies_is_replaced(
    tmp_path: Path, how: str, where: str, said: str, capfd: Any
) -> None:
    """Its mini-batch is leased again; a learner without its loader is of no use and goes, too."""
    task = local_tasks.name("dies", how=how, where=where, marks=tmp_path)
    run = train(tmp_path / "out", task, progress=None)
    checked(run)
    assert run.result["learners_lost"] == run.result["learners_restarted"] == 1
    assert run.result["mini_batches_given_up"] == run.result["gradients_rejected"] == 0
    shown = capfd.readouterr().err
    assert said in shown
    assert "learner 2 takes its place (1 of 3 restarts)" in " ".join(shown.split())
    nobody_is_left()


@pytest.mark.parametrize("protocol", ["hardsync", "k-batch-sync:k=2", "k-async:k=2"])
def test_no_protocol_waits_for_the_dead(tmp_path: Path, protocol: str) -> None:
    task = local_tasks.name("dies", marks=tmp_path, times=2)
    run = train(tmp_path / "out", task, protocol=protocol, learners=3, epochs=20)
    checked(run, total=20 * local_tasks.BATCHES_PER_EPOCH)
    # Whoever dies on a mini-batch that was taken from it is missed by nobody, and where its machine
    # is busy the run may be over before its death is known.
    least = 1 if protocol.startswith("k-batch-sync") else 2
    assert least <= run.result["learners_lost"] <= 2


def test_without_restarts_the_run_goes_on_with_the_rest(tmp_path: Path, capfd: Any) -> None:
    task = local_tasks.name("dies", marks=tmp_path)
    run = train(tmp_path / "out", task, learners=3, max_restarts=0, progress=None)
    story = checked(run)
    assert (run.result["learners_lost"], run.result["learners_restarted"]) == (1, 0)
    assert {compute.learner for compute in story.given.values()} <= {0, 1, 2}
    assert "the run goes on with 2" in " ".join(capfd.readouterr().err.split())


def test_when_all_are_lost_the_run_fails(tmp_path: Path) -> None:
    task = local_tasks.name("dies", times=-1, sample=-1)
    with pytest.raises(LearnersLost) as caught:
        train(tmp_path / "out", task, max_restarts=1)
    assert "all learners are lost after 0 updates" in one_sentence(caught.value)
    assert caught.value.result["learners_lost"] == 3
    assert caught.value.result["stopped_by"] == "learners-lost"
    nobody_is_left()


def test_a_mini_batch_that_every_learner_dies_on_is_given_up(tmp_path: Path) -> None:
    task = local_tasks.name("dies", times=-1)
    with pytest.raises(TooManyGivenUp) as caught:
        train(tmp_path / "out", task, max_restarts=9, epochs=1)
    one_sentence(caught.value)
    assert caught.value.result["learners_lost"] == 3
    assert caught.value.result["mini_batches_given_up"] == 1


@pytest.mark.parametrize(("where", "frame"), [("learner", "in loss"), ("loader", "in __getitem__")])
def test_an_exception_is_told_with_its_traceback(tmp_path: Path, where: str, frame: str) -> None:
    """Of the process it was raised in; the learner stays."""
    task = local_tasks.name("dies", how="raise", where=where, marks=tmp_path)
    run = train(tmp_path / "out", task)
    story = checked(run)
    assert run.result["learners_lost"] == 0
    assert run.result["gradients_rejected"] == 1
    (failure,) = story.trace.failures
    assert frame in failure.traceback
    assert failure.traceback.rstrip().endswith("ValueError: this is damaged")


def test_a_learner_that_dies_as_it_is_born(tmp_path: Path) -> None:
    """Known while the next one is being started, which must not make it forgotten."""
    task = local_tasks.name("dies_at_birth", nth=2)
    run = train(tmp_path / "out", task, learners=4, protocol="hardsync")
    story = checked(run, 3 * local_tasks.BATCHES_PER_EPOCH)
    assert run.result["learners_lost"] == 1
    assert 0 not in {compute.learner for compute in story.given.values()}
    assert 4 in {compute.learner for compute in story.given.values()}


# --------------------------------------------------------------- the other ones


class Kill:
    """Kills a process by its name at the first row after something is true."""

    def __init__(self, name: str, when: Callable[[], bool] = lambda: True) -> None:
        self.name = name
        self.when = when
        self.is_done = False

    def __call__(self, row: Row) -> None:
        if not self.is_done and isinstance(row, EventRow) and self.when():
            self.is_done = True
            (pid,) = children_named(os.getpid(), self.name)
            os.kill(pid, signal.SIGKILL)


def has_checkpoint(out: Path) -> bool:
    return bool(list(out.glob("checkpoint-*.safetensors")))


def test_the_server_dies_and_the_run_is_resumed(tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "out"
    kill = Kill("gp server", lambda: has_checkpoint(out))
    task = local_tasks.name("even")
    settings = {"delay": "constant:value=0.02", "epochs": 4, "protocol": "hardsync"}
    with pytest.raises(RunFailed) as caught:
        train(out, task, on_event=kill, progress=None, **settings)
    text = one_sentence(caught.value)
    assert "the server process was killed by SIGKILL" in text
    assert "resumed" in text
    assert caught.value.result["run"] == str(out)
    nobody_is_left()
    shown = capfd.readouterr().err
    assert "takes its place" not in shown, "learners that end because the server did"
    assert "Traceback" not in shown
    assert read_trace(out / "trace").end is None
    resumed = gp.resume(out, progress=False)
    checked(resumed, 4 * local_tasks.BATCHES_PER_EPOCH)


def test_the_evaluator_dies(tmp_path: Path) -> None:
    kill = Kill("gp evaluator")
    task = local_tasks.name("even")
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "out", task, on_event=kill, evaluate="live", delay="constant:value=0.05")
    assert "the process that evaluates is gone" in one_sentence(caught.value)
    assert caught.value.result["run"] == str(tmp_path / "out")
    nobody_is_left()


def test_the_template_dies_and_the_next_run_is_none_the_worse(tmp_path: Path) -> None:
    task = local_tasks.name("even")
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "1", task, on_event=Kill("gp template"), delay="constant:value=0.05")
    one_sentence(caught.value)
    assert caught.value.result["run"] == str(tmp_path / "1")
    nobody_is_left()
    checked(train(tmp_path / "2", task), 3 * local_tasks.BATCHES_PER_EPOCH)


def test_the_fork_server_dies_and_the_next_run_starts_another(tmp_path: Path) -> None:
    task = local_tasks.name("even")
    train(tmp_path / "0", task)
    server = ForkServer._current
    assert server is not None

    def kill(row: Row) -> None:
        if isinstance(row, UpdateRow) and row.version == 2:
            server._process.kill()

    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "1", task, on_event=kill, delay="constant:value=0.05")
    one_sentence(caught.value)
    wait_until(lambda: not descendants(os.getpid()) - {server._process.pid})
    checked(train(tmp_path / "2", task), 3 * local_tasks.BATCHES_PER_EPOCH)
    assert ForkServer._current is not server


def test_a_fork_server_that_died_unseen_is_replaced(tmp_path: Path) -> None:
    """Its end may be known to nobody when the next run asks it for something."""
    task = local_tasks.name("even")
    train(tmp_path / "0", task)
    server = ForkServer._current
    assert server is not None
    os.kill(server._process.pid, signal.SIGKILL)
    wait_until(lambda: not server_is_up(server))
    checked(train(tmp_path / "1", task), 3 * local_tasks.BATCHES_PER_EPOCH)


def server_is_up(server: ForkServer) -> bool:
    path = Path(f"/proc/{server._process.pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_code_of_the_user_that_ends_the_server_is_a_failure(tmp_path: Path) -> None:
    """Also with exit code 0, which is not how a run ends."""
    task = local_tasks.name("evaluates", how="exit")
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "out", task, evaluate="deferred")
    assert "the server process ended with exit code 3" in one_sentence(caught.value)
