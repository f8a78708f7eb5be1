"""The papers' learning results: the scripts at the smallest size, and what they count."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gruppetto.trace import EvaluationRow
from test_experiments import load, rows_of_ten


@pytest.fixture(scope="module")
def rudra() -> ModuleType:
    return load("rudra_cifar10")


@pytest.fixture(scope="module")
def figure_9() -> ModuleType:
    return load("dutta_figure_9")


@pytest.fixture(scope="module")
def which() -> ModuleType:
    return load("which_protocol")


def pictures(folder: Path) -> Path:
    """CIFAR-10 as torchvision lays it out, with 40 and 10 pictures of noise."""
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, n in [*((f"data_batch_{i}", 8) for i in range(1, 6)), ("test_batch", 10)]:
        pixels = generator.integers(0, 256, (n, 3072), dtype=np.uint8)
        content = {b"data": pixels, b"labels": [i % 10 for i in range(n)]}
        (inner / name).write_bytes(pickle.dumps(content, 2))
    return folder


# --------------------------------------------------------------------- Rudra


def test_rudra_plans_every_run_once(rudra: ModuleType) -> None:
    planned = rudra.planned()
    names = [rudra.name_of(run) for run in planned]
    assert len(set(names)) == len(names)
    for seed in rudra.SEEDS:
        for n in (1, 2, 5, 15, 30):
            for modulation in ("none", "inverse-mean", "inverse"):
                wanted = f"softsync:n={n}", modulation, 4, 30, rudra.OPTIMIZER
                found = [r for r in planned if rudra.kind_of(r) == wanted and r["seed"] == seed]
                assert len(found) == 1
    assert rudra.kind_of(planned[0]) == ("hardsync", "none", 4, 30, rudra.OPTIMIZER)
    plain = [run["protocol"] for run in planned if rudra.kind_of(run)[-1] == rudra.PLAIN]
    assert plain == 2 * ["hardsync", "softsync:n=1"]


def test_a_run_of_rudra_goes_on_where_it_was_stopped(
    rudra: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rudra, "EPOCHS", 2)
    data, run = str(pictures(tmp_path / "data")), dict(rudra.planned()[1])
    run.update(learners=5, protocol="softsync:n=5")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("of a run that was killed at once")
    row = rudra.train(run, data, tmp_path / "whole")
    assert len(row["accuracy"]) == 2 and row["diverged_at"] is None
    assert sum(row["staleness"].values()) == 20
    assert rudra.train(run, data, tmp_path / "whole") == row  # read, not trained again
    with monkeypatch.context() as patch:
        patch.setattr(rudra, "StuckAtChance", lambda: lambda r: getattr(r, "row", 0) == 13)
        assert rudra.train(run, data, tmp_path / "stopped")["updates"] < row["updates"]
    assert rudra.train(run, data, tmp_path / "stopped") == row


def test_a_run_that_stands_at_chance_ends(rudra: ModuleType) -> None:
    def ends(*accuracies: float) -> list[bool]:
        watch = rudra.StuckAtChance()
        rows = [
            EvaluationRow(version=n, time=1.0, samples=n, epoch=1.0, train_loss=2.3,
                          metrics={"accuracy": value})
            for n, value in enumerate(accuracies)
        ]  # fmt: skip
        return [watch(row) for row in rows]

    assert ends(0.1, 0.1, 0.1, 0.1, 0.1) == [False, False, False, True, False]
    assert ends(0.3, 0.1, 0.1, 0.2, 0.1, 0.1) == 6 * [False]


def test_rudras_tables(rudra: ModuleType, tmp_path: Path) -> None:
    rows = [
        {**run, "diverged_at": None, "accuracy": [0.3, 0.5], "time": 7.0, "updates": 9,
         "staleness": {"0": 3, "1": 6, "61": 1}}
        for run in rudra.planned()
    ]  # fmt: skip
    rows[1].update(diverged_at=0.1, accuracy=[])
    rows.reverse()  # runs end in any order
    load("resumable").save(rows, tmp_path / "rows.json")
    rudra.draw(rows[:30], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    table = rudra.tables(json.loads((tmp_path / "rows.json").read_text()))
    assert "Hardsync: 50.0 (50.0, 50.0)." in table
    # σ > 2n is 61 of ten gradients for every n; one of two seeds diverged.
    assert "| 30 | 1 | 70.0 (90.0, 50.0) | 50.0 (50.0, 50.0) |" in table
    assert "| 6.70 | 29.00 | 1.0e-01 |" in table
    assert "| 1920 | 64 | 30 | 50.0 (50.0, 50.0) | 7 |" in table
    assert "| softsync:n=1 | 50.0 (50.0, 50.0) | 50.0 (50.0, 50.0) |" in table


# ------------------------------------------------------------------ figure 9


def test_figure_9_from_data_to_picture(figure_9: ModuleType, tmp_path: Path) -> None:
    task = figure_9.grey_task(rows_of_ten(60, 0), rows_of_ten(30, 1))
    rows = []
    for name, (protocol, modulation, _) in figure_9.RUNS.items():
        options = {"learners": 4, "batch_size": 10, "every": 2}
        row = figure_9.one_curve(task, protocol, modulation, 12, 0, **options)
        rows.append({"name": name, **row})
        assert row["version"][-1] == 12
        assert row["loss"][-1] < row["loss"][0]
    assert rows[0]["mean_staleness"] > 2 and rows[-1]["mean_staleness"] == 0
    assert rows[0]["loss"] != rows[2]["loss"], "a small C shortens steps"
    figure_9.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000
    assert figure_9.table(rows).count("\n") == 1 + len(rows)


def test_cifar10_in_grey(figure_9: ModuleType, tmp_path: Path) -> None:
    task = figure_9.cifar10_in_grey(str(pictures(tmp_path)))
    pixels, labels = task.train.tensors
    assert pixels.shape == (40, 1024) and labels.shape == (40,)
    content = pickle.loads((tmp_path / "cifar-10-batches-py" / "data_batch_1").read_bytes())
    colours = content[b"data"][0].reshape(3, 1024) / 255
    expected = 0.2989 * colours[0] + 0.587 * colours[1] + 0.114 * colours[2]
    assert torch.allclose(pixels[0].double(), torch.from_numpy(expected), atol=1e-6)


def test_spikes_are_counted_from_the_lowest_point_before(figure_9: ModuleType) -> None:
    logs = [1.0, 0.8, 0.84, 0.9, 0.7, 0.96]
    count, highest = figure_9.spikes({"loss": [math.exp(x) for x in logs]})
    assert count == 2 and highest == pytest.approx(0.26)


# --------------------------------------------------------------- who wins where


def small(which: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One problem, two methods, two rates, and a target that is soon reached or never."""
    problem = dict(
        which.PROBLEMS["least-squares"], task="least-squares:n=60,d=3", learners=4, batch_size=5,
        target="excess_loss=0.05", epochs=4, max_time=60.0, rates=(1e-6, 0.1),
        delays={"one slow": ("exponential:mean=1", {3: "exponential:mean=20"})},
        methods={"async": ("async", "none"), "Ringmaster": ("ringmaster:r=4", "none")},
    )  # fmt: skip
    monkeypatch.setattr(which, "PROBLEMS", {"least-squares": problem})


def test_rates_are_found_before_anybody_is_judged(
    which: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small(which, monkeypatch)
    rows: list[dict[str, Any]] = []
    to_do = which.jobs(rows)
    assert {job["seed"] for job in to_do} == set(which.TUNING) and len(to_do) == 8
    rows += [which.train(job) for job in to_do]
    assert all((row["seconds"] is None) == (row["rate"] == 1e-6) for row in rows)
    to_do = which.jobs(rows)
    assert {(job["rate"], job["seed"]) for job in to_do} == {(0.1, s) for s in which.JUDGES}
    rows += [which.train(job) for job in to_do]
    assert which.jobs(rows) == []
    which.save(sorted(rows, key=which.place_of), tmp_path / "rows.json")
    table = which.tables(json.loads((tmp_path / "rows.json").read_text()))
    assert "seconds to excess_loss=0.05" in table
    assert table.count("**") == 2, "one is the best"
    assert "; 0.1)" in table


def test_all_protocols_and_delays_of_the_comparison_exist(which: ModuleType) -> None:
    from gruppetto.delays import DELAYS
    from gruppetto.protocols import PROTOCOLS
    from gruppetto.staleness import MODULATIONS

    for problem in which.PROBLEMS.values():
        for protocol, modulation in problem["methods"].values():
            PROTOCOLS.parse(protocol).check(problem["learners"])
            MODULATIONS.parse(modulation)
        for law, own in problem["delays"].values():
            for spec in (law, *own.values()):
                DELAYS.parse(spec)
    means = [DELAYS.parse(law).expectation() for law in which.DELAYS.values()]
    assert means == pytest.approx([1.0] * len(means), rel=1e-3)
