"""Bounds on the command line: options that fold into the protocol, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gruppetto.cli import _run

TRAIN = ("train", "digits", "--engine", "virtual", "--delay", "exponential:mean=1", "--quiet")
SLOW = ("--delay", "3=constant:value=500")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert _run([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_bound_becomes_part_of_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*TRAIN, "--epochs", "1", "--protocol", "k-async:k=2", "--max-staleness", "1")
    found = run_json(capsys, *words, "--on-stale", "discard", "--out", "run")
    assert found["protocol"] == "k-async:k=2,max_staleness=1,on_stale=discard"
    assert found["max_staleness"] == 1 and found["mini_batches_discarded"] > 0
    assert found["learners_without_contribution"] == []
    assert found["without_contribution_why"] is None
    assert run_json(capsys, "replay", "run")["matches"]
    # The same, written as one.
    words = (*TRAIN, "--epochs", "1", "--protocol", found["protocol"])
    assert run_json(capsys, *words)["weights_sha256"] == found["weights_sha256"]


def test_a_learner_without_contribution_is_named_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run([*TRAIN, *SLOW, "--epochs", "1", "--protocol", "ringmaster:r=3"]) == 0
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith("learner 3 contributed nothing: ")
    assert "were restarted as too stale" in last


def test_a_comparison_names_it_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    protocols = ("--protocol", "ringmaster:r=3", "--protocol", "k-sync:k=3")
    assert _run(["compare", *TRAIN[1:], *SLOW, "--epochs", "1", *protocols, "--out", "both"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "contributed nothing" in line]
    assert [line.partition(": learner 3")[0] for line in told] == ["ringmaster:r=3", "k-sync:k=3"]
    assert "were cancelled by updates that did not wait for them" in told[1]
    assert "ringmaster:r=3: learner 3 contributed nothing" in Path("both/report.html").read_text()


def test_bounds_make_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--protocol", "async", "--max-staleness", "3", "--max-staleness", "5")
    found = run_json(capsys, "compare", *TRAIN[1:], "--updates", "10", *words, "--out", "grid")
    expected = ["async:max_staleness=3", "async:max_staleness=5"]
    assert [run["protocol"] for run in found["runs"]] == expected
    names = sorted(path.name for path in Path("grid").iterdir() if path.is_dir())
    assert names == ["00-async-max_staleness=3", "01-async-max_staleness=5"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--protocol", "k-sync:k=2", "--max-staleness", "3"), "cancels what would be late"),
        (("--max-staleness", "3"), "max staleness: hardsync cancels what would be late"),
        (("--protocol", "async", "--on-stale", "wait"), "got on_stale=wait alone"),
        (("--protocol", "async", "--max-staleness", "-1"), "expected max_staleness >= 0"),
        (("--protocol", "ssp:s=1", "--max-staleness", "1"), "no bound beside its own rules"),
        (
            ("--protocol", "async:max_staleness=2", "--max-staleness", "3"),
            "says 2 and 3 is given beside it; expected one of the two",
        ),
        (
            ("--protocol", "async", "--max-staleness", "2", "--on-stale", "wait"),
            "lets 3 gradients be under way, and there are 4 learners; expected max_staleness >= 3",
        ),
    ],
)
def test_bad_usage_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert _run([*TRAIN, *words, "--out", "run"]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert not Path("run").exists()


def test_protocols_are_listed_with_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["protocols"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "async[:max_staleness=][,on_stale=discard|restart|wait]" in listed
    assert "ringmaster:r=" in listed and "ssp:s=" in listed


def test_bounds_are_simulated_and_theory_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    protocol = "async:max_staleness=3,on_stale=discard"
    words = ("--learners", "8", "--updates", "500", "--delay", "exponential:mean=1")
    found = run_json(capsys, "simulate", "--protocol", protocol, *words)
    assert (found["expected_is"], found["expected_update_time"]) == ("unknown", None)
    assert found["max_staleness"] == 3 and found["mini_batches_discarded"] > 0
    assert 0 < found["cancelled_time_fraction"] < 1 and found["is_bounded"]
    waits = run_json(capsys, "simulate", "--protocol", "ssp:s=0", *words)
    assert waits["idle_fraction"] > 0.3
