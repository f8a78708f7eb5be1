"""``--decouple`` and what goes with it, from outside: exit codes, JSON, sentences."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gruppetto.cli import _run, cli

VIRTUAL = ("--engine", "virtual", "--epochs", "1")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """Run a command; standard output must be exactly one JSON object."""
    assert _run([*words, "--json"]) == code
    made = json.loads(capsys.readouterr().out)
    assert isinstance(made, dict)
    return made


def test_train_twice_resume_and_replay(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "digits", "--decouple", "ddg:modules=3", *VIRTUAL)
    first, second = run_json(capsys, *words), run_json(capsys, *words)
    assert first["run"] == "runs/digits-ddg-3-001" and second["run"] == "runs/digits-ddg-3-002"
    for key in ("weights_sha256", "state_sha256", "events_sha256", "time", "per_module"):
        assert first[key] == second[key]
    part = run_json(capsys, *words, "--updates", "30", "--out", "part")
    assert (part["stopped_by"], part["updates"]) == ("updates", 30)
    whole = run_json(capsys, *words, "--updates", "500", "--out", "part", "--resume")
    assert whole["weights_sha256"] == first["weights_sha256"]
    assert whole["events_sha256"] == first["events_sha256"]
    again = run_json(capsys, "replay", "part")
    assert again["matches"] is True and again["state_sha256"] == first["state_sha256"]
    assert _run(["export", "part"]) == 0
    assert _run(["report", "part"]) == 0
    capsys.readouterr()


def test_what_is_said_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["train", "digits", "--decouple", "fdg:modules=2", "--cut", "2", *VIRTUAL]) == 0
    captured = capsys.readouterr()
    assert "digits: fdg:modules=2, cut at 2, mini-batches of 16, optimizer sgd" in captured.err
    assert "modulation none\n" in captured.err
    assert "mean staleness" in captured.out


def test_resuming_another_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits", *VIRTUAL, "--updates", "5", "--out", "run"]
    assert _run([*words, "--decouple", "ddg:modules=2"]) == 0
    for other, said in (
        (["--decouple", "ddg:modules=3"], "decouple=ddg:modules=2"),
        (["--decouple", "ddg:modules=2", "--cut", "2"], "begins="),
        (["--decouple", "ddg:modules=2", "--pass-times", "1/2,1/2"], "pass_times="),
        (["--learners", "2"], "holds a run with"),
    ):
        capsys.readouterr()
        assert _run([*words, *other, "--resume"]) == 2
        assert said in capsys.readouterr().err
    assert _run([*words, "--decouple", "ddg:modules=2", "--resume", "--updates", "9"]) == 0


def test_runs_of_a_comparison_may_be_cut_each_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = run_json(
        capsys, "compare", "digits", *VIRTUAL, "--updates", "5", "--out", "cuts",
        "--run", "decouple=ddg:modules=2;cut=2", "--run", "decouple=ddg:modules=2;cut=1",
    )  # fmt: skip
    assert [Path(run["run"]).name for run in made["runs"]] == [
        "00-ddg-modules=2-cut=2",
        "01-ddg-modules=2-cut=1",
    ]
    assert [run["begins"] for run in made["runs"]] == [["2"], ["1"]]


def test_compare_makes_one_report(capsys: pytest.CaptureFixture[str]) -> None:
    made = run_json(
        capsys, "compare", "digits", *VIRTUAL, "--decouple", "bp:modules=2",
        "--decouple", "ddg:modules=2", "--cut", "2", "--out", "compared",
    )  # fmt: skip
    bp, ddg = made["runs"]
    assert bp["begins"] == ddg["begins"] == ["2"]
    assert bp["time"] > ddg["time"] and Path(made["report"]).is_file()
    made = run_json(
        capsys, "compare", "digits", *VIRTUAL, "--run", "decouple=ddg:modules=2;tail=drop",
        "--run", "protocol=async;learners=2", "--out", "mixed",
    )  # fmt: skip
    assert [run["protocol"] for run in made["runs"]] == [None, "async"]
    assert made["runs"][0]["tail"] == "drop"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--decouple", "ddg:modules=2", "--learners", "2"], "expected --decouple or --learners"),
        (["--decouple", "ddg:modules=2", "--protocol", "async"], "or --protocol, got both"),
        (["--decouple", "ddg:modules=2", "--delay", "constant:value=1"], "or --delay, got both"),
        (["--decouple", "ddg:modules=2", "--delay", "1=constant:value=1"], "or --delays"),
        (["--decouple", "ddg:modules=2", "--scale-lr", "sqrt-batch:batch=32"], "or --scale-lr"),
        (["--decouple", "dgg:modules=2"], "valid: bp, ddg, fdg, fr"),
        (["--decouple", "ddg:module=2"], "has no key 'module'"),
        (["--decouple", "ddg:modules=4"], "expected at most 3, the blocks of the model, got 4"),
        (["--tail", "drop"], "tail is for decoupled runs"),
        (["--cut", "1"], "cuts is for decoupled runs"),
        (["--pass-times", "measured"], "pass times is for decoupled runs"),
    ],
)
def test_bad_usage_is_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["train", "digits", "--engine", "virtual", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("gruppetto: ") and said in captured.err
    assert not Path("runs").exists()


def test_a_grid_of_learners_and_modules_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--decouple", "ddg:modules=2", "--protocol", "async"]
    assert _run(["compare", "digits", "--engine", "virtual", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "--run decouple=ddg:modules=2 --run protocol=async" in captured.err
    assert not Path("runs").exists()


def test_divergence_exits_1_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits", "--decouple", "ddg:modules=3", "--optimizer", "sgd:lr=1e30"]
    made = run_json(capsys, *words, *VIRTUAL, code=1)
    assert made["stopped_by"] == "diverged" and "diverged after" in made["error"]
    assert made["diverged"]["module"] in (1, 2, 3)
    again = run_json(capsys, "replay", made["run"])
    assert again["matches"] is True


def test_ctrl_c_can_be_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "digits", "--decouple", "ddg:modules=2", "--engine", "virtual")
    timer = threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT))
    trace = Path("run/trace/000.jsonl")

    def when_it_runs() -> None:
        while not (trace.exists() and trace.read_bytes().count(b'"update"') > 3):
            pass
        timer.start()

    watcher = threading.Thread(target=when_it_runs)
    watcher.start()
    made = run_json(capsys, *words, "--epochs", "40", "--out", "run", code=130)
    watcher.join()
    assert made["interrupted"] is True and made["stopped_by"] == "interrupted"
    assert 3 < made["updates"] < 3600
    capped = str(made["updates"] + 20)
    resumed = run_json(capsys, "resume", "run", "--updates", capped)
    whole = run_json(capsys, *words, "--updates", capped, "--out", "whole")
    for key in ("weights_sha256", "state_sha256"):
        assert resumed[key] == whole[key]


def test_methods_are_listed_and_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    made = run_json(capsys, "methods")
    names = [row["usage"].split(":")[0] for row in made["methods"]]
    assert names == ["bp", "ddg", "fdg", "fr"]
    for command in ("train", "compare"):
        text = CliRunner().invoke(cli, [command, "--help"]).output
        for option in ("--decouple", "--cut", "--balance", "--tail", "--pass-times"):
            assert option in text
    assert "gruppetto train digits --decouple ddg:modules=2" in " ".join(
        CliRunner().invoke(cli, ["train", "--help"]).output.split()
    )
