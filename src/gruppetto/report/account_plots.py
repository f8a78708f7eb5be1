"""What gradients counted, as a figure and as a table of learners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.figure import Figure

from gruppetto.report.accounts import (
    LearnerShare,
    effective_rate,
    learner_shares,
    rate_varies,
    unused,
)
from gruppetto.report.data import ReportedRun
from gruppetto.report.plots import line_chart
from gruppetto.report.table import format_number

__all__ = ["effective_rates", "effective_rates_words", "learners_rows", "learners_words"]

#: Learners that are listed; of more, those with the most and the fewest gradients.
_MOST_LISTED: Final = 16


def effective_rates(runs: Sequence[ReportedRun]) -> Figure | None:
    """Effective learning rate over updates; None where it is the same all along in each run."""
    if not any(rate_varies(run) for run in runs):
        return None
    return line_chart(runs, effective_rate, "updates", "effective learning rate")


def effective_rates_words(runs: Sequence[ReportedRun]) -> str:
    """What :func:`effective_rates` shows, for readers who cannot see it."""
    parts = []
    for run in runs:
        rates = effective_rate(run).values
        if len(rates):
            low, high = format_number(float(rates.min())), format_number(float(rates.max()))
            parts.append(f"{run.name}: from {low} to {high}, {format_number(float(rates[-1]))} at "
                         "the end")  # fmt: skip
    return f"Line chart of effective learning rate against updates. {'; '.join(parts)}."


def learners_words(run: ReportedRun) -> str:
    """A run's learners in a sentence: who contributes how much, and what came to nothing."""
    shares = learner_shares(run)
    if not shares:
        return "No learner was handed a mini-batch."
    parts = [100.0 * each.share for each in shares]
    text = f"{len(shares)} learner{'s' * (len(shares) > 1)}"
    if len(shares) > 1:
        text += f", {min(parts):.3g} to {max(parts):.3g} % of the gradients each"
    if (share := unused(run)) is not None:
        text += f"; {100.0 * share:.3g} % of the mini-batches handed out came to nothing"
    return f"{text}."


def learners_rows(run: ReportedRun) -> list[dict[str, str]]:
    """A row of text per learner, and between the most and the fewest gradients where many."""
    shares = learner_shares(run)
    if len(shares) <= _MOST_LISTED:
        return [_texts(each) for each in shares]
    order: Sequence[LearnerShare] = sorted(shares, key=lambda each: (-each.applied, each.learner))
    half = _MOST_LISTED // 2
    left_out = dict.fromkeys(_texts(order[0]), "")
    left_out["learner"] = f"{len(order) - 2 * half} more"
    return [*map(_texts, order[:half]), left_out, *map(_texts, order[-half:])]


def _texts(each: LearnerShare) -> dict[str, str]:
    share = each.unused_share
    return {
        "learner": str(each.learner),
        "gradients": format_number(each.applied),
        "share (%)": f"{100.0 * each.share:.1f}",
        "mean staleness": f"{each.mean_staleness:.2f}" if each.applied else "-",
        "max staleness": format_number(each.max_staleness) if each.applied else "-",
        "handed out": "-" if each.leases is None else format_number(each.leases),
        "to nothing (%)": "-" if share is None else f"{100.0 * share:.1f}",
        "too late": "-" if each.discarded is None else format_number(each.discarded),
    }
