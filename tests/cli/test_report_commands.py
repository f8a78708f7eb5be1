"""What ``compare`` and ``report`` leave beside the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gruppetto.cli import _run

WORDS = ("digits", "--learners", "2", "--updates", "6", "--evaluate-every", "0.02", "--quiet")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_compare_draws_error_against_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *WORDS, "--protocol", "async", "--protocol", "hardsync"]
    assert _run([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["png"] == str(Path(made["run"]) / "error-against-time.png")
    assert Path(made["png"]).read_bytes().startswith(b"\x89PNG")
    assert Path(made["report"]).parent == Path(made["png"]).parent
    assert _run(["report", made["run"], "--png", "again.png"]) == 0
    assert Path("again.png").read_bytes() == Path(made["png"]).read_bytes()


def test_compare_without_evaluation_has_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["compare", *WORDS, "--evaluate", "off", "--out", "c", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["png"] is None
    assert not Path("c/error-against-time.png").exists()


def test_compare_names_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["compare", *WORDS, "--out", "c"]) == 0
    assert "picture: c/error-against-time.png" in capsys.readouterr().out
