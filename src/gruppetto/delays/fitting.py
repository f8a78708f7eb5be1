"""Measured times -> the law they follow, as far as they do; where they do not, in words.

Families are ranked by BIC = parameters * log(whole times) - 2 log likelihood rather than by AIC:
an exponential is also a gamma and a Weibull law, and AIC takes the larger family in one case of six
however much was measured; BIC settles on the smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gruppetto.delays.diagnostics import departures
from gruppetto.delays.empirical import Empirical
from gruppetto.delays.families import FAMILIES, estimate_discrete, log_likelihood
from gruppetto.delays.law import DELAYS, Delay, Floats, ScipyDelay
from gruppetto.delays.survival import distance, kaplan_meier, product_limit_quantiles
from gruppetto.errors import InvalidSetting

__all__ = ["Candidate", "Fit", "fit"]

#: Below, a family does not fit.
_MIN_P: Final = 0.01
#: Fewer times are too few.
_ENOUGH: Final = 30
#: Times on which the fit is tested; more find what does not matter.
_MAX_TESTED: Final = 1000
#: Fewer are not tested.
_ENOUGH_TO_TEST: Final = 8
#: Mini-batches of which so many are never seen to end leave the tail to guesses.
_MAX_UNSEEN: Final = 0.05
#: Worlds simulated for the test at most; and worlds as bad as this one after which to stop.
_MAX_WORLDS: Final = 199
_WORSE_WORLDS: Final = 10


@dataclass(frozen=True)
class Candidate:
    """The likeliest law of one family."""

    law: Delay
    #: Of densities per second; -inf never.
    log_likelihood: float
    aic: float
    #: With the number of whole times, as Volinsky and Raftery, Biometrics 56, 2000.
    bic: float


@dataclass(frozen=True)
class Fit:
    """What a fit found."""

    #: The best law, or the measured times themselves where no family fits.
    law: Delay
    #: Families by BIC, best first; empty where all times are one value or two.
    ranking: tuple[Candidate, ...]
    #: What speaks against the law, and against any one law for all, each in a sentence.
    warnings: tuple[str, ...]
    #: Whole times.
    num_samples: int
    #: Cut off.
    num_censored: int
    #: How often times drawn from the best family lie farther from it than the measured ones do;
    #: below 0.01 it does not fit. None where there was nothing to test.
    gof_p: float | None
    #: Some learners are persistently slower than others: one law for all is not enough.
    learners_differ: bool
    #: Seconds of whole times, and after which others were cut off, of all learners.
    times: Floats = field(repr=False, compare=False)
    censored: Floats = field(repr=False, compare=False)

    def resample(self, rng: np.random.Generator) -> Delay:
        """The law of the same kind that other times might have given: a bootstrap.

        Draws as many times as were measured, with replacement and cut-off ones among them, and
        fits the family again. The spread of what follows from such laws is how uncertain it is, as
        far as times are independent.
        """
        n = self.times.size
        drawn = rng.integers(n + self.censored.size, size=n + self.censored.size)
        times, censored = self.times[drawn[drawn < n]], self.censored[drawn[drawn >= n] - n]
        if times.size < 2:
            return self.law
        if isinstance(self.law, Empirical):
            return _empirical(times, censored)
        if not isinstance(self.law, ScipyDelay):
            return estimate_discrete(times, censored) or self.law
        return FAMILIES[type(self.law)].estimate(times, censored) or self.law


def fit(
    samples: Mapping[int, Floats] | Floats,
    censored: Mapping[int, Floats] | Floats | None = None,
    *,
    seed: int = 0,
) -> Fit:
    """Find the law that measured times follow.

    Args:
        samples: learner -> seconds its mini-batches took, in order; or those of one learner.
        censored: the same of mini-batches that were cancelled, and had taken so long by then.
        seed: of the worlds simulated for the test.

    Raises:
        InvalidSetting: fewer than two whole times, or values that are no times.

    >>> found = fit(np.random.default_rng(1).exponential(2.0, size=500))
    >>> DELAYS.name_of(found.law), round(found.law.expectation()), found.warnings
    ('exponential', 2, ())
    """
    by_learner, cut_by_learner = _read(samples), _read({} if censored is None else censored)
    times, cuts = _pool(by_learner), _pool(cut_by_learner)
    num_censored = cuts.size
    cuts = cuts[cuts > 0.0]  # the others tell nothing
    if times.size < 2:
        raise InvalidSetting(
            f"delay fit: expected at least 2 mini-batches that were not cancelled, got {times.size}"
        )
    against = departures(by_learner, cut_by_learner)
    warnings = [*_too_little(times, cuts), *against.sentences]
    law: Delay | None = estimate_discrete(times, cuts)
    ranking: list[Candidate] = []
    p: float | None = None
    if law is None:
        ranking = _rank(times, cuts)
        best = ranking[0].law if ranking else None
        if best is not None:
            p = _goodness(best, times, cuts, np.random.default_rng(seed))
        if best is None:
            warnings.append("no family fits; the measured times themselves are used instead")
        elif p is not None and p < _MIN_P:
            warnings.append(
                f"no family fits: the best one, {DELAYS.format(best)}, would give times as far "
                f"from it with p = {p:.2g}; the measured times themselves are used instead"
            )
            best = None
        law = _empirical(times, cuts) if best is None else best
    differ = against.differ is not None
    return Fit(
        law, tuple(ranking), tuple(warnings), times.size, num_censored, p, differ, times, cuts
    )


def _read(given: Mapping[int, Floats] | Floats) -> dict[int, Floats]:
    every = given if isinstance(given, Mapping) else {0: given}
    found: dict[int, Floats] = {}
    for learner, values in every.items():
        array = np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "fiu"):
            raise InvalidSetting(
                f"delay fit: expected a list of seconds for learner {learner}, got something else"
            )
        array = array.astype(np.float64)
        wrong = array[~(np.isfinite(array) & (array >= 0.0))]
        if wrong.size:
            raise InvalidSetting(
                f"delay fit: expected seconds >= 0 and finite for learner {learner}, got {wrong[0]}"
            )
        found[learner] = array
    return found


def _pool(by_learner: Mapping[int, Floats]) -> Floats:
    return np.concatenate([np.empty(0), *by_learner.values()])


def _too_little(times: Floats, censored: Floats) -> Iterable[str]:
    if times.size < _ENOUGH:
        yield (
            f"{times.size} mini-batches are few: families cannot be told apart by fewer than "
            f"{_ENOUGH}"
        )
    if not censored.size:
        return
    distinct, after = kaplan_meier(times, censored)
    if after[-1] > _MAX_UNSEEN:
        yield (
            f"the slowest {after[-1]:.0%} of mini-batches were always cancelled: how long they "
            f"take beyond {distinct[-1]:.3g} s is a guess"
        )


def _rank(times: Floats, censored: Floats) -> list[Candidate]:
    found: list[Candidate] = []
    for family in FAMILIES.values():
        law = family.estimate(times, censored)
        if law is None:
            continue
        likelihood = log_likelihood(law, times, censored)
        if math.isfinite(likelihood):
            count = family.num_parameters
            aic, bic = 2.0 * count, count * math.log(times.size)
            found.append(Candidate(law, likelihood, aic - 2.0 * likelihood, bic - 2.0 * likelihood))
    return sorted(found, key=lambda candidate: candidate.bic)


def _goodness(
    law: Delay, times: Floats, censored: Floats, rng: np.random.Generator
) -> float | None:
    """p-value of the distance between times and the best law of its family.

    By parametric bootstrap, because the law was made from the times: worlds in which the family is
    right, of as many times, each fitted like the measured ones. It stops early where many worlds
    are as bad (Besag and Clifford, Biometrika 78, 1991). Where times were cut off, so are those
    of the worlds, at times drawn from Kaplan and Meier's estimate for cutting off.
    """
    assert isinstance(law, ScipyDelay)
    estimate = FAMILIES[type(law)].estimate
    total = times.size + censored.size
    if total > _MAX_TESTED:
        picked = rng.permutation(total)[:_MAX_TESTED]
        times, censored = times[picked[picked < times.size]], _rest(censored, picked - times.size)
        total = _MAX_TESTED
    if times.size < _ENOUGH_TO_TEST:
        return None
    fitted = estimate(times, censored)
    if fitted is None:
        return None
    observed = distance(fitted, times, censored)
    num_worse = 0
    for world in range(1, _MAX_WORLDS + 1):
        drawn = fitted.quantile(np.maximum(rng.random(total), 2.0**-54))
        cut = np.empty(0)
        if censored.size:
            limits = _limits(censored, times, rng.random(total))
            drawn, cut = drawn[drawn <= limits], limits[drawn > limits]
        refitted = estimate(drawn, cut) if drawn.size > 1 else None
        if refitted is not None and distance(refitted, drawn, cut) >= observed:
            num_worse += 1
            if num_worse == _WORSE_WORLDS:
                return num_worse / world
    return (num_worse + 1) / (_MAX_WORLDS + 1)


def _rest(censored: Floats, picked: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    return censored[picked[picked >= 0]]


def _limits(censored: Floats, times: Floats, q: Floats) -> Floats:
    """Times of cutting off, of which those after the end of a job were not seen; or never."""
    distinct, after = kaplan_meier(censored, times)
    return np.append(distinct, math.inf)[np.searchsorted(1.0 - after, q, side="left")]


def _empirical(times: Floats, censored: Floats) -> Empirical:
    if not censored.size:
        return Empirical.of(times)
    total = times.size + censored.size
    middles = (np.arange(total) + 0.5) / total
    return Empirical.of(product_limit_quantiles(times, censored, middles))
