"""A run that was stopped, interrupted or killed goes on to the bits of one that never was.

The task has BatchNorm, dropout, momentum and augmentation, the delays are random: whatever a
checkpoint forgets changes a hash.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gruppetto as gp
from gruppetto.errors import RunFolderError
from gruppetto.runs.execute import Run
from gruppetto.testing import reference
from gruppetto.testing.checks import check_accounts, check_trace, tell
from gruppetto.trace import EventRow, Row, read_trace

CELLS = ("k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2")
FAULTS = (
    "random:seed={},die=0.06,hang=0.06,late=0.1,duplicate=0.1,reorder=0.1,fail=0.05,not_finite=0.05"
)
#: What differs between two runs with the same bits.
ALSO_DIFFERENT = ("run", "wall_time")


class Killed(BaseException):
    """Raised in the middle of a run, it leaves what a killed process leaves."""


class At:
    """Does something when an event row with a number is written."""

    def __init__(self, row: int, kill: bool = False) -> None:
        self.row, self.kill = row, kill

    def __call__(self, row: Row) -> bool:
        here = isinstance(row, EventRow) and row.row == self.row
        if here and self.kill:
            raise Killed
        return here


def train(out: Path, **settings: Any) -> Run:
    """Three learners, three epochs of 6 mini-batches."""
    chosen = {
        "protocol": "k-async:k=2",
        "learners": 3,
        "epochs": 3,
        "delay": "exponential:mean=1.0",
        "optimizer": "sgd:lr=0.05,momentum=0.9",
        "progress": False,
        **settings,
    }
    return gp.train(reference(), out=out, **chosen, engine="virtual")


def numbers(run: Run) -> dict[str, Any]:
    """Everything of a summary that has to repeat."""
    return {k: v for k, v in run.result.items() if k not in ALSO_DIFFERENT}


def same(resumed: Run, whole: Run) -> None:
    """Two runs agree in their summaries, their rows and what they return."""
    assert numbers(resumed) == numbers(whole)
    assert resumed.staleness == whole.staleness
    ours, theirs = read_trace(resumed.folder.trace), read_trace(whole.folder.trace)
    assert ours.updates == theirs.updates
    assert ours.evaluations == theirs.evaluations
    assert ours.failures == theirs.failures
    assert [(r.row, r.time, r.type, r.event, r.commands) for r in ours.events] == [
        (r.row, r.time, r.type, r.event, r.commands) for r in theirs.events
    ]
    for name, value in whole.model.state_dict().items():
        assert bool((resumed.model.state_dict()[name] == value).all()), name


# ------------------------------------------------------------- stopped by a row


@pytest.mark.parametrize("protocol", CELLS)
def test_stopped_at_any_row_and_resumed(tmp_path: Path, protocol: str) -> None:
    """From the first join to the last update but one: bits, times, rows and counts are equal."""
    whole = train(tmp_path / "whole", protocol=protocol)
    last = len(read_trace(whole.folder.trace).events) - 1
    for row in (0, 1, 2, 3, 6, 8, 9, 13, 17, last - 1):
        out = tmp_path / str(row)
        stopped = train(out, protocol=protocol, on_event=At(row))
        assert stopped.result["stopped_by"] == "callback"
        assert len(read_trace(stopped.folder.trace).events) == row + 2
        resumed = gp.resume(out, progress=False)
        same(resumed, whole)
        assert gp.replay(out, progress=False)["matches"]


def test_an_evaluation_made_because_of_the_stop_is_void(tmp_path: Path) -> None:
    """It follows the stop's row, so the resumed run has no part in it: not in its history, and
    not when it is asked whether the last version was evaluated."""
    whole = train(tmp_path / "whole")
    out = tmp_path / "out"
    stopped = train(out, on_event=At(7))
    assert stopped.history[-1] not in whole.history
    again = gp.resume(out, progress=False, on_event=At(8))
    evaluated = [row.version for row in read_trace(out / "trace").evaluations]
    assert evaluated == [row["version"] for row in again.history]
    resumed = gp.resume(out, progress=False)
    assert resumed.history == whole.history


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw:lr=0.01"},
        {"modulation": "inverse", "clip": "norm:max=0.5"},
        {"protocol": "hardsync", "delays": {1: "constant:value=3.0"}},
        {"protocol": "softsync:n=2", "on_late": "drop"},
        {"protocol": "backup:b=1", "on_late": "drop", "evaluate_every": 0.5},
        {"protocol": "async", "evaluate": "off"},
        {"protocol": "rennala:k=4", "delay": "pareto:shape=1.5,scale=0.5"},
    ],
    ids=lambda s: ",".join(map(str, s.values())),
)
def test_other_settings_are_resumed_as_they_were(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Optimizer state, modulation, clipping, laws of delay, what is dropped, evaluation."""
    whole = train(tmp_path / "whole", **settings)
    for row in (4, 11):
        train(tmp_path / str(row), on_event=At(row), **settings)
        same(gp.resume(tmp_path / str(row), progress=False), whole)
        assert gp.replay(tmp_path / str(row), progress=False)["matches"]


def test_a_schedule_and_an_optimizer_given_as_objects_are_given_again(tmp_path: Path) -> None:
    """Their state is in the checkpoint, they themselves are not."""
    import torch

    schedule = gp.schedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5), every="update")
    given: dict[str, Any] = {
        "optimizer": lambda model: torch.optim.Adam(
            [p for p in model.parameters() if p.requires_grad], lr=0.01
        ),
        "schedule": schedule,
    }
    whole = train(tmp_path / "whole", **given)
    train(tmp_path / "part", on_event=At(10), **given)
    same(gp.resume(tmp_path / "part", progress=False, **given), whole)


@pytest.mark.parametrize("protocol", CELLS)
def test_resumed_twice(tmp_path: Path, protocol: str) -> None:
    """Stopped, resumed, stopped, resumed; also when the second stop is in the first's wake."""
    whole = train(tmp_path / "whole", protocol=protocol)
    for first, second in [(5, 12), (8, 9), (6, 7)]:
        out = tmp_path / f"{first}-{second}"
        train(out, protocol=protocol, on_event=At(first))
        middle = gp.resume(out, progress=False, on_event=At(second))
        assert middle.result["stopped_by"] == "callback"
        same(gp.resume(out, progress=False), whole)
        assert len(list((out / "trace").iterdir())) == 3


@pytest.mark.parametrize("protocol", CELLS)
@pytest.mark.parametrize("on_late", ["requeue", "drop"])
def test_resumed_under_a_fault_plan(tmp_path: Path, protocol: str, on_late: str) -> None:
    """Deaths, returns, pushes on their way twice: all that is still to come, comes again."""
    for seed in (1, 2):
        settings: dict[str, Any] = {
            "protocol": protocol,
            "faults": FAULTS.format(seed),
            "on_late": on_late,
            "max_given_up": 100,
            "learners": 4,
        }
        whole = train(tmp_path / f"{seed}", **settings)
        assert whole.result["learners_lost"] + whole.result["mini_batches_discarded"] > 0
        last = len(read_trace(whole.folder.trace).events) - 1
        for row in range(2, last, 5):
            out = tmp_path / f"{seed}-{row}"
            train(out, on_event=At(row), **settings)
            same(gp.resume(out, progress=False), whole)


# ---------------------------------------------------------------------- limits


def test_a_run_stopped_by_a_limit_goes_on_with_another(tmp_path: Path) -> None:
    """updates=5, then updates=9: the bits of updates=9 at once. The same for time."""
    whole = train(tmp_path / "a", epochs=None, updates=9)
    train(tmp_path / "b", epochs=None, updates=5)
    same(gp.resume(tmp_path / "b", updates=9, progress=False), whole)
    whole = train(tmp_path / "c", epochs=None, max_time=5.0)
    train(tmp_path / "d", epochs=None, max_time=2.5)
    same(gp.resume(tmp_path / "d", max_time=5.0, progress=False), whole)


@pytest.mark.parametrize("limit", [{"updates": 5}, {"max_time": 2.5}])
def test_a_run_at_its_limit_does_not_go_past_it(tmp_path: Path, limit: dict[str, Any]) -> None:
    """Resumed with the limit it has reached, it stops where it is."""
    stopped = train(tmp_path / "out", epochs=None, **limit)
    again = gp.resume(tmp_path / "out", progress=False)
    assert numbers(again) == numbers(stopped)


def test_a_target_that_was_reached_was_reached_when_it_was(tmp_path: Path) -> None:
    """Resumed with the target it has reached, a run is the same, the time of the target too."""
    stopped = train(tmp_path / "out", target="loss=5.0")
    assert stopped.result["stopped_by"] == "target"
    assert stopped.result["target_reached_at"] is not None
    again = gp.resume(tmp_path / "out", progress=False)
    assert numbers(again) == numbers(stopped)


# ----------------------------------------------------------------- killed runs


def _kill(out: Path, row: int, **settings: Any) -> None:
    with pytest.raises(Killed):
        train(out, on_event=At(row, kill=True), **settings)


@pytest.mark.parametrize("protocol", CELLS)
def test_killed_in_an_epoch_and_resumed_from_the_one_before(tmp_path: Path, protocol: str) -> None:
    """Rows after the checkpoint are void; what they did is done again, the same."""
    whole = train(tmp_path / "whole", protocol=protocol)
    out = tmp_path / "out"
    _kill(out, 14, protocol=protocol)
    trace = read_trace(out / "trace")
    assert (len(trace.events), trace.end) == (15, None)
    same(gp.resume(out, progress=False), whole)
    story = tell(out, 18)
    check_trace(story)
    check_accounts(story, 44)


def test_killed_while_a_row_was_written(tmp_path: Path) -> None:
    """A last row cut anywhere is as good as absent."""
    whole = train(tmp_path / "whole")
    killed = tmp_path / "killed"
    _kill(killed, 15)
    (segment,) = (killed / "trace").iterdir()
    content = segment.read_bytes()
    length = len(content.splitlines()[-1])
    for cut in (1, 2, length // 2, length, length + 1):
        out = tmp_path / str(cut)
        shutil.copytree(killed, out)
        (out / "trace" / segment.name).write_bytes(content[:-cut])
        same(gp.resume(out, progress=False), whole)


def test_killed_again_while_resumed(tmp_path: Path) -> None:
    """Two segments without an end, the second from an earlier row than the first's last."""
    whole = train(tmp_path / "whole")
    out = tmp_path / "out"
    _kill(out, 14)
    with pytest.raises(Killed):
        gp.resume(out, progress=False, on_event=At(12, kill=True))
    same(gp.resume(out, progress=False), whole)


# --------------------------------------------------------------------- refused


def test_a_complete_run_is_refused(tmp_path: Path) -> None:
    """And nothing is written to its folder."""
    train(tmp_path / "out")
    before = sorted(p.name for p in (tmp_path / "out" / "trace").iterdir())
    with pytest.raises(RunFolderError, match=r"is complete \(epochs\)"):
        gp.resume(tmp_path / "out", progress=False)
    assert sorted(p.name for p in (tmp_path / "out" / "trace").iterdir()) == before


def test_a_run_killed_in_its_first_epoch_is_refused(tmp_path: Path) -> None:
    """It has no checkpoint yet."""
    _kill(tmp_path / "out", 5)
    with pytest.raises(RunFolderError, match="has no checkpoint"):
        gp.resume(tmp_path / "out", progress=False)


def test_a_checkpoint_half_written_is_not_used(tmp_path: Path) -> None:
    """A crash while saving leaves a part; the one before it counts."""
    whole = train(tmp_path / "whole")
    out = tmp_path / "out"
    _kill(out, 14)
    (out / "checkpoint.part").write_bytes(b"half a header")
    same(gp.resume(out, progress=False), whole)


def test_no_run_there(tmp_path: Path) -> None:
    """A folder that does not exist, and one of something else."""
    with pytest.raises(RunFolderError, match="does not exist"):
        gp.resume(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match="holds no run"):
        gp.resume(tmp_path)


# ------------------------------------------------------------- real processes

#: A run that says when it has written a row, and waits for its parent there.
CHILD = """
import json, sys
import gruppetto as gp
from gruppetto.trace import EventRow

def wait(row):
    if isinstance(row, EventRow) and row.row == 14:
        print("here", flush=True)
        sys.stdin.readline()

run = gp.train({task!r}, engine="virtual", protocol="k-async:k=2", learners=3, epochs=3,
               out={out!r}, delay="exponential:mean=1.0", optimizer="sgd:lr=0.05,momentum=0.9",
               progress=False, on_event=wait)
print(json.dumps(run.result))
"""


def _child(out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(task=reference(), out=str(out))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if line != "here\n":
        _, errors = process.communicate()
        raise AssertionError(f"the child said {line!r} and {errors}")
    return process


def test_interrupted_by_a_signal_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C ends the run cleanly at its next event, with a checkpoint right there."""
    out = tmp_path / "out"
    process = _child(out)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (0, "")
    result = json.loads(output)
    assert result["stopped_by"] == "interrupted"
    assert result["mini_batches_left"] > 0
    trace = read_trace(out / "trace")
    assert trace.end is not None
    assert trace.events[-1].type == "StopRequested"
    assert len(trace.events) == 16
    same(gp.resume(out, progress=False), train(tmp_path / "whole"))


def test_killed_by_a_signal_and_resumed(tmp_path: Path) -> None:
    """kill -9: the trace holds every row up to then, and the last epoch's checkpoint is whole."""
    out = tmp_path / "out"
    process = _child(out)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    trace = read_trace(out / "trace")
    assert (len(trace.events), trace.end) == (15, None)
    same(gp.resume(out, progress=False), train(tmp_path / "whole"))
