"""Two interrupts, and limits to resume with: what the command says, and what it leaves."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import gruppetto as gp
from gruppetto.cli import _run
from gruppetto.runs import start
from gruppetto.trace import Row

RUNS = [
    ("--engine", "virtual", "--learners", "2", "--delay", "exponential:mean=1"),
    ("--engine", "virtual", "--decouple", "ddg:modules=2"),
]


def interrupts(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once a run has made an update, so many times in a row."""

    left = times

    def listener(row: Row) -> None:
        nonlocal left
        while left and getattr(row, "version", 0) == 3:
            left -= 1
            signal.raise_signal(signal.SIGINT)

    run = start.start_run

    def started(*given: Any, **named: Any) -> gp.Run:
        return run(*given, **{**named, "on_event": listener})

    monkeypatch.setattr(start, "start_run", started)


@pytest.mark.parametrize("options", RUNS, ids=["learners", "modules"])
def test_one_ctrl_c_ends_well_and_a_second_one_at_once(
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("train", "digits", *options, "--updates", "30", "--quiet", "--json", "--out")
    with monkeypatch.context() as patch:
        interrupts(1, patch)
        assert _run([*words, "once"]) == 130
    assert json.loads(capsys.readouterr().out)["stopped_by"] == "interrupted"
    assert _run(["resume", "once", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 30
    with monkeypatch.context() as patch:
        interrupts(2, patch)
        assert _run([*words, "twice"]) == 130
    told = capsys.readouterr()
    assert json.loads(told.out) == {"run": "twice", "interrupted": True}
    assert told.err.endswith("gruppetto: interrupted; the run is in twice\n")


@pytest.mark.parametrize("options", RUNS, ids=["learners", "modules"])
def test_a_run_does_not_go_on_to_where_it_has_been(
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", *options, "--quiet", "--out", "run", "--updates", "10"]
    assert _run(words) == 0
    trace = sorted(file.name for file in (tmp_path / "run" / "trace").iterdir())
    capsys.readouterr()
    assert _run(["resume", "run", "--updates", "9"]) == 2
    assert capsys.readouterr().err == (
        "gruppetto: updates: the run has made 10 already; expected more, got 9\n"
    )
    assert _run(["resume", "run", "--max-time", "0.25"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("gruppetto: max_time: the run has taken ")
    assert told.endswith(" s of run time already; expected more, got 0.25\n")
    assert sorted(file.name for file in (tmp_path / "run" / "trace").iterdir()) == trace
    # The same command again is no wish to go back.
    assert _run([*words, "--resume"]) == 0
    assert _run(["resume", "run", "--updates", "12", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["updates"] == 12
