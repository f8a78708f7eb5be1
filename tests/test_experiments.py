"""The experiments run: the smallest sizes, to see that they still fit the library."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", EXPERIMENTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load("paper_figures")


@pytest.fixture(scope="module")
def prediction() -> ModuleType:
    return load("prediction")


def rows_of_ten(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 10, generator=generator)
    return TensorDataset(features, features.argmax(1))


@pytest.fixture(scope="module")
def curves(figures: ModuleType) -> list[dict[str, Any]]:
    task = figures.softmax_task(rows_of_ten(200, 0), rows_of_ten(100, 1))
    settings = {
        "protocols": ["async", "k-batch-async:k=4", "hardsync"], "seeds": 2, "learners": 8,
        "delay": "exponential:mean=1", "rate": 0.05, "updates": 40, "every": 5,
    }  # fmt: skip
    rows: list[dict[str, Any]] = figures.curves(task, settings)
    return rows


def test_speedups_are_those_of_theory(figures: ModuleType) -> None:
    rows = figures.speedups(list(figures.LAWS.values()), learners=3, simulated=2_000, seed=0)
    assert len(rows) == 9
    for row in rows:
        assert row["simulated"] == pytest.approx(row["theory"], rel=0.1)


def test_run_times_lie_within_what_is_certain(figures: ModuleType, tmp_path: Path) -> None:
    laws = figures.SETTINGS["figure-6"]["laws"]
    rows = figures.run_times(laws, learners=3, updates=100, simulated=2_000, seed=0)
    for row in rows:
        assert row["simulated"] >= 0.9 * row["low"]
        assert row["high"] is None or row["simulated"] <= 1.1 * row["high"]
    figures.draw_run_times(rows, tmp_path / "figure-6.png")
    assert (tmp_path / "figure-6.png").stat().st_size > 5_000


def test_curves_of_training(figures: ModuleType, curves: list[dict[str, Any]]) -> None:
    assert [row["protocol"] for row in curves][::2] == ["async", "k-batch-async:k=4", "hardsync"]
    for row in curves:
        assert row["version"] == list(range(5, 45, 5))
        assert row["loss"][-1] < row["loss"][0]
    summary = figures.read_off(curves, (4, 1_000))
    asynchronous, batches, hardsync = (s["mean_staleness"] for s in summary)
    assert 5 < asynchronous <= 7 and 1 < batches <= 1.75 and hardsync == 0
    assert all(list(s["at"]) == ["4"] for s in summary)
    assert summary[0]["total_time"] < summary[1]["total_time"] < summary[2]["total_time"]


def test_the_softmax_regression_is_the_papers(figures: ModuleType) -> None:
    torch.manual_seed(0)
    model = figures.SoftmaxRegression()
    assert float(model.linear.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    pixels, labels = torch.rand(5, 784), torch.arange(5)
    with torch.no_grad():
        loss = figures.objective(model(pixels), (pixels, labels))
        penalty = 0.01 * model.linear.weight.square().sum()
        plain = torch.nn.functional.cross_entropy(model.linear(pixels), labels)
    assert float(loss) == pytest.approx(float(plain + penalty))


def test_figures_are_not_made_twice(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    small = {"laws": list(figures.LAWS.values()), "learners": 2, "simulated": 100, "seed": 0}
    settings = {"figure-5": small, "figure-8": figures.SETTINGS["figure-8"]}
    monkeypatch.setattr(figures, "SETTINGS", settings)
    options = ["--out", str(tmp_path), "--json", str(tmp_path / "numbers.json")]
    figures.main(options)
    printed = capsys.readouterr().out
    assert "figure-5: computed" in printed and "figure-8: left out" in printed
    (tmp_path / "figure-5.png").unlink()
    figures.main(options)
    assert "figure-5: there" in capsys.readouterr().out
    assert (tmp_path / "figure-5.png").exists()
    assert list(json.loads((tmp_path / "numbers.json").read_text())) == ["figure-5"]


def test_a_prediction_and_its_run(prediction: ModuleType) -> None:
    law = "exponential:mean=0.01"
    said = prediction.predict("k-async:k=2", law, 2, run_seconds=0.2, num_simulated=20, long=5_000)
    assert said["kind"] == "exact"
    assert said["long_run"] == pytest.approx(said["theory"], rel=0.03)
    assert said["low"] < said["middle"] < said["high"]
    run = prediction.measure("k-async:k=2", law, 2, said["updates"], seed=0)
    assert run["updates"] == said["updates"] and run["ratio"] > 0.99
    rows = prediction.summarise([said], [run, {**run, "ratio": 2.0}])
    assert rows[0]["repeats"] == 2 and np.isclose(rows[0]["ratio_high"], 2.0)
    assert "`k-async:k=2`" in prediction.as_table(rows)


def test_kept_results_have_the_settings_of_the_script(figures: ModuleType) -> None:
    kept = json.loads((EXPERIMENTS / "paper_figures.json").read_text())
    assert {name: numbers["settings"] for name, numbers in kept.items()} == figures.SETTINGS
