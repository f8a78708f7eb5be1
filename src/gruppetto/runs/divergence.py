"""What is known at the moment a run diverges, and what to try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gruppetto.protocols.coordinator import DIVERGED
from gruppetto.runs.parts import Parts
from gruppetto.runs.settings import Settings
from gruppetto.trace import EvaluationRow

__all__ = ["describe", "divergence_of", "last_metrics", "listed"]

#: Above this mean staleness, late gradients are the first suspect.
_STALE = 1.0


def divergence_of(parts: Parts) -> dict[str, Any] | None:
    """The state of a run at the moment it diverged, for its summary; None if it did not.

    ``cause`` is ``loss``, or ``not-finite`` where the gradients of several mini-batches in a row
    were; ``loss``, the ``gradients`` it is the mean of and their staleness are of the most recent
    ones that were finite; rates are of the first parameter group, at the last update; ``try`` has
    what may help, the likeliest first.
    """
    coordinator = parts.coordinator
    if coordinator.finished != DIVERGED:
        return None
    losses, applied = coordinator.losses, parts.server.last_update
    return {
        "cause": "loss" if losses.is_out_of_range else "not-finite",
        "loss": losses.loss,
        "start_loss": losses.start,
        "gradients": len(losses.recent),
        "mean_staleness": losses.mean_staleness,
        "max_staleness": losses.max_staleness,
        "learning_rate": applied.base_rate if coordinator.version else None,
        "effective_rate": applied.effective_rate if coordinator.version else None,
        "try": _advice(parts.settings, losses.mean_staleness, parts.server.momentum),
    }


def describe(known: dict[str, Any], updates: int) -> str:
    """The same in one sentence, without what the run is called."""
    seen = known["gradients"]
    if known["cause"] == "loss":
        what = f"the loss is {known['loss']:.4g} (mean of the last {seen} gradients)"
    else:
        what = "the gradients of several mini-batches in a row were not finite"
        if seen:
            what += f"; the loss was {known['loss']:.4g} before (mean of {seen} gradients)"
    if known["start_loss"] is not None:
        what += f" against {known['start_loss']:.4g} at the start"
    what = f"diverged after {updates} updates: {what}"
    if seen:
        mean, most = known["mean_staleness"], known["max_staleness"]
        what += f"; the staleness of these was {mean:.3g} on average and {most} at most"
    if known["learning_rate"] is not None:
        what += f"; the learning rate was {known['learning_rate']:.4g}"
        if known["effective_rate"] != known["learning_rate"]:
            what += f", times modulation {known['effective_rate']:.4g}"
    return f"{what}; try {listed(known['try'])}"


def _advice(settings: Settings, mean_staleness: float, momentum: float) -> list[str]:
    advice = []
    is_stale = mean_staleness > _STALE
    if is_stale and settings.modulation == "none":
        advice.append("--modulation inverse-mean:cap=true")
    advice.append("a lower learning rate")
    # See gruppetto.theory.largest_stable_rate: momentum pays with fresh gradients only.
    if is_stale and momentum > 0.0:
        advice.append("less momentum")
    if settings.clip is None:
        advice.append("--clip norm:max=1")
    if is_stale:
        advice.append(f"a bound like --max-staleness {max(1, int(mean_staleness // 2))}")
    return advice


def listed(options: Sequence[str]) -> str:
    """Options in words: a, b or c."""
    return ", ".join(options[:-1]) + (" or " if len(options) > 1 else "") + options[-1]


def last_metrics(
    evaluations: Sequence[EvaluationRow], *, finite: bool = False
) -> dict[str, float | None]:
    """The metrics of the last evaluation; empty where there is none.

    Args:
        evaluations: of a run, in order.
        finite: of the last one with finite values only, if there is any.
    """
    rows = list(evaluations)
    if finite:
        sane = [row for row in rows if all(value is not None for value in row.metrics.values())]
        rows = sane or rows
    return rows[-1].metrics if rows else {}
