"""What every gradient counted, for the summary of a run: per learner, and how fresh they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gruppetto.protocols.account import Account
from gruppetto.staleness import StalenessStatistics
from gruppetto.theory.estimates import estimate_gamma, estimate_p0
from gruppetto.trace import GammaRow

__all__ = ["fresh_fraction", "measured_gamma", "per_learner"]


def fresh_fraction(staleness: StalenessStatistics) -> float | None:
    """p̂₀, the share of applied gradients of staleness 0; None where none was applied."""
    if not staleness.count:
        return None
    values, counts = zip(*staleness.histogram.items(), strict=True)
    return estimate_p0(np.repeat(values, counts))


def measured_gamma(rows: Sequence[GammaRow]) -> float | None:
    """γ̂ of all measurements of a run together; None where there are none, or only zeros."""
    changes = [change for row in rows for change in row.squared_changes]
    norms = [row.squared_norm for row in rows for _ in row.squared_changes]
    return estimate_gamma(changes, norms) if any(norms) else None


def per_learner(account: Account) -> list[dict[str, Any]]:
    """One dict per learner that was ever handed a mini-batch, by number."""
    return [
        {
            "learner": each.learner,
            "leases": each.leases,
            "applied": each.applied,
            "samples": each.samples,
            "mean_staleness": each.mean_staleness,
            "max_staleness": each.max_staleness,
            "cancelled": each.cancelled,
            "discarded": each.discarded,
            "rejected": each.rejected,
            "lost": each.lost,
            "too_stale": each.too_stale,
        }
        for _, each in sorted(account.learners.items())
    ]
