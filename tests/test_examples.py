"""The example scripts, each run as a user runs it: by a fresh interpreter, in some other folder."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gruppetto.cli import _run

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_script(name: str, folder: Path) -> str:
    """What a script prints on standard output."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        # An ordinary script takes all cores, of which other tests have some.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def accuracies(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"accuracy ([\d.]+)", printed)]


def test_own_task(tmp_path: Path) -> None:
    printed = run_script("own_task.py", tmp_path)
    assert len(accuracies(printed)) == 10
    assert accuracies(printed)[-1] > 0.9
    assert "staleness {0: " in printed


def test_own_dataset(tmp_path: Path) -> None:
    printed = run_script("own_dataset.py", tmp_path)
    assert accuracies(printed)[-1] > 0.8
    assert "worst digit 0." in printed


def test_own_dataset_as_a_task_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", str(EXAMPLES / "own_dataset.py"), "--engine", "virtual", "--updates", "3"]
    assert _run([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["batch_size"], made["updates"]) == (32, 3)
    assert made["metrics"].keys() == {"loss", "accuracy", "worst_digit"}


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Accuracy before and after the port."""
    folder = tmp_path_factory.mktemp("port")
    return {
        name: accuracies(run_script(f"port/{name}.py", folder))[-1] for name in ("before", "after")
    }


def test_the_port_learns_as_much(ported: dict[str, float]) -> None:
    assert ported["before"] > 0.9
    assert abs(ported["after"] - ported["before"]) < 0.04


def test_the_port_takes_five_lines() -> None:
    """Blank lines aside, every line of after.py that before.py does not have in its place."""
    before, after = (
        (EXAMPLES / "port" / name).read_text(encoding="utf-8").splitlines()
        for name in ("before.py", "after.py")
    )
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:]]
    assert 0 < len(new) <= 5, "\n".join(new)
    assert any(line.startswith("for epoch") for line in before)
    assert not any("__name__" in line for line in after), "a plain script, without a main guard"
