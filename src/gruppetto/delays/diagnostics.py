"""Where times are not what laws of delays assume: independent and alike for all learners, always.

Each finding takes a test that is significant at 0.001 and an effect that matters, because in long
traces a difference of no consequence is significant, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import special, stats

from gruppetto.delays.law import Floats
from gruppetto.delays.survival import scores

__all__ = ["Departures", "departures"]

#: A false alarm in a thousand, of each test.
_ALPHA: Final = 1e-3
#: Learners whose times differ by less, or drift by less, are alike.
_MIN_CHANGE: Final = 0.05
#: Correlations below are as good as none.
_MIN_CORRELATION: Final = 0.1
#: A learner with fewer times is left out where their order counts.
_MIN_SERIES: Final = 10
_MAX_LAG: Final = 5


@dataclass(frozen=True)
class Departures:
    """What speaks against one law for all, each in a sentence; None where nothing does."""

    #: Some learners are slower than others.
    differ: str | None
    #: Times grow or shrink.
    drift: str | None
    #: A time tells of the next, or of those of other learners.
    dependence: str | None

    @property
    def sentences(self) -> tuple[str, ...]:
        """Those that there are."""
        found = (self.differ, self.drift, self.dependence)
        return tuple(sentence for sentence in found if sentence is not None)


def departures(times: Mapping[int, Floats], censored: Mapping[int, Floats]) -> Departures:
    """What speaks against one law for all.

    Args:
        times: learner -> seconds its mini-batches took, in order.
        censored: learner -> seconds after which others were cut off.
    """
    series = {n: ranks for n, x in times.items() if (ranks := _ranks(x)) is not None}
    dependence, repetition = _depend(series)
    has_cuts = any(c.size for c in censored.values())
    return Departures(
        _differ(times, censored, repetition),
        _drift(times, series, repetition, has_cuts),
        dependence,
    )


def _differ(
    times: Mapping[int, Floats], censored: Mapping[int, Floats], repetition: float
) -> str | None:
    """Kruskal and Wallis' test, with scores in place of ranks where times were cut off."""
    learners = [
        n for n in sorted({*times, *censored}) if _of(times, n).size + _of(censored, n).size
    ]
    if len(learners) < 2:
        return None
    pooled = [np.concatenate([_of(every, n) for n in learners]) for every in (times, censored)]
    if not pooled[0].size:
        return None
    score = np.concatenate(scores(*pooled))
    owner = np.concatenate(
        [np.repeat(learners, [_of(every, n).size for n in learners]) for every in (times, censored)]
    )
    score = score - np.mean(score)
    variance = float(score @ score) / (score.size - 1) if score.size > 1 else 0.0
    if variance <= 0.0:
        return None
    sums = {n: float(np.sum(score[owner == n])) for n in learners}
    counts = {n: int(np.sum(owner == n)) for n in learners}
    statistic = sum(sums[n] ** 2 / counts[n] for n in learners) / variance
    p = float(stats.chi2.sf(statistic / repetition, len(learners) - 1))
    slowest = min(learners, key=lambda n: sums[n] / counts[n])
    fastest = max(learners, key=lambda n: sums[n] / counts[n])
    has_cuts = pooled[1].size > 0
    typical = [_typical(_of(times, n), _of(censored, n), has_cuts) for n in (fastest, slowest)]
    if p >= _ALPHA or not typical[1] >= (1.0 + _MIN_CHANGE) * typical[0]:
        return None
    often = "on average" if has_cuts else "in the median"
    return (
        f"learners differ persistently: learner {slowest} takes {typical[1]:.3g} s {often} and "
        f"learner {fastest} {typical[0]:.3g} s (Kruskal-Wallis {_p(p)}); one law for all of them "
        "describes none of them"
    )


def _drift(
    times: Mapping[int, Floats], series: Mapping[int, Floats], repetition: float, has_cuts: bool
) -> str | None:
    """Spearman's correlation of times with their order, over all learners."""
    if not series:
        return None
    sizes = np.array([ranks.size - 1.0 for ranks in series.values()])
    each = np.array([_with_order(ranks) for ranks in series.values()]) / math.sqrt(repetition)
    if has_cuts:
        # Cutting off at one time for all makes whole times of different learners alike: Liu and
        # Xie's combination of their p-values, JASA 115, 2020, holds all the same.
        p_each = 2.0 * stats.norm.sf(np.abs(each) * np.sqrt(sizes))
        p = float(stats.cauchy.sf(np.mean(1.0 / np.tan(np.pi * np.maximum(p_each, 1e-300)))))
    else:
        pooled = float(sizes @ each) / math.sqrt(float(np.sum(sizes)))
        p = float(2.0 * stats.norm.sf(abs(pooled)))
    thirds = [np.array_split(times[n], 3) for n in series]
    first, last = (float(np.median(np.concatenate([t[i] for t in thirds]))) for i in (0, 2))
    if p >= _ALPHA or max(first, last) < (1.0 + _MIN_CHANGE) * min(first, last):
        return None
    return (
        f"times drift: the median is {first:.3g} s in the first third and {last:.3g} s in the last "
        f"(Spearman {_p(p)}); one law describes the run's middle, not its end"
    )


def _depend(series: Mapping[int, Floats]) -> tuple[str | None, float]:
    """Ljung and Box's test on ranks without their drift, pooled over learners.

    Returns:
        A sentence, or None; and of how many dependent times one independent one is worth, at
        least 1: without it the other tests would take rows of slow ones for a difference.
    """
    lags = np.arange(1, _MAX_LAG + 1)
    products, total, bias = np.zeros(_MAX_LAG), 0.0, np.zeros(_MAX_LAG)
    size = 0
    for ranks in series.values():
        order = _order(ranks.size)
        rest = ranks - order * float(ranks @ order)
        square = float(rest @ rest)
        if square <= 1e-9 * float(ranks @ ranks):
            continue
        # Each learner by its own scale; so many degrees of freedom are left of it.
        rest *= math.sqrt((ranks.size - 2) / square)
        products += [float(rest[:-k] @ rest[k:]) for k in lags]
        # Taking out mean and drift makes neighbours a little unlike.
        bias -= [(ranks.size - k) / ranks.size + float(order[:-k] @ order[k:]) for k in lags]
        total += ranks.size - 2
        size += ranks.size
    if not size:
        return None, 1.0
    correlations = (products - bias) / total
    statistic = float(np.sum(correlations**2)) * size
    p = float(special.gammaincc(_MAX_LAG / 2.0, statistic / 2.0))
    if p >= _ALPHA or np.max(np.abs(correlations)) < _MIN_CORRELATION:
        return None, 1.0
    lag = int(np.argmax(np.abs(correlations))) + 1
    strength = float(correlations[lag - 1])
    if strength > 0.0:
        consequence = "slow ones come in a row, where independent draws spread them out"
    else:
        consequence = "slow and fast ones alternate, which independent draws do not"
    # By the lags seen, or as an autoregression of order 1 would go on.
    first = min(float(correlations[0]), 0.99)
    repetition = max(1.0, 1.0 + 2.0 * float(np.sum(correlations)), (1.0 + first) / (1.0 - first))
    return (
        f"a learner's times depend on the ones before: correlation {strength:.2f} with "
        f"{'the last' if lag == 1 else f'the one {lag} before'} (Ljung-Box {_p(p)}); {consequence}",
        repetition,
    )


def _of(every: Mapping[int, Floats], learner: int) -> Floats:
    found = every.get(learner)
    return np.empty(0) if found is None else found


def _typical(times: Floats, censored: Floats, has_cuts: bool) -> float:
    """Seconds: the median or, where times were cut off, all time spent per time that was not."""
    if not has_cuts:
        return float(np.median(times))
    if not times.size:
        return math.inf
    return float(np.sum(times) + np.sum(censored)) / times.size


def _ranks(times: Floats) -> Floats | None:
    """Ranks around 0; None for a series that is too short, or of one value."""
    if times.size < _MIN_SERIES:
        return None
    ranks = np.asarray(stats.rankdata(times) - (times.size + 1) / 2.0, dtype=np.float64)
    return ranks if np.any(ranks) else None


def _order(size: int) -> Floats:
    """Positions around 0, of norm 1."""
    positions = np.arange(size) - (size - 1) / 2.0
    return np.asarray(positions / np.linalg.norm(positions), dtype=np.float64)


def _with_order(ranks: Floats) -> float:
    return float(ranks @ _order(ranks.size) / np.linalg.norm(ranks))


def _p(p: float) -> str:
    return "p < 1e-99" if p < 1e-99 else f"p = {p:.1g}"
