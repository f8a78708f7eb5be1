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

import gruppetto as gp

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def load(name: str) -> ModuleType:
    if str(EXPERIMENTS) not in sys.path:
        sys.path.append(str(EXPERIMENTS))  # as for a script in that folder
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


@pytest.mark.parametrize("protocol", ["k-async:k=2", "k-batch-sync:k=2"])
def test_a_prediction_and_its_run(prediction: ModuleType, protocol: str) -> None:
    law = "exponential:mean=0.01"
    said = prediction.predict(protocol, law, 2, run_seconds=0.2, num_simulated=20, long=5_000)
    if said["theory"] is not None:
        assert said["long_run"] == pytest.approx(said["theory"], rel=0.03)
    assert said["low"] < said["middle"] < said["high"]
    run = prediction.measure(protocol, law, 2, said["updates"], seed=0)
    assert run["updates"] == said["updates"] and run["ratio"] > 0.99
    assert run["by_draws"] < run["by_draws_and_computing"]
    rows = prediction.summarise([said], [run, {**run, "ratio": 2.0}])
    assert rows[0]["repeats"] == 2 and np.isclose(rows[0]["ratio_high"], 2.0)
    assert f"`{protocol}`" in prediction.as_table(rows)


def test_kept_results_have_the_settings_of_the_script(figures: ModuleType) -> None:
    kept = json.loads((EXPERIMENTS / "paper_figures.json").read_text())
    assert {name: numbers["settings"] for name, numbers in kept.items()} == figures.SETTINGS


def test_methods_beside_their_controls() -> None:
    methods = load("methods")
    settings = {
        **methods.SETTINGS, "learners": 4, "epochs": 0.5, "rates": [0.05], "small_rates": [0.01],
    }  # fmt: skip
    rows = methods.measure(
        settings, [methods.PLAIN, ("async", "distance:c={r*0.005}", "gap-aware")], [0]
    )
    assert [(row["rate"], row["compensation"]) for row in rows] == [
        (0.05, "none"), (0.05, "gap-aware"), (0.01, "none"),
    ]  # fmt: skip
    assert rows[0]["mean_factor"] == [1.0] and 0 < rows[1]["mean_factor"][0] < 1
    table, controls = methods.as_tables(settings, rows)
    assert "| async | `distance:c=0.005·α₀` | `gap-aware` | 0." in table
    assert controls.count("0.05") == 1 and controls.count("plain async") == 1


def test_the_document_shows_the_methods_that_were_measured() -> None:
    methods = load("methods")
    kept = json.loads((EXPERIMENTS / "methods.json").read_text())
    assert kept["settings"] == methods.SETTINGS
    measured = {(r["protocol"], r["modulation"], r["compensation"]) for r in kept["rows"]}
    assert measured == set(methods.ROWS)
    text = (EXPERIMENTS.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    for table in methods.as_tables(kept["settings"], kept["rows"]):
        assert table in text


@pytest.fixture(scope="module")
def guard() -> ModuleType:
    return load("guard")


def test_the_guard_on_what_trains_and_what_does_not(guard: ModuleType) -> None:
    same = {"batch_size": 10, "epochs": 8, "modulation": "none"}
    rows = [
        guard.judge("least-squares:n=300,d=10", 8, "async", optimizer=f"sgd:lr={rate}", **same)
        for rate in (0.02, 0.5)
    ]
    assert [row["outcome"] for row in rows] == ["trained", "failed"]
    assert set(rows[0]["tripped_at"].values()) == {None}
    places = list(rows[1]["tripped_at"].values())
    assert places == sorted(places) and places[-1] < rows[1]["gradients"]
    summary = guard.summarise(rows)
    assert [(r["trained_stopped"], r["failed_stopped"]) for r in summary] == [(0, 1)] * 6
    assert "0 of   1" in guard.as_table(summary)


def test_kept_results_of_the_guard(guard: ModuleType) -> None:
    """They have the script's settings, and the default stops nothing that trains."""
    kept = json.loads((EXPERIMENTS / "guard.json").read_text())
    assert kept["settings"] == json.loads(json.dumps(guard.SETTINGS))
    assert kept["summary"] == json.loads(json.dumps(guard.summarise(kept["runs"])))
    default = next(row for row in kept["summary"] if row["factor"] == 4.0)
    assert default["trained_stopped"] == 0 < default["failed_stopped"]


def test_bounds_beside_plain_async() -> None:
    bounds = load("bounds")
    settings = {**bounds.SETTINGS, "learners": 4, "epochs": 0.5, "target": 0.3}
    rows = [bounds.measure(settings, spec, "none", 0) for spec in ("async", "ringmaster:r=1")]
    assert rows[0]["lost_share"] == 0.0 < rows[1]["lost_share"]
    assert rows[0]["max_staleness"] > rows[1]["max_staleness"] == 0
    table = bounds.as_table(bounds.summarise(rows), "none")
    assert len(table.splitlines()) == 4 and "| `ringmaster:r=1` | " in table


def test_the_document_shows_the_bounds_that_were_measured() -> None:
    bounds = load("bounds")
    kept = json.loads((EXPERIMENTS / "bounds.json").read_text())
    assert kept["settings"] == bounds.SETTINGS
    text = (EXPERIMENTS.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    assert bounds.as_table(bounds.summarise(kept["runs"]), "inverse-mean:cap=true") in text


# ------------------------------------------------------------------------------- AdaSync


def test_adasync_beside_fixed_k() -> None:
    adasync = load("adasync_digits")
    rows = [
        adasync.measure(protocol, 0, max_time=12.0, evaluate_every=0.1)
        for protocol in adasync.protocols("k-sync")[:2]
    ]
    assert [row["protocol"][:7] for row in rows] == ["adasync", "k-sync:"]
    assert all(row["mini_batches"] >= row["updates"] > 10 for row in rows)
    rows[0]["time_to_target"], rows[1]["time_to_target"] = 7.0, None
    table = adasync.as_table(adasync.summarise(rows))
    assert "| 7 (7 to 7) |" in table and "| not reached |" in table


def test_the_document_shows_the_adasync_that_was_measured() -> None:
    adasync = load("adasync_digits")
    kept = json.loads((EXPERIMENTS / "adasync_digits.json").read_text())
    settings = {**adasync.SETTINGS, "interval": adasync.INTERVAL, "target": adasync.TARGET}
    assert kept["settings"] == settings
    assert kept["summary"] == adasync.summarise(kept["runs"])
    text = (EXPERIMENTS.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    assert adasync.as_table(kept["summary"]) in text


def test_adasync_on_pictures_is_drawn_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of its runs, on rows of numbers; then the one that is left; then only the figure."""
    adasync = load("adasync_cifar10")
    task = gp.Task(
        model=lambda: torch.nn.Linear(10, 10), train=rows_of_ten(200, 0), test=rows_of_ten(50, 1)
    )
    loaded: list[str] = []

    def load_small(data: str) -> gp.Task:
        loaded.append(data)
        return task

    monkeypatch.setattr(adasync, "load", load_small)
    monkeypatch.setattr(adasync, "SETTINGS", {**adasync.SETTINGS, "max_time": 0.5})
    runs = [(protocol, 0) for cell in adasync.CELLS for protocol in adasync.protocols(cell)[:2]]
    monkeypatch.setattr(adasync, "planned", lambda: runs[:2])
    options = ["--out", str(tmp_path / "here")]
    adasync.main([*options, "--data", "DIR"])
    with (tmp_path / "here.jsonl").open("a") as file:
        file.write('{"protocol": "cut o')
    monkeypatch.setattr(adasync, "planned", lambda: runs)
    adasync.main([*options, "--data", "DIR"])
    adasync.main(options)
    assert loaded == ["DIR", "DIR"]
    printed = capsys.readouterr().out
    assert "2 of 2: k-sync:k=2, seed 0" in printed and printed.count("1 of 2: ") == 2
    rows = [json.loads(line) for line in (tmp_path / "here.jsonl").read_text().splitlines()]
    assert [(row["protocol"], row["seed"]) for row in rows] == runs
    assert rows[0]["progress"][0][0] == 0.0 and not rows[1]["progress"]
    summary = json.loads((tmp_path / "here.json").read_text())["summary"]
    assert [row["protocol"] for row in summary] == [protocol for protocol, _ in runs]
    assert all(0 < row["error_at_end"] <= row["error_at_quarter"] + 5 for row in summary)
    assert (tmp_path / "here.png").stat().st_size > 5_000


def test_divergence_counts_as_chance_from_then_on() -> None:
    adasync = load("adasync_cifar10")
    row = {"times": [10.0, 20.0], "errors": [50.0, 40.0], "diverged_at": 25.0}
    grid = np.array([0.0, 5.0, 10.0, 20.0, 24.0, 25.0, 40.0])
    assert list(adasync.curve(row, grid)) == [90, 70, 50, 40, 40, 90, 90]
    assert list(adasync.curve({**row, "diverged_at": None}, grid))[-1] == 40
    assert len(adasync.planned()) == 16
