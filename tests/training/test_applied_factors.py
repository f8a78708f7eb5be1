"""The factors that updates were really taken with, as the trace records them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_tools import make_task, train

import gruppetto as gp
from gruppetto.trace import UpdateRow


def updates(folder: Path, protocol: str, modulation: str | None, learners: int) -> list[UpdateRow]:
    rows: list[UpdateRow] = []
    train(
        make_task(), folder / "run", rows, protocol=protocol, modulation=modulation,
        learners=learners, batch_size=4, epochs=6, delay="exponential:mean=1",
        optimizer=gp.optimizer(torch.optim.SGD, lr=0.5), seed=2,
    )  # fmt: skip
    assert len(rows) > 10
    return rows


def check(rows: list[UpdateRow], factor_of: dict[int, float] | None, constant: float) -> None:
    """``factor_of`` overrides the constant by staleness."""
    for row in rows:
        expected = [min(constant, (factor_of or {}).get(s, constant)) for s in row.staleness]
        assert row.factors == pytest.approx(expected, rel=1e-12)
        by_samples = sum(n * s for n, s in zip(row.num_samples, expected, strict=True))
        assert row.learning_rate == pytest.approx(
            0.5 * by_samples / sum(row.num_samples), rel=1e-12
        )


#: 1/σ written out; far more late than any of these runs gets.
INVERSE = {0: 1.0, 1: 1.0, **{s: 1.0 / s for s in range(2, 500)}}
LATE = {s: 1.0 / s for s in range(2, 500)}


@pytest.mark.parametrize("protocol", ["async", "k-batch-async:k=3", "k-async:k=2"])
def test_none(tmp_path: Path, protocol: str) -> None:
    rows = updates(tmp_path, protocol, "none", 5)
    assert max(s for r in rows for s in r.staleness) > 1
    check(rows, None, 1.0)


@pytest.mark.parametrize("protocol", ["async", "k-batch-async:k=3", "k-async:k=2"])
def test_inverse(tmp_path: Path, protocol: str) -> None:
    rows = updates(tmp_path, protocol, "inverse", 5)
    assert {0, 2, 3} <= {s for r in rows for s in r.staleness}
    check(rows, INVERSE, 1.0)


CELLS = [
    ("async", 5, 4.0),  # (P - 1)/1
    ("k-batch-async:k=3", 5, 4 / 3),  # (P - 1)/K
    ("softsync:n=2", 5, 2.0),  # K = 5 // 2
    ("k-async:k=2", 5, 3 / 2),  # (P - K)/K
    ("k-async:k=5", 5, 0.0),
    ("k-sync:k=3", 5, 0.0),
    ("hardsync", 5, 0.0),
    ("k-batch-sync:k=7", 5, 0.0),
]


@pytest.mark.parametrize(("protocol", "learners", "mean"), CELLS)
def test_inverse_mean_is_the_closed_form(
    tmp_path: Path, protocol: str, learners: int, mean: float
) -> None:
    check(updates(tmp_path, protocol, "inverse-mean", learners), None, 1 / (1 + mean))


@pytest.mark.parametrize(("protocol", "learners", "mean"), CELLS)
def test_inverse_mean_capped(tmp_path: Path, protocol: str, learners: int, mean: float) -> None:
    rows = updates(tmp_path, protocol, "inverse-mean:cap=true", learners)
    check(rows, LATE, 1 / (1 + mean))
    if mean >= 4 / 3:
        capped = [f for r in rows for f in r.factors if f < 1 / (1 + mean) - 1e-9]
        assert capped, "nothing was late enough to be capped"


@pytest.mark.parametrize(("protocol", "mean"), [("async", 3.0), ("hardsync", 0.0)])
def test_the_default_is_safe_for_asynchronous_protocols_only(
    tmp_path: Path, protocol: str, mean: float
) -> None:
    rows = updates(tmp_path, protocol, None, 4)
    check(rows, LATE if mean else None, 1 / (1 + mean))


@pytest.mark.parametrize("modulation", ["inverse", "inverse-mean", "inverse-mean:cap=true"])
def test_one_learner_is_never_late(tmp_path: Path, modulation: str) -> None:
    """(P - 1)/K = 0: the full rate of sequential SGD whatever the modulation."""
    rows = updates(tmp_path, "async", modulation, 1)
    assert {s for r in rows for s in r.staleness} == {0}
    check(rows, None, 1.0)


def test_the_literal_form_keeps_the_rate_and_records_the_factors(tmp_path: Path) -> None:
    rows = updates(tmp_path, "async", "inverse:apply_to=gradient", 5)
    assert any(f < 1 for r in rows for f in r.factors)
    assert {r.learning_rate for r in rows} == {0.5}
    for row in rows:
        assert row.factors == pytest.approx([INVERSE[s] for s in row.staleness])
