"""How long one mini-batch takes: the laws with parameters; see :mod:`gruppetto.delays.law`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special, stats

from gruppetto.delays.law import DELAYS, Aging, Delay, Floats, ScipyDelay
from gruppetto.errors import InvalidSetting

__all__ = [
    "Bimodal",
    "Constant",
    "Exponential",
    "Gamma",
    "Lognormal",
    "Pareto",
    "ShiftedExponential",
    "Uniform",
    "Weibull",
]


def _aging_by_shape(shape: float) -> Aging:
    """Of the families whose hazard rate rises, is constant or falls as the shape says."""
    if shape == 1.0:
        return Aging.MEMORYLESS
    return Aging.NEW_LONGER_THAN_USED if shape > 1.0 else Aging.NEW_SHORTER_THAN_USED


@DELAYS.register("constant")
@dataclass(frozen=True)
class Constant(Delay):
    """Always the same.

    >>> Constant(value=2.0).expectation()
    2.0
    """

    #: Seconds.
    value: float

    def quantile(self, q: Floats) -> Floats:
        return np.full(np.shape(q), self.value)

    def upper_quantile(self, q: Floats) -> Floats:
        return np.full(np.shape(q), self.value)

    def cdf(self, x: Floats) -> Floats:
        return np.where(np.asarray(x) >= self.value, 1.0, 0.0)

    def sf(self, x: Floats) -> Floats:
        return np.where(np.asarray(x) >= self.value, 0.0, 1.0)

    def expectation(self) -> float:
        return self.value

    def variance(self) -> float:
        return 0.0

    @property
    def aging(self) -> Aging:
        return Aging.NEW_LONGER_THAN_USED


@DELAYS.register("exponential")
@dataclass(frozen=True)
class Exponential(ScipyDelay):
    """Memoryless; the mean of the longest of P is mean * H_P.

    >>> float(Exponential(mean=1.0).quantile(np.array([0.5]))[0])
    0.6931471805599453
    """

    #: Seconds.
    mean: float

    def _check(self) -> None:
        self._positive("mean")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.expon, {"scale": self.mean}

    def quantile(self, q: Floats) -> Floats:
        # What scipy computes, to the bit, without its checks of every value: twice as fast.
        return np.asarray(-special.log1p(-q) * self.mean, dtype=np.float64)

    def upper_quantile(self, q: Floats) -> Floats:
        return -self.mean * np.log(q)

    @property
    def aging(self) -> Aging:
        return Aging.MEMORYLESS


@DELAYS.register("shifted-exponential")
@dataclass(frozen=True)
class ShiftedExponential(ScipyDelay):
    """A fixed part and an exponential part: E[X] = shift + mean.

    >>> ShiftedExponential(shift=1.0, mean=0.5).variance()
    0.25
    """

    #: Seconds that every mini-batch takes at least.
    shift: float
    #: Mean of the exponential part, seconds.
    mean: float

    def _check(self) -> None:
        self._positive("mean")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.expon, {"loc": self.shift, "scale": self.mean}

    def quantile(self, q: Floats) -> Floats:
        return np.asarray(-special.log1p(-q) * self.mean + self.shift, dtype=np.float64)

    def upper_quantile(self, q: Floats) -> Floats:
        return self.shift - self.mean * np.log(q)

    @property
    def aging(self) -> Aging:
        return Aging.MEMORYLESS if self.shift == 0.0 else Aging.NEW_LONGER_THAN_USED


@DELAYS.register("pareto")
@dataclass(frozen=True)
class Pareto(ScipyDelay):
    """Heavy tail: P(X > x) = (scale / x) ** shape for x >= scale; infinite mean for shape <= 1.

    Below scale a used job has less left than a new one, far above it more: it ages in neither way.

    >>> Pareto(shape=2.0, scale=1.0).expectation(), Pareto(shape=2.0, scale=1.0).variance()
    (2.0, inf)
    """

    #: Tail index; smaller is heavier.
    shape: float
    #: Shortest time, seconds.
    scale: float

    def _check(self) -> None:
        self._positive("shape", "scale")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.pareto, {"b": self.shape, "scale": self.scale}

    def upper_quantile(self, q: Floats) -> Floats:
        return self.scale * np.power(q, -1.0 / self.shape)

    @property
    def aging(self) -> Aging:
        return Aging.NEITHER


@DELAYS.register("uniform")
@dataclass(frozen=True)
class Uniform(ScipyDelay):
    """Anything between low and high, equally likely."""

    #: Seconds.
    low: float
    #: Seconds.
    high: float

    def _check(self) -> None:
        if self.high <= self.low:
            raise InvalidSetting(
                f"delay uniform: expected low < high, got low={self.low} and high={self.high}"
            )

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.uniform, {"loc": self.low, "scale": self.high - self.low}

    def upper_quantile(self, q: Floats) -> Floats:
        return self.high - (self.high - self.low) * np.asarray(q)

    @property
    def aging(self) -> Aging:
        return Aging.NEW_LONGER_THAN_USED


@DELAYS.register("lognormal")
@dataclass(frozen=True)
class Lognormal(ScipyDelay):
    """exp of a normal variable with mean log(median) and standard deviation sigma.

    Its hazard rate rises from 0 and falls back to 0, so it ages in neither way, whatever sigma.
    """

    #: Seconds.
    median: float
    #: Standard deviation of log X.
    sigma: float

    def _check(self) -> None:
        self._positive("median", "sigma")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.lognorm, {"s": self.sigma, "scale": self.median}

    def upper_quantile(self, q: Floats) -> Floats:
        return np.asarray(self.median * np.exp(-self.sigma * special.ndtri(q)), dtype=np.float64)

    @property
    def aging(self) -> Aging:
        return Aging.NEITHER


@DELAYS.register("gamma")
@dataclass(frozen=True)
class Gamma(ScipyDelay):
    """E[X] = shape * scale; for whole shapes the time of that many exponential stages."""

    #: Larger is more regular.
    shape: float
    #: Seconds.
    scale: float

    def _check(self) -> None:
        self._positive("shape", "scale")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.gamma, {"a": self.shape, "scale": self.scale}

    def upper_quantile(self, q: Floats) -> Floats:
        return np.asarray(self.scale * special.gammainccinv(self.shape, q), dtype=np.float64)

    @property
    def aging(self) -> Aging:
        return _aging_by_shape(self.shape)


@DELAYS.register("weibull")
@dataclass(frozen=True)
class Weibull(ScipyDelay):
    """P(X > x) = exp(-(x / scale) ** shape)."""

    #: Below 1 the tail is heavier than exponential.
    shape: float
    #: Seconds.
    scale: float

    def _check(self) -> None:
        self._positive("shape", "scale")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.weibull_min, {"c": self.shape, "scale": self.scale}

    def upper_quantile(self, q: Floats) -> Floats:
        return self.scale * np.power(-np.log(q), 1.0 / self.shape)

    @property
    def aging(self) -> Aging:
        return _aging_by_shape(self.shape)


@DELAYS.register("bimodal")
@dataclass(frozen=True)
class Bimodal(Delay):
    """fast, or with probability p_slow, slow.

    A job that has run for longer than fast is a slow one. If slow > 2 * fast it then has more left
    than a new fast one takes, and nothing holds for all times; otherwise new is longer than used.

    >>> Bimodal(fast=1.0, slow=10.0, p_slow=0.1).expectation()
    1.9
    >>> Bimodal(fast=1.0, slow=10.0, p_slow=0.1).aging.value
    'neither'
    >>> Bimodal(fast=1.0, slow=2.0, p_slow=0.1).aging.value
    'new-longer-than-used'
    """

    #: Seconds.
    fast: float
    #: Seconds.
    slow: float
    #: Probability of slow, in [0, 1].
    p_slow: float

    def _check(self) -> None:
        if self.p_slow > 1:
            raise InvalidSetting(f"delay bimodal: expected p_slow <= 1, got {self.p_slow}")
        if self.slow < self.fast:
            raise InvalidSetting(
                f"delay bimodal: expected fast <= slow, got fast={self.fast} and slow={self.slow}"
            )

    def quantile(self, q: Floats) -> Floats:
        return np.where(q <= 1.0 - self.p_slow, self.fast, self.slow)

    def upper_quantile(self, q: Floats) -> Floats:
        return np.where(np.asarray(q) < self.p_slow, self.slow, self.fast)

    def cdf(self, x: Floats) -> Floats:
        x = np.asarray(x)
        return np.where(x >= self.slow, 1.0, np.where(x >= self.fast, 1.0 - self.p_slow, 0.0))

    def sf(self, x: Floats) -> Floats:
        x = np.asarray(x)
        return np.where(x >= self.slow, 0.0, np.where(x >= self.fast, self.p_slow, 1.0))

    def expectation(self) -> float:
        return self.fast * (1.0 - self.p_slow) + self.slow * self.p_slow

    def variance(self) -> float:
        return math.pow(self.slow - self.fast, 2) * self.p_slow * (1.0 - self.p_slow)

    @property
    def aging(self) -> Aging:
        is_constant = self.p_slow in (0.0, 1.0) or self.fast == self.slow
        if is_constant or self.slow <= 2.0 * self.fast:
            return Aging.NEW_LONGER_THAN_USED
        return Aging.NEITHER
