"""The process that started a run is interrupted or killed: what is left, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import local_tasks
import pytest
from local_processes import descendants, is_alive, name_of, wait_until

import gruppetto as gp
from gruppetto.runs.execute import Run
from gruppetto.testing import reference
from gruppetto.testing.checks import check_accounts, check_trace, tell
from gruppetto.trace import EventRow, follow_rows, read_trace

#: Seconds for a program to end.
PATIENCE = 60.0


class Program:
    """``gruppetto``, in a group of processes of its own, as a shell would start it."""

    def __init__(self, *words: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gruppetto", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def interrupt(self) -> None:
        """What Ctrl-C does: every process of the group is told."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Exit code, the one object on standard output, and standard error."""
        out, err = self.process.communicate(timeout=PATIENCE)
        (line,) = out.splitlines()
        return self.process.returncode, json.loads(line), err


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    """None outlives its test."""
    started: list[Program] = []
    yield started
    for program in started:
        if program.process.poll() is None:
            program.process.kill()
            program.process.communicate()


def num_pushed(out: Path) -> int:
    if not (out / "trace" / "000.jsonl").exists():
        return 0
    rows = follow_rows(out / "trace")
    return sum(isinstance(row, EventRow) and row.type == "GradientPushed" for row in rows)


def checked(run: Run, total: int, samples: int) -> None:
    assert run.result["stopped_by"] == "epochs"
    story = tell(run.folder.path, total)
    check_trace(story)
    check_accounts(story, samples)
    assert story.applied() == dict.fromkeys(range(total), 1)
    again = gp.replay(run.folder.path, progress=False)
    assert again["matches"], again["difference"]


def test_interrupted_by_the_keyboard_and_resumed(tmp_path: Path, programs: list[Program]) -> None:
    """Exit 130 and one object; resumed, all counts once, over both segments."""
    out = tmp_path / "out"
    words = "train digits --protocol k-batch-async:k=2 --learners 2 --batch-size 128 --epochs 2"
    programs.append(
        program := Program(*words.split(), "--delay=constant:value=0.2", f"--out={out}")
    )
    wait_until(lambda: num_pushed(out) >= 3)
    program.interrupt()
    _, err = program.process.communicate(timeout=PATIENCE)
    assert program.process.returncode == 130
    assert f"gruppetto resume {out}" in err
    assert "Traceback" not in err
    programs.append(program := Program("resume", out, "--json"))
    wait_until(lambda: num_pushed(out) >= 6)
    program.interrupt()
    code, result, err = program.end()
    assert (code, result["interrupted"], result["stopped_by"]) == (130, True, "interrupted")
    assert result["run"] == str(out)
    assert "Traceback" not in err
    checked(gp.resume(out, progress=False), 24, 1437)
    assert len(list((out / "trace").iterdir())) == 3


def test_killed_and_resumed(tmp_path: Path, programs: list[Program]) -> None:
    """Whoever it had started ends within moments; the trace can be read, and the run goes on."""
    out = tmp_path / "out"
    shm = set(os.listdir("/dev/shm"))
    words = ("--learners=2", "--epochs=4", "--delay=constant:value=0.1", f"--out={out}")
    programs.append(program := Program("train", reference(), *words))
    wait_until(lambda: list(out.glob("checkpoint-*")))
    there = descendants(program.process.pid)
    roles = {name_of(pid) for pid in there}
    assert {"gp template", "gp server", "gp evaluator", "gp loader"} <= roles
    program.process.kill()
    wait_until(lambda: not any(map(is_alive, there)), 10.0)
    _, err = program.process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    assert set(os.listdir("/dev/shm")) <= shm
    assert read_trace(out / "trace").end is None
    checked(gp.resume(out, progress=False), 24, 44)


@pytest.mark.parametrize("evaluate", ["live", "deferred"])
def test_a_second_interrupt_does_not_wait_for_the_evaluation(
    tmp_path: Path, programs: list[Program], evaluate: str
) -> None:
    """What was trained is saved before it."""
    out = tmp_path / "out"
    task = local_tasks.name("evaluates", how="wait", folder=tmp_path)
    words = ("--learners=2", "--delay=constant:value=0.2", f"--out={out}", f"--evaluate={evaluate}")
    programs.append(program := Program("train", task, *words, "--json"))
    wait_until(lambda: num_pushed(out) >= 3)
    program.interrupt()
    wait_until((tmp_path / "asked").exists)
    there = descendants(program.process.pid)
    program.interrupt()
    code, result, _ = program.end()
    assert (code, result["interrupted"]) == (130, True)
    wait_until(lambda: not any(map(is_alive, there)), 10.0)
    (tmp_path / "go").touch()
    checked(gp.resume(out, progress=False), 2 * local_tasks.BATCHES_PER_EPOCH, local_tasks.SAMPLES)


def test_two_runs_at_once_from_two_threads(tmp_path: Path) -> None:
    """They share the fork server and nothing else."""
    done: dict[int, Run] = {}

    def work(n: int) -> None:
        done[n] = gp.train(
            local_tasks.name("even"),
            out=tmp_path / str(n),
            engine="local",
            learners=2,
            seed=n,
            protocol="async",
            progress=False,
        )

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for n in range(2):
        checked(done[n], 3 * local_tasks.BATCHES_PER_EPOCH, local_tasks.SAMPLES)
