"""The distribution of times some of which were cut off: Kaplan and Meier's, and what it gives."""

from __future__ import annotations

import numpy as np

from gruppetto.delays.law import Delay, Floats

__all__ = ["distance", "kaplan_meier", "product_limit_quantiles", "scores"]


def kaplan_meier(times: Floats, censored: Floats) -> tuple[Floats, Floats]:
    """Distinct whole times, ascending, and the estimate of P(X > time) at each.

    The product-limit estimate of Kaplan and Meier, JASA 53, 1958: a censored job counts among
    those still running up to where it was cut off, and at equal times is cut off later.

    >>> kaplan_meier(np.array([1.0, 3.0]), np.array([2.0]))[1].tolist()
    [0.6666666666666667, 0.0]
    """
    distinct, counts = np.unique(times, return_counts=True)
    cut = np.sort(censored)
    done_before = np.cumsum(counts) - counts
    running = times.size - done_before + cut.size - np.searchsorted(cut, distinct, side="left")
    after: Floats = np.cumprod(1.0 - counts / running).astype(np.float64)
    return distinct, after


def scores(times: Floats, censored: Floats) -> tuple[Floats, Floats]:
    """What takes the place of ranks: S(t) + S(t-) - 1 of a whole time, S(c) - 1 of a censored one.

    Peto and Peto, J. R. Stat. Soc. A 135, 1972. Between -1 (long) and 1 (short), 0 on average;
    without censored times they are ranks, turned round.
    """
    distinct, after = kaplan_meier(times, censored)
    survival = np.concatenate([[1.0], after])
    at = np.searchsorted(distinct, times)
    cut = np.searchsorted(distinct, censored, side="right")
    return survival[at + 1] + survival[at] - 1.0, survival[cut] - 1.0


def distance(law: Delay, times: Floats, censored: Floats) -> float:
    """How far a law is from times: the integral of n (F̂ - F)² dF, F̂ Kaplan and Meier's.

    Without censored times it is Cramér and von Mises' statistic. Beyond the last whole time
    nothing is compared if a longer one was cut off.
    """
    distinct, after = kaplan_meier(times, censored)
    edges = np.concatenate([[0.0], law.cdf(distinct), [1.0]])
    steps = np.concatenate([[0.0], 1.0 - after])
    if censored.size and np.max(censored) > distinct[-1]:
        edges, steps = edges[:-1], steps[:-1]
    cubes = (edges[1:] - steps) ** 3 - (edges[:-1] - steps) ** 3
    return float(np.sum(cubes)) * (times.size + censored.size) / 3.0


def product_limit_quantiles(times: Floats, censored: Floats, q: Floats) -> Floats:
    """Inverse of Kaplan and Meier's estimate, elementwise.

    What lies beyond the longest of all times is put there: too early, but nothing is known of it.
    """
    distinct, after = kaplan_meier(times, censored)
    values = np.append(distinct, max(distinct[-1], np.max(censored, initial=0.0)))
    return np.asarray(values[np.searchsorted(1.0 - after, q, side="left")], dtype=np.float64)
