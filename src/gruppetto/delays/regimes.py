"""A law that changes while a run goes on: learners take turns at being slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

from gruppetto.delays.law import DELAYS, Aging, Delay, Floats
from gruppetto.errors import InvalidSetting

__all__ = ["Regimes"]

Bools: TypeAlias = npt.NDArray[np.bool_]

#: Enough to come from a factor of a million between two means down to neighbouring floats.
_HALVINGS = 80


@DELAYS.register("regimes")
@dataclass(frozen=True)
class Regimes(Delay):
    """Exponential, and every learner in turn slow for many jobs: a neighbour comes and goes.

    Job n of a slot has mean ``slow`` if ⌊n / jobs⌋ + slot is a multiple of ``of``, and mean
    ``fast`` otherwise. A job is exponential given its regime; over a whole cycle a learner's jobs
    are a mixture of the two, which is what :meth:`quantile`, :meth:`cdf` and the moments describe.
    Successive jobs are not independent, so closed forms for the time per update hold only where
    nobody waits (K E[X]/P, in the long run).

    >>> law = Regimes(fast=1.0, slow=9.0, jobs=50)
    >>> law.expectation()
    3.0
    >>> half = np.array([0.5])
    >>> [round(float(law.draws(half, slot=1, start=n)[0]), 2) for n in (149, 150, 199, 200)]
    [0.69, 6.24, 6.24, 0.69]
    """

    #: Mean of the fast regime, seconds.
    fast: float
    #: Mean of the slow regime, seconds.
    slow: float
    #: Jobs until a learner's regime may change.
    jobs: int
    #: One stretch of so many is slow.
    of: int = 4

    def _check(self) -> None:
        self._positive("fast", "slow")
        for name, least in (("jobs", 1), ("of", 2)):
            if getattr(self, name) < least:
                raise InvalidSetting(
                    f"delay regimes: expected {name} >= {least}, got {name}={getattr(self, name)}"
                )

    @property
    def is_independent(self) -> bool:
        return False

    def draws(self, q: Floats, slot: int, start: int) -> Floats:
        stretch = (start + np.arange(len(q))) // self.jobs
        mean = np.where((stretch + slot) % self.of == 0, self.slow, self.fast)
        return np.asarray(-special.log1p(-q) * mean, dtype=np.float64)

    # --------------------------------------------------- over a whole cycle

    @property
    def _p_slow(self) -> float:
        return 1.0 / self.of

    def sf(self, x: Floats) -> Floats:
        # Before 0 everything is still to come.
        x = np.maximum(np.asarray(x, dtype=np.float64), 0.0)
        late = self._p_slow * np.exp(-x / self.slow)
        return np.asarray(late + (1.0 - self._p_slow) * np.exp(-x / self.fast), dtype=np.float64)

    def cdf(self, x: Floats) -> Floats:
        x = np.maximum(np.asarray(x, dtype=np.float64), 0.0)
        slow = -self._p_slow * np.expm1(-x / self.slow)
        return np.asarray(slow - (1.0 - self._p_slow) * np.expm1(-x / self.fast), dtype=np.float64)

    def upper_quantile(self, q: Floats) -> Floats:
        q = np.asarray(q, dtype=np.float64)
        return self._bisect(-np.log(q), lambda x: np.asarray(self.sf(x) > q))

    def quantile(self, q: Floats) -> Floats:
        q = np.asarray(q, dtype=np.float64)
        return self._bisect(-np.log1p(-q), lambda x: np.asarray(self.cdf(x) < q))

    def _bisect(self, unit: Floats, is_below: Callable[[Floats], Bools]) -> Floats:
        """Between the quantiles of the two exponentials; ``unit`` is that of one of mean 1."""
        low, high = unit * min(self.fast, self.slow), unit * max(self.fast, self.slow)
        for _ in range(_HALVINGS):
            middle = low + (high - low) / 2.0
            below = is_below(middle)
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.asarray(high, dtype=np.float64)

    def expectation(self) -> float:
        return self._p_slow * self.slow + (1.0 - self._p_slow) * self.fast

    def variance(self) -> float:
        second = 2.0 * (self._p_slow * self.slow**2 + (1.0 - self._p_slow) * self.fast**2)
        return second - self.expectation() ** 2

    @property
    def aging(self) -> Aging:
        return Aging.UNKNOWN
