"""The accuracy of decoupled backpropagation: the script at the smallest size, and its table."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import ModuleType

import pytest

import gruppetto as gp
from test_experiments import EXPERIMENTS, load
from test_paper_experiments import pictures


@pytest.fixture(scope="module")
def decoupled() -> ModuleType:
    return load("decoupled_cifar10")


def test_every_run_is_planned_once(decoupled: ModuleType) -> None:
    planned = decoupled.planned()
    names = [decoupled.name_of(run) for run in planned]
    assert len(set(names)) == len(names)
    for seed in decoupled.SEEDS:
        for method in ("bp:modules=2", "ddg:modules=2", "ddg:modules=4", "fr:modules=4",
                       "fdg:modules=4"):  # fmt: skip
            assert f"{seed}-resnet20-{method}".replace(":", "-").replace("=", "-") in names
    adam = [run for run in planned if run["model"] == "resnet8"]
    assert [run["decouple"] for run in adam] == ["bp:modules=2", "ddg:modules=2"]


def test_a_run_goes_on_where_it_was_stopped(
    decoupled: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoupled, "EPOCHS", 2)
    monkeypatch.setattr(decoupled, "BATCH_SIZE", 16)
    data = str(pictures(tmp_path / "data"))
    run = {**decoupled.planned()[1], "model": "resnet8"}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("of a run that was killed at once")
    row = decoupled.train(run, data, tmp_path / "whole")
    assert decoupled.train(run, data, tmp_path / "whole") == row  # read, not trained again
    assert len(row["accuracy"]) == len(row["train_loss"]) == 2 and row["diverged_at"] is None
    with monkeypatch.context() as patch:
        stops = functools.partial(gp.train, on_event=lambda r: getattr(r, "version", 0) == 2)
        patch.setattr(gp, "train", stops)
        with pytest.raises(KeyboardInterrupt):
            decoupled.train(run, data, tmp_path / "stopped")
    resumed = decoupled.train(run, data, tmp_path / "stopped")
    # In the virtual time of its schedule a stop costs something: modules wait for the last one.
    assert resumed.pop("time") >= row.pop("time")
    assert resumed == row


def test_a_run_that_diverges_is_chance(
    decoupled: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoupled, "BATCH_SIZE", 16)
    data = str(pictures(tmp_path / "data"))
    run = {**decoupled.planned()[0], "model": "resnet8", "optimizer": "sgd:lr=1e8"}
    row = decoupled.train(run, data, tmp_path / "run")
    assert row["diverged_at"] is not None and decoupled.accuracy(row) == 0.1
    assert decoupled.train(run, data, tmp_path / "run") == row


def test_the_table(decoupled: ModuleType, tmp_path: Path) -> None:
    rows = [
        {**run, "diverged_at": None, "accuracy": [0.5, 0.7 + 0.1 * run["seed"]],
         "time": [1.0, 2.0], "train_loss": [1.0, 0.5], "mean_staleness": 0.5}
        for run in decoupled.planned()
    ]  # fmt: skip
    rows[2].update(diverged_at=0.3, time=[], accuracy=[], train_loss=[])
    load("resumable").save(rows, tmp_path / "rows.json")
    table = decoupled.tables(json.loads((tmp_path / "rows.json").read_text()))
    assert (
        "| `ddg:modules=2` | 75.0 (70.0, 80.0) | 75.0 (70.0, 80.0) | 0.500, 0.500 | 0.50 | 2 |"
        in table
    )
    assert "| `ddg:modules=4` | 45.0 (10.0, 80.0) |" in table  # one of two seeds diverged
    assert "| resnet20 | sgd, 0.1 | `ddg:modules=4,stash=none` | 75.0 (70.0, 80.0) |" in table
    decoupled.draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    assert "| resnet8 | adam, 0.001 | `bp:modules=2` | 70.0 (70.0) |" in table


def test_the_document_shows_what_was_measured(decoupled: ModuleType) -> None:
    rows = load("resumable").read(EXPERIMENTS / "decoupled_cifar10.json")
    assert {decoupled.name_of(row) for row in rows} == {
        decoupled.name_of(run) for run in decoupled.planned()
    }
    text = (EXPERIMENTS.parent / "docs" / "decoupled.md").read_text(encoding="utf-8")
    assert decoupled.tables(rows) in text
