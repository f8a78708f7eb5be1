"""What every gradient counted: per learner, and the rate it was applied at.

Everything comes from update rows, but how many mini-batches a learner was handed: that is in the
end row, and not in traces of before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from gruppetto.report.data import Curve, ReportedRun, number_or_none
from gruppetto.theory.estimates import estimate_gamma, estimate_p0

__all__ = [
    "LearnerShare",
    "effective_rate",
    "fresh_fraction",
    "gamma",
    "learner_shares",
    "rate_varies",
    "unused",
]

#: What of a learner's mini-batches came to nothing.
_UNUSED: Final = ("cancelled", "rejected", "lost", "too_stale")


@dataclass(frozen=True)
class LearnerShare:
    """One learner's part in a run."""

    learner: int
    #: Gradients in updates.
    applied: int
    #: Of all that the run applied, in [0, 1].
    share: float
    mean_staleness: float
    max_staleness: int
    #: Mini-batches handed to it, each time counted; None where nothing tells.
    leases: int | None
    #: Of these, without use: cancelled, failed, not finite, too stale, or in hand when it was lost.
    unused: int | None
    #: Answers that came after their mini-batch was cancelled.
    discarded: int | None

    @property
    def unused_share(self) -> float | None:
        """Of its mini-batches, in [0, 1]."""
        return None if self.unused is None or not self.leases else self.unused / self.leases


def learner_shares(run: ReportedRun) -> list[LearnerShare]:
    """Every learner that was handed a mini-batch or contributed, by number."""
    staleness: dict[int, list[int]] = {}
    for row in run.trace.updates:
        for learner, each in zip(row.learners, row.staleness, strict=True):
            staleness.setdefault(learner, []).append(each)
    told = _told(run)
    total = sum(map(len, staleness.values()))
    shares = []
    for learner in sorted(staleness.keys() | told.keys()):
        of = staleness.get(learner, [])
        known = told.get(learner)
        shares.append(
            LearnerShare(
                learner,
                len(of),
                len(of) / total if total else 0.0,
                sum(of) / len(of) if of else 0.0,
                max(of, default=0),
                None if known is None else _count(known, "leases"),
                None if known is None else sum(_count(known, k) for k in _UNUSED),
                None if known is None else _count(known, "discarded"),
            )
        )
    return shares


def _told(run: ReportedRun) -> dict[int, Mapping[str, object]]:
    """What the end row tells of each learner; empty in traces of before."""
    told = run.result("per_learner")
    if not isinstance(told, list):
        return {}
    return {_count(each, "learner"): each for each in told if isinstance(each, Mapping)}


def _count(account: Mapping[str, object], key: str) -> int:
    return int(number_or_none(account.get(key)) or 0)


def unused(run: ReportedRun) -> float | None:
    """Share of the mini-batches handed out that came to nothing, in [0, 1]; None if unknown."""
    told = _told(run).values()
    leases = sum(_count(each, "leases") for each in told)
    if not leases:
        return None
    return sum(_count(each, key) for each in told for key in _UNUSED) / leases


def fresh_fraction(run: ReportedRun) -> float | None:
    """p̂₀, the share of applied gradients of staleness 0; None without updates."""
    histogram = run.staleness
    if not len(histogram):
        return None
    return estimate_p0(np.repeat(np.arange(len(histogram)), histogram))


def gamma(run: ReportedRun) -> float | None:
    """γ̂ over all measurements of a run; None where there are none."""
    rows = run.trace.gammas
    changes = [change for row in rows for change in row.squared_changes]
    norms = [row.squared_norm for row in rows for _ in row.squared_changes]
    return estimate_gamma(changes, norms) if any(norms) else None


def effective_rate(run: ReportedRun, max_points: int = 60) -> Curve:
    """Mean effective rate of the updates, over runs of equally many; empty in traces of before.

    Each point stands at the last update it covers.
    """
    rows = [row for row in run.trace.updates if row.effective_rate is not None]
    size = max(1, math.ceil(len(rows) / max_points))
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    means = [sum(row.effective_rate or 0.0 for row in part) / len(part) for part in parts]
    return Curve(
        np.array([part[-1].time for part in parts], dtype=np.float64),
        np.array([part[-1].epoch for part in parts], dtype=np.float64),
        np.array([part[-1].version for part in parts], dtype=np.int64),
        np.array(means, dtype=np.float64),
    )


def rate_varies(run: ReportedRun) -> bool:
    """Whether its updates have effective rates that differ by more than rounding does."""
    rates = [row.effective_rate for row in run.trace.updates if row.effective_rate is not None]
    return bool(rates) and max(rates) - min(rates) > 1e-9 * abs(max(rates))
