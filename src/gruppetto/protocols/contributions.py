"""Who contributed nothing to a run, and why, in words.

Where work is cancelled, restarted or discarded, a learner that is always too slow computes for
nothing, and no number of the whole run shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gruppetto.protocols.account import Account, LearnerAccount

__all__ = ["describe", "without_contribution"]

_STALE: Final = "a larger bound, or on_stale=wait, would let it contribute"
_CANCELLED: Final = "an asynchronous protocol would use such work"


def without_contribution(account: Account, live: Iterable[int]) -> list[int]:
    """Of the live learners those that were given mini-batches, and of whom nothing was applied."""
    known = account.learners
    return [n for n in sorted(live) if n in known and not known[n].applied]


def describe(account: Account, live: Iterable[int], restarts: bool) -> str | None:
    """Each of them, what became of its mini-batches, and what would help.

    Args:
        account: of the run.
        live: learners that are here at its end.
        restarts: what was cancelled was so by a bound, as too stale.

    Returns:
        A sentence without its full stop; None where everybody contributed.
    """
    parts, advice = [], []
    for learner in without_contribution(account, live):
        each = account.learners[learner]
        parts.append(f"learner {learner} contributed nothing: {_story(each, restarts)}")
        if each.too_stale or (restarts and _by_updates(each)):
            advice.append(_STALE)
        elif _by_updates(each):
            advice.append(_CANCELLED)
    return "; ".join([*parts, *dict.fromkeys(advice)]) or None


def _by_updates(each: LearnerAccount) -> int:
    return each.cancelled - each.stopped


def _story(each: LearnerAccount, restarts: bool) -> str:
    ends = [
        (each.too_stale, "was discarded as too stale", "were discarded as too stale"),
        (each.rejected, "failed", "failed"),
        (each.left + each.stopped, "was unfinished at the end", "were unfinished at the end"),
    ]
    if restarts:
        cancelled = "was restarted as too stale", "were restarted as too stale"
    else:
        cancelled = (
            "was cancelled by an update that did not wait for it",
            "were cancelled by updates that did not wait for them",
        )
    ends.insert(0, (_by_updates(each), *cancelled))
    ends = [end for end in ends if end[0]]
    if len(ends) == 1:
        _, one, several = ends[0]
        if each.leases == 1:
            return f"its only mini-batch {one}"
        return f"all of its {each.leases} mini-batches {several}"
    counted = [f"{count} {one if count == 1 else several}" for count, one, several in ends]
    return f"of its {each.leases} mini-batches {', '.join(counted[:-1])} and {counted[-1]}"
