"""γ: how far staleness moves the gradient, against direct computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.engines.local import engine as local_engine
from gruppetto.protocols.messages import Contribution
from gruppetto.runs.parts import Parts, build_parts
from gruppetto.runs.train import plan_run
from gruppetto.testing import reference
from gruppetto.testing.checks import tell
from gruppetto.theory.estimates import estimate_gamma
from gruppetto.trace import EventRow, Row, read_trace
from gruppetto.training.parameters import Flat

HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")


def linear_task() -> gp.Task:
    """Half the mean squared error of a linear model in float64: ∇F(w) = Xᵀ(Xw − y)/n."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(300, 3, dtype=torch.float64, generator=generator)
    targets = features.sum(1, keepdim=True) + 1.0
    return gp.Task(
        model=lambda: nn.Linear(3, 1, bias=False, dtype=torch.float64),
        train=TensorDataset(features, targets),
        loss=lambda out, batch: 0.5 * nn.functional.mse_loss(out, batch[-1]),
        optimizer="sgd:lr=0.1",
        batch_size=10,
        epochs=1,
        name="linear",
    )


def parts_of(task: gp.Task | str, **settings: Any) -> Parts:
    wanted, ingredients = plan_run(
        task, **{"protocol": "async", "learners": 4, "delays": {}, "engine": "virtual", **settings}
    )
    return build_parts(wanted, ingredients)


def weights(*values: float) -> Flat:
    """Three weights, in the layout with its gap."""
    vector = torch.zeros(64, dtype=torch.float64)
    vector[:3] = torch.tensor(values, dtype=torch.float64)
    return Flat([vector])


def contribution(version: int, staleness: int) -> Contribution:
    return Contribution(0, version, staleness, 10, 1.0)


def squares(values: torch.Tensor) -> float:
    return float(values.square().sum())


@pytest.mark.parametrize("size", [20, 290, 1000])
def test_against_a_direct_computation(size: int) -> None:
    """Batches of 256 and less are one mean over the sample; a fresh gradient counts 0."""
    task = linear_task()
    parts = parts_of(task, measure_gamma=size)
    assert parts.gamma is not None
    meter = parts.gamma._meter
    picked = meter._sample.indices
    assert len(set(picked.tolist())) == len(picked) == min(size, 300)
    features, targets = task.train[picked]  # type: ignore[index]

    def gradient(*values: float) -> torch.Tensor:
        vector = torch.tensor(values, dtype=torch.float64).view(3, 1)
        return features.T @ (features @ vector - targets) / len(features)

    parts.server.weights.copy_(weights(0.5, -1.0, 2.0))
    now = gradient(0.5, -1.0, 2.0)
    olds = [(0.0, 0.0, 0.0), (0.5, -1.0, 2.0), (0.4, -1.0, 1.0), (0.0, 0.0, 0.0)]
    made = meter.measure(
        parts.server.snapshot(),
        [contribution(7, 2), contribution(9, 0), contribution(8, 1), contribution(7, 2)],
        [weights(*old) for old in olds],
    )
    assert made is not None
    assert made.norm == pytest.approx(squares(now), rel=1e-12)
    assert made.changes[1] == 0.0
    for change, old in zip(made.changes, olds, strict=True):
        assert change == pytest.approx(squares(now - gradient(*old)), rel=1e-12, abs=1e-28)


def test_a_gradient_that_is_not_finite_is_no_measurement() -> None:
    parts = parts_of(linear_task(), measure_gamma=50)
    assert parts.gamma is not None
    measure = parts.gamma._meter.measure
    now = parts.server.snapshot()
    assert measure(now, [contribution(7, 2)], [weights(float("inf"), 0.0, 0.0)]) is None
    assert measure(now, [contribution(7, 2)], [weights(1.0, 0.0, 0.0)]) is not None


def test_the_same_weights_have_the_same_gradient_and_nothing_else_changes() -> None:
    """Dropout, BatchNorm and augmentation are the same each time; buffers and draws untouched."""
    parts = parts_of(reference(), measure_gamma=40)
    assert parts.gamma is not None
    state = parts.server.state_sha256()
    torch.manual_seed(1)
    np.random.seed(1)
    meter, now = parts.gamma._meter, parts.server.snapshot()
    first = meter.gradient(now.flat, now.others)
    drawn = float(torch.rand(1)), float(np.random.rand())
    again = meter.gradient(now.flat, now.others)
    assert all(torch.equal(a, b) for a, b in zip(first.vectors, again.vectors, strict=True))
    assert any(bool(v.any()) for v in first.vectors)
    torch.manual_seed(1)
    np.random.seed(1)
    assert drawn == (float(torch.rand(1)), float(np.random.rand()))
    assert parts.server.state_sha256() == state
    # The masks are those of one draw: other weights, other gradient.
    moved = now.flat.clone()
    moved.scale_(1.5)
    other = meter.gradient(moved, now.others)
    assert not all(torch.equal(a, b) for a, b in zip(first.vectors, other.vectors, strict=True))


# ------------------------------------------------------------------- whole runs


def train(out: Path, task: gp.Task | str | None = None, **settings: Any) -> gp.Run:
    chosen = {
        "protocol": "k-async:k=2", "learners": 3, "epochs": 3, "delay": "exponential:mean=1",
        "engine": "virtual", "progress": False, "evaluate_every": 0.5, **settings,
    }  # fmt: skip
    return gp.train(reference() if task is None else task, out=out, **chosen)


@pytest.mark.parametrize(
    "protocol", ["k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "k-batch-async:k=2"]
)
def test_measuring_changes_nothing_of_the_run(tmp_path: Path, protocol: str) -> None:
    """Weights, buffers, optimizer state, events, commands: as without."""
    with_gamma = train(tmp_path / "a", protocol=protocol, measure_gamma=30)
    without = train(tmp_path / "b", protocol=protocol)
    assert [with_gamma.result[h] for h in HASHES] == [without.result[h] for h in HASHES]
    assert without.result["gamma"] is None
    trace, other = (read_trace(run.folder.trace) for run in (with_gamma, without))
    assert not other.gammas
    assert trace.updates == other.updates and trace.evaluations == other.evaluations
    # Each stands for an evaluation, and tells of the newest update there.
    evaluated = [row.version for row in trace.evaluations]
    assert [row.version for row in trace.gammas] == [v for v in evaluated if v < len(trace.updates)
                                                     or v == trace.gammas[-1].version]  # fmt: skip
    for row in trace.gammas:
        update = trace.updates[row.version - 1]
        assert (row.staleness, row.time) == (update.staleness, update.time)
        assert all((c == 0.0) == (s == 0) for c, s in zip(row.squared_changes, row.staleness,
                                                           strict=True))  # fmt: skip
    changes = [c for row in trace.gammas for c in row.squared_changes]
    norms = [row.squared_norm for row in trace.gammas for _ in row.squared_changes]
    assert with_gamma.result["gamma"] == estimate_gamma(changes, norms)
    if "sync" in protocol and "async" not in protocol:
        assert with_gamma.result["gamma"] == 0.0
    assert gp.replay(with_gamma.folder.path, progress=False)["matches"]


def test_rows_are_those_of_the_weights_of_the_run(tmp_path: Path) -> None:
    """Against ∇F computed from the weights that plain SGD had before each update."""
    task = linear_task()
    run = train(tmp_path / "run", task, protocol="async", learners=4, epochs=2, measure_gamma=300,
                evaluate_every=0.25, modulation="none")  # fmt: skip
    features, targets = task.train[:]  # type: ignore[index]
    parts = parts_of(task)  # the same seed: the same initial weights
    versions = [parts.server.weights.vectors[0][:3].clone().view(3, 1)]
    story = tell(run.folder.path, 60)
    for update in story.updates:
        (only,) = update.contributions
        mini_batch = story.given[only.lease].mini_batch
        x, y = parts.mini_batches.fetch(mini_batch, torch.device("cpu"))[0]
        versions.append(versions[-1] - 0.1 * x.T @ (x @ versions[only.version] - y) / len(x))

    def full(version: int) -> torch.Tensor:
        return features.T @ (features @ versions[version] - targets) / len(features)

    assert len(story.trace.gammas) == 8 and len(versions) == 61
    for row in story.trace.gammas:
        j = row.version - 1
        assert row.squared_norm == pytest.approx(squares(full(j)), rel=1e-9)
        for change, staleness in zip(row.squared_changes, row.staleness, strict=True):
            assert change == pytest.approx(squares(full(j) - full(j - staleness)), rel=1e-9)


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    def stop(row: Row) -> bool:
        return isinstance(row, EventRow) and row.row == 12

    whole = train(tmp_path / "whole", measure_gamma=30)
    run = train(tmp_path / "run", measure_gamma=30, on_event=stop)
    assert run.result["stopped_by"] == "callback"
    resumed = gp.resume(tmp_path / "run", progress=False)
    assert resumed.result["gamma"] == whole.result["gamma"]
    assert read_trace(resumed.folder.trace).gammas == read_trace(whole.folder.trace).gammas


def test_real_processes_measure_too(tmp_path: Path) -> None:
    run = train(tmp_path / "run", engine="local", protocol="async", measure_gamma=30,
                delay="exponential:mean=0.001")  # fmt: skip
    trace = read_trace(run.folder.trace)
    assert len(trace.gammas) >= 5
    for row in trace.gammas:
        assert row.staleness == trace.updates[row.version - 1].staleness
        assert row.squared_norm > 0.0
    assert run.result["gamma"] is not None
    assert gp.replay(run.folder.path, progress=False)["matches"]


def test_the_clock_of_real_processes_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 8.0, 9.0])
    monkeypatch.setattr(local_engine.time, "perf_counter", lambda: next(clock))
    engine = object.__new__(local_engine.LocalEngine)
    engine._time_before, engine._started_at = 0.0, 1.0
    assert next(clock) == 0.0
    with engine.standing_still():  # from 5 to 8
        pass
    assert engine.now() == 5.0


def test_a_size_below_zero_is_refused() -> None:
    with pytest.raises(gp.InvalidSetting, match="measure gamma"):
        parts_of(linear_task(), measure_gamma=-1)
