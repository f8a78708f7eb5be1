"""Runs that diverge: what ends them, what is said, and that replay and resume agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gruppetto as gp
from gruppetto.cli import _run
from gruppetto.errors import Diverged, RunFolderError
from gruppetto.testing import reference
from gruppetto.trace import EventRow, Row, read_trace

HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
#: Twice what plain SGD on this problem takes, and stale besides.
TOO_HIGH = {
    "protocol": "async",
    "modulation": "none",
    "learners": 8,
    "batch_size": 10,
    "epochs": 5,
    "optimizer": "sgd:lr=0.4",
    "delay": "exponential:mean=1",
    "evaluate_every": 0.25,
}


def train(out: Path, task: str = "least-squares:n=400,d=10", **settings: Any) -> gp.Run:
    chosen = {**TOO_HIGH, "engine": "virtual", "progress": False, **settings}
    return gp.train(task, out=out, **chosen)


def diverges(out: Path, **settings: Any) -> tuple[str, dict[str, Any]]:
    """The sentence and the summary of a run that is to diverge."""
    with pytest.raises(Diverged) as caught:
        train(out, **settings)
    return str(caught.value), dict(caught.value.result)


def test_a_rate_too_high_is_stopped_early_with_what_to_try(tmp_path: Path) -> None:
    text, result = diverges(tmp_path / "run")
    known = result["diverged"]
    assert result["stopped_by"] == "diverged"
    assert result["epochs"] < 2.5, "half of the run at most"
    assert known["cause"] == "loss"
    assert known["gradients"] == 20
    assert known["loss"] > 4 * known["start_loss"] > 0
    assert known["learning_rate"] == known["effective_rate"] == 0.4
    staleness = [s for row in read_trace(tmp_path / "run/trace").updates for s in row.staleness]
    # The gradient that trips it is not applied; the 19 before it are.
    assert known["max_staleness"] >= max(staleness[-19:])
    assert known["mean_staleness"] == pytest.approx(sum(staleness[-19:]) / 19, abs=2.0)
    assert known["try"][0] == "--modulation inverse-mean:cap=true"
    assert text == (
        f"diverged after {result['updates']} updates: the loss is {known['loss']:.4g} (mean of "
        f"the last 20 gradients) against {known['start_loss']:.4g} at the start; the staleness of "
        f"these was {known['mean_staleness']:.3g} on average and {known['max_staleness']} at most; "
        "the learning rate was 0.4; try --modulation inverse-mean:cap=true, a lower learning rate, "
        f"--clip norm:max=1 or a bound like --max-staleness {int(known['mean_staleness'] // 2)}; "
        f"the run is in {tmp_path / 'run'}"
    )


def test_what_is_said_tried_is_what_helps(tmp_path: Path) -> None:
    """The first of the list, at the same rate."""
    run = train(tmp_path / "run", modulation="inverse-mean:cap=true")
    assert run.result["stopped_by"] == "epochs"
    assert run.result["diverged"] is None
    assert run.result["metrics"]["excess_loss"] < 0.1


def test_less_momentum_is_said_where_there_is_some_and_helps(tmp_path: Path) -> None:
    """At a quarter of the rate above it is the momentum that diverges."""
    _, result = diverges(tmp_path / "run", optimizer="sgd:lr=0.1,momentum=0.9", epochs=20)
    assert result["diverged"]["try"][:3] == [
        "--modulation inverse-mean:cap=true",
        "a lower learning rate",
        "less momentum",
    ]
    run = train(tmp_path / "without", optimizer="sgd:lr=0.1", epochs=20)
    assert run.result["stopped_by"] == "epochs"
    assert run.result["metrics"]["excess_loss"] < 0.1


def test_without_staleness_other_things_are_said(tmp_path: Path) -> None:
    text, result = diverges(
        tmp_path / "run", protocol="hardsync", optimizer="sgd:lr=3", clip="value:max=100", epochs=20
    )
    assert result["diverged"]["mean_staleness"] == 0.0
    assert result["diverged"]["try"] == ["a lower learning rate"]
    assert "try a lower learning rate; the run is in" in text
    assert "was 0 on average and 0 at most" in text


def test_modulation_is_told_beside_the_rate(tmp_path: Path) -> None:
    text, result = diverges(
        tmp_path / "run", modulation="inverse-mean", optimizer="sgd:lr=4", epochs=20
    )
    known = result["diverged"]
    assert known["effective_rate"] == pytest.approx(4 / (1 + 7))
    assert "the learning rate was 4, times modulation 0.5; try a lower learning rate," in text
    assert not any("modulation" in each for each in known["try"])


def test_gradients_that_are_not_finite_tell_as_much(tmp_path: Path) -> None:
    text, result = diverges(
        tmp_path / "run", guard="off", optimizer="sgd:lr=1e30", learners=4, epochs=20
    )
    known = result["diverged"]
    assert known["cause"] == "not-finite"
    assert "mini-batches in a row were not finite; the loss was" in text
    assert f"(mean of {known['gradients']} gradients)" in text
    assert "the staleness of these was" in text
    assert "the learning rate was 1e+30" in text


def test_not_finite_from_the_first_gradient_on(tmp_path: Path) -> None:
    with pytest.raises(Diverged) as caught:
        gp.train(reference("not-finite"), learners=3, engine="virtual", progress=False,
                 out=tmp_path / "run")  # fmt: skip
    known: Any = caught.value.result["diverged"]
    assert known["loss"] is known["start_loss"] is known["learning_rate"] is None
    assert str(caught.value) == (
        "diverged after 0 updates: the gradients of several mini-batches in a row were not finite; "
        f"try a lower learning rate or --clip norm:max=1; the run is in {tmp_path / 'run'}"
    )


def test_the_last_finite_evaluation_is_kept(tmp_path: Path) -> None:
    _, result = diverges(
        tmp_path / "run", guard="off", optimizer="sgd:lr=1", learners=8, epochs=400,
        evaluate_every=0.05,
    )  # fmt: skip
    evaluations = read_trace(tmp_path / "run/trace").evaluations
    assert any(value is None for value in evaluations[-1].metrics.values())
    finite = [r for r in evaluations if all(v is not None for v in r.metrics.values())]
    assert result["metrics"] == finite[-1].metrics
    assert result["test_loss"] == finite[-1].metrics["loss"]


def test_a_run_that_does_not_diverge_is_untouched(tmp_path: Path) -> None:
    """Same commands, weights and rows with the guard as without."""
    runs = [
        train(tmp_path / guard, guard=guard, optimizer="sgd:lr=0.02,momentum=0.5")
        for guard in ("loss", "off")
    ]
    assert [runs[0].result[h] for h in HASHES] == [runs[1].result[h] for h in HASHES]
    assert read_trace(runs[0].folder.trace).updates == read_trace(runs[1].folder.trace).updates


def test_replay_trips_at_the_same_row(tmp_path: Path) -> None:
    _, result = diverges(tmp_path / "run")
    again = gp.replay(tmp_path / "run", progress=False)
    assert again["matches"], again["difference"]
    assert again["stopped_by"] == "diverged"
    assert again["diverged"] == result["diverged"]
    assert again["per_learner"] == result["per_learner"]


def test_a_resumed_run_trips_at_the_same_row(tmp_path: Path) -> None:
    _, whole = diverges(tmp_path / "whole")
    at = len(read_trace(tmp_path / "whole/trace").events) - 5

    def stop(row: Row) -> bool:
        return isinstance(row, EventRow) and row.row == at

    run = train(tmp_path / "run", on_event=stop)
    assert run.result["stopped_by"] == "callback"
    with pytest.raises(Diverged) as caught:
        gp.resume(tmp_path / "run", progress=False)
    assert [caught.value.result[h] for h in HASHES] == [whole[h] for h in HASHES]
    assert caught.value.result["diverged"] == whole["diverged"]
    with pytest.raises(RunFolderError, match=r"is complete \(diverged\)"):
        gp.resume(tmp_path / "run", progress=False)


def test_a_folder_of_before_has_no_guard(tmp_path: Path) -> None:
    """Without the setting, a run that the guard would end replays and goes on without it."""
    out = tmp_path / "run"
    run = train(out, guard="off", updates=150, epochs=None)
    assert run.result["stopped_by"] == "updates"
    config = json.loads((out / "config.json").read_text())
    for key in ("guard", "measure_gamma"):
        del config["settings"][key]
    (out / "config.json").write_text(json.dumps(config))
    assert gp.replay(out, progress=False)["matches"]
    assert gp.resume(out, updates=160, progress=False).result["updates"] == 160


WORDS = [
    "train", "least-squares:n=400,d=10", "--engine", "virtual", "--protocol", "async",
    "--modulation", "none", "--learners", "8", "--optimizer", "sgd:lr=0.4", "--batch-size", "10",
    "--delay", "exponential:mean=1", "--epochs", "5",
]  # fmt: skip


def test_the_command_line_says_it_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run([*WORDS, "--quiet", "--json", "--out", "run"]) == 1
    captured = capsys.readouterr()
    made = json.loads(captured.out)
    assert made["stopped_by"] == "diverged"
    assert made["diverged"]["try"][0] == "--modulation inverse-mean:cap=true"
    assert captured.err.startswith("gruppetto: diverged after ")
    assert captured.err.count("\n") == 1
    assert made["error"] in captured.err
    # The page shows a run that ended so.
    assert _run(["report", "run", "--json"]) == 0


def test_a_guard_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loose = [*WORDS, "--quiet", "--json", "--updates", "100"]
    assert _run([*loose, "--guard", "off"]) == 0
    assert json.loads(capsys.readouterr().out)["stopped_by"] == "updates"
    assert _run([*loose, "--guard", "loss:factor=1.2"]) == 1
    capsys.readouterr()
    assert _run([*WORDS, "--guard", "loss:factor=0.5"]) == 2
    assert "guard loss: expected factor > 1" in capsys.readouterr().err
    assert _run(["guards"]) == 0
    assert "loss:factor=4.0,floor=1.0" in capsys.readouterr().out


def test_resuming_a_folder_of_before_by_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A default that has come since does not refuse an older run; asking for it does."""
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "--quiet", "--out", "run"]
    assert _run([*words, "--updates", "20", "--guard", "off"]) == 0
    config = json.loads(Path("run/config.json").read_text())
    del config["settings"]["guard"]
    Path("run/config.json").write_text(json.dumps(config))
    assert _run([*words, "--updates", "30", "--resume", "--guard", "loss"]) == 2
    assert "guard=off, and guard=loss was asked for" in capsys.readouterr().err
    assert _run([*words, "--updates", "30", "--resume"]) == 0
