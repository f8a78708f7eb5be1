"""The command line from outside: what is printed where, exit codes, JSON keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gruppetto.cli import _run

TRAIN_KEYS = {
    "run", "task", "engine", "protocol", "learners", "seed", "updates", "samples", "epochs", "time",
    "wall_time", "stopped_by", "train_loss", "test_loss", "test_accuracy", "mean_staleness",
    "max_staleness", "mini_batches_applied", "mini_batches_cancelled", "mini_batches_discarded",
    "mini_batches_given_up", "mini_batches_dropped", "mini_batches_left", "learners_lost",
    "gradients_rejected", "target_reached_at", "threads", "weights_sha256", "state_sha256",
    "events_sha256",
}  # fmt: skip
COMMON = (
    "--engine", "virtual", "--learners", "4", "--epochs", "2", "--delay", "exponential:mean=1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """Run a command; standard output must be exactly one JSON object."""
    assert _run([*words, "--json"]) == code
    made = json.loads(capsys.readouterr().out)
    assert isinstance(made, dict)
    return made


def test_the_digits_command_twice_and_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    """The acceptance command of the virtual engine, as documented."""
    words = ("train", "digits", "--engine", "virtual", "--protocol", "k-batch-async:k=2",
             "--learners", "4", "--batch-size", "16", "--epochs", "10",
             "--delay", "exponential:mean=1", "--seed", "0")  # fmt: skip
    first, second = run_json(capsys, *words), run_json(capsys, *words)
    assert first.keys() >= TRAIN_KEYS
    assert first["run"] != second["run"]
    for key in ("weights_sha256", "state_sha256", "events_sha256", "time"):
        assert first[key] == second[key]
    assert first["test_accuracy"] >= 0.95
    again = run_json(capsys, "replay", first["run"])
    assert again["matches"] is True
    assert again.keys() >= TRAIN_KEYS
    assert again["weights_sha256"] == first["weights_sha256"]


def test_the_default_modulation_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["train", "digits", "--protocol", "async", *COMMON]) == 0
    captured = capsys.readouterr()
    assert "modulation inverse-mean:cap=true (the default of asynchronous" in captured.err
    assert "test accuracy" in captured.out
    assert _run(["train", "digits", "--protocol", "async", "--modulation", "none", *COMMON]) == 0
    assert "modulation none\n" in capsys.readouterr().err
    assert _run(["train", "digits", *COMMON]) == 0
    assert "modulation none\n" in capsys.readouterr().err


def test_warmup_and_scalings_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "digits", "--engine", "virtual", "--protocol", "async", "--out", "out",
             "--warmup", "hardsync:epochs=1", "--scale-lr", "sqrt-batch:batch=16",
             "--scale-batch", "product:total=64", *COMMON)  # fmt: skip
    assert _run(list(words)) == 0
    line = capsys.readouterr().err
    assert "async after warm-up hardsync:epochs=1.0, 4 learners" in line
    assert "mini-batches of 16 (product:total=64), optimizer sgd" in line
    assert "with its rate times 2 (sqrt-batch:batch=16), modulation" in line


def test_warmup_and_scalings_make_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    made = run_json(capsys, "compare", "digits", "--engine", "virtual", "--protocol", "async",
                    "--warmup", "hardsync:epochs=0.5", "--warmup", "hardsync:epochs=1",
                    "--learners", "2", "--learners", "4", "--scale-batch", "product:total=64",
                    "--scale-lr", "sqrt-batch:batch=64", "--updates", "30")  # fmt: skip
    settings = [
        json.loads((folder / "config.json").read_text())["settings"]
        for folder in sorted(p for p in Path(made["run"]).iterdir() if p.is_dir())
    ]
    assert [(s["warmup"], s["learners"], s["batch_size"]) for s in settings] == [
        ("hardsync:epochs=0.5", 2, 32), ("hardsync:epochs=0.5", 4, 16),
        ("hardsync:epochs=1.0", 2, 32), ("hardsync:epochs=1.0", 4, 16),
    ]  # fmt: skip


def test_resume_recognises_a_scaled_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "digits", "--engine", "virtual", "--learners", "2", "--out", "out",
             "--epochs", "2", "--protocol", "async", "--warmup", "hardsync:epochs=1")  # fmt: skip
    scaled = (*words, "--scale-batch", "product:total=64")
    run_json(capsys, *scaled, "--updates", "10")
    assert run_json(capsys, *scaled, "--updates", "20", "--resume")["updates"] == 20
    assert _run([*words, "--batch-size", "32", "--resume"]) == 2
    assert "scale_batch=product:total=64, and scale_batch=None" in capsys.readouterr().err


def test_compare_makes_a_grid_and_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    made = run_json(capsys, "compare", "digits", "--protocol", "hardsync", "--protocol", "async",
                    "--seed", "0", "--seed", "1", "--target", "accuracy=0.5", *COMMON)  # fmt: skip
    assert [(r["protocol"], r["seed"]) for r in made["runs"]] == [
        ("hardsync", 0), ("hardsync", 1), ("async", 0), ("async", 1),
    ]  # fmt: skip
    assert all(r["stopped_by"] == "epochs" for r in made["runs"]), "a target compares, only"
    page = Path(made["report"]).read_text(encoding="utf-8")
    assert "async" in page
    assert "<script src" not in page
    listed = run_json(capsys, "report", made["run"], "--out", "again.html", "--png", "a.png")
    assert len(listed["runs"]) == 4
    assert Path("again.html").stat().st_size > 10_000
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_compare_takes_runs_one_by_one_and_delays_of_learners(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = run_json(capsys, "compare", "digits", "--run", "protocol=async;modulation=none",
                    "--run", "protocol=k-sync:k=3;seed=5", *COMMON,
                    "--delay", "0=constant:value=9")  # fmt: skip
    settings = [json.loads((Path(r["run"]) / "config.json").read_text())["settings"]
                for r in made["runs"]]  # fmt: skip
    assert [s["modulation"] for s in settings] == ["none", "none"]
    assert [s["seed"] for s in settings] == [0, 5]
    assert all(s["delays"] == {"0": "constant:value=9.0"} for s in settings)


def test_a_failed_run_is_one_object_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    made = run_json(capsys, "train", "digits", "--optimizer", "sgd:lr=1e30", *COMMON, code=1)
    assert made["stopped_by"] == "diverged"
    assert "not finite" in made["error"]
    assert Path(made["run"]).is_dir()


def test_compare_keeps_a_failed_run_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    made = run_json(capsys, "compare", "digits", "--optimizer", "sgd:lr=1e30", "--optimizer",
                    "sgd:lr=0.1", *COMMON)  # fmt: skip
    assert ["error" in r for r in made["runs"]] == [True, False]
    assert "diverged" in Path(made["report"]).read_text(encoding="utf-8")


def test_compare_of_failures_only_is_one_object_and_exit_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = run_json(capsys, "compare", "digits", "--optimizer", "sgd:lr=1e30", "--protocol",
                    "async", "--protocol", "hardsync", *COMMON, code=1)  # fmt: skip
    assert len(made["runs"]) == 2
    assert Path(made["report"]).is_file()


def test_target_stops_and_is_dated(capsys: pytest.CaptureFixture[str]) -> None:
    made = run_json(capsys, "train", "digits", "--target", "accuracy=0.5", *COMMON[:2],
                    "--evaluate-every", "0.5")  # fmt: skip
    assert made["stopped_by"] == "target"
    assert 0 < made["target_reached_at"] <= made["time"]
    total = made["mini_batches_applied"] + made["mini_batches_left"]
    assert total == 10 * 90, "the task's own epochs are the end it stopped before"


def test_limits_stop_and_a_stopped_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_json(capsys, "train", "digits", *COMMON)
    stopped = run_json(capsys, "train", "digits", *COMMON, "--updates", "7", "--out", "part")
    assert (stopped["stopped_by"], stopped["updates"]) == ("updates", 7)
    resumed = run_json(capsys, "train", "digits", *COMMON, "--out", "part", "--resume",
                       "--updates", "9999")  # fmt: skip
    assert resumed["stopped_by"] == "epochs"
    for key in ("weights_sha256", "state_sha256", "events_sha256"):
        assert resumed[key] == whole[key]
    assert _run(["train", "digits", *COMMON, "--out", "part", "--resume", "--seed", "3"]) == 2
    assert "seed=0, and seed=3 was asked for" in capsys.readouterr().err


def test_max_time_in_virtual_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--engine", "virtual", "--max-time", "7.5", "--delay", "constant:value=1")
    made = run_json(capsys, "train", "digits", *words)
    assert (made["stopped_by"], made["time"], made["updates"]) == ("max-time", 7.5, 7)
    ever_leased = made["mini_batches_applied"] + made["mini_batches_left"]
    assert ever_leased == 4 * 8, "seven rounds applied, one under way"


def test_export_is_a_plain_state_dict(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    made = run_json(capsys, "train", "digits:batchnorm=true", *COMMON)
    file = run_json(capsys, "export", made["run"], "--out", "m.pt")["file"]
    from gruppetto.training.tasks import load_task

    model = load_task("digits:batchnorm=true").model()
    model.load_state_dict(torch.load(file, weights_only=True))
    run_json(capsys, "export", made["run"], "--out", "m.safetensors")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("protocols",), "k-batch-async:k="),
        (("warmups",), "hardsync:epochs="),
        (("modulations",), "inverse-mean:cap=false"),
        (("scalings",), "sqrt-batch:batch="),
        (("scalings",), "product:total="),
        (("delays",), "lognormal:median=,sigma="),
        (("tasks",), "least-squares:n=1000,d=20"),
        (("models",), "resnet8\n    Residual network of 8 layers"),
        (("models",), "path/to/file.py:name"),
        (("optimizers",), "sgd:lr=,momentum="),
        (("clips",), "norm:max="),
        (("--version",), "gruppetto, version"),
        (("train", "--help"), "Example: gruppetto train digits"),
        (("compare", "--help"), "Example: gruppetto compare digits"),
    ],
)
def test_lists_and_help(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(list(words)) == 0
    assert expected in capsys.readouterr().out


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    from gruppetto.cli.options import OPTIONS

    assert _run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option.flag in text for option in OPTIONS)
    without = {"--updates", "--max-time", "--target", "--clip", "--faults", "--initial", "--data"}
    assert all("[" in option.help for option in OPTIONS if option.flag not in without)


def test_as_a_program_from_another_process(tmp_path: Path) -> None:
    """The installed command, once: the entry point, and nothing but JSON on standard output."""
    words = [sys.executable, "-m", "gruppetto", "train", "least-squares:n=200,d=5",
             "--engine", "virtual", "--optimizer", "sgd:lr=0.3", "--json"]  # fmt: skip
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["metrics"]["excess_loss"] < 0.05
    assert made["test_accuracy"] is None


def test_an_evaluation_that_is_not_finite_is_null_everywhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """JSON has no NaN: the trace must stay readable and the output valid."""
    Path("nan.py").write_text(
        "import torch, gruppetto as gp\nfrom torch import nn\n"
        "task = gp.Task(model=lambda: nn.Linear(1, 2), train=[(torch.ones(1), 0)] * 8,\n"
        "    test=[1], evaluate=lambda m, t: {'loss': float('nan'), 'f1': float('inf')},\n"
        "    optimizer='sgd:lr=0.1', batch_size=2, epochs=1)\n"
    )
    made = run_json(capsys, "train", "nan.py")
    assert made["test_loss"] is None
    assert made["metrics"] == {"loss": None, "f1": None}
    assert run_json(capsys, "replay", made["run"])["matches"] is True
    run_json(capsys, "report", made["run"])
    assert _run(["train", "nan.py"]) == 0
    assert "not finite" in capsys.readouterr().out


def test_an_evaluation_that_fails_fails_the_run_and_not_the_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit 2 promises that nothing was written, and by then a run was."""
    Path("bad.py").write_text(
        "import torch, gruppetto as gp\nfrom torch import nn\n"
        "def evaluate(model, test):\n    raise KeyError('no such label')\n"
        "task = gp.Task(model=lambda: nn.Linear(1, 2), train=[(torch.ones(1), 0)] * 8,\n"
        "    test=[1], evaluate=evaluate, optimizer='sgd:lr=0.1', batch_size=2, epochs=1)\n"
    )
    made = run_json(capsys, "train", "bad.py", code=1)
    assert "evaluate failed: KeyError: 'no such label'" in made["error"]
    assert made["stopped_by"] == "failed"
    assert (Path(made["run"]) / "trace" / "000.jsonl").is_file()
