"""How long one mini-batch takes: laws in seconds, frozen and pure, on top of scipy.stats.

Every law is sampled by its inverse CDF from one keyed uniform (see :mod:`gruppetto.delays.keyed`),
so that the n-th job of a learner takes equally long in every engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = [
    "DELAYS",
    "Bimodal",
    "Constant",
    "Delay",
    "Exponential",
    "Gamma",
    "Lognormal",
    "Pareto",
    "ShiftedExponential",
    "Uniform",
    "Weibull",
]

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Delay:
    """A law of seconds, >= 0."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise InvalidSetting(
                    f"delay {DELAYS.name_of(self)}: expected {field.name} >= 0 and finite, "
                    f"got {field.name}={value}"
                )
        self._check()

    def _check(self) -> None:
        """Refuse what a field-wise check cannot see."""

    def _positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) <= 0:
                raise InvalidSetting(
                    f"delay {DELAYS.name_of(self)}: expected {name} > 0, "
                    f"got {name}={getattr(self, name)}"
                )

    def quantile(self, q: Floats) -> Floats:
        """Inverse CDF: seconds for probabilities in (0, 1), elementwise."""
        raise NotImplementedError

    def expectation(self) -> float:
        """E[X] in seconds; may be infinite."""
        raise NotImplementedError


class _ScipyDelay(Delay):
    """A law that scipy.stats knows."""

    def _law(self) -> tuple[Any, dict[str, float]]:
        """The family and its parameters. (A frozen family takes half a millisecond to make.)"""
        raise NotImplementedError

    def quantile(self, q: Floats) -> Floats:
        family, parameters = self._law()
        return np.asarray(family.ppf(q, **parameters), dtype=np.float64)

    def expectation(self) -> float:
        family, parameters = self._law()
        return float(family.mean(**parameters))


DELAYS: Registry[Delay] = Registry("delay")


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

    def expectation(self) -> float:
        return self.value


@DELAYS.register("exponential")
@dataclass(frozen=True)
class Exponential(_ScipyDelay):
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


@DELAYS.register("shifted-exponential")
@dataclass(frozen=True)
class ShiftedExponential(_ScipyDelay):
    """A fixed part and an exponential part: E[X] = shift + mean."""

    #: Seconds that every mini-batch takes at least.
    shift: float
    #: Mean of the exponential part, seconds.
    mean: float

    def _check(self) -> None:
        self._positive("mean")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.expon, {"loc": self.shift, "scale": self.mean}


@DELAYS.register("pareto")
@dataclass(frozen=True)
class Pareto(_ScipyDelay):
    """Heavy tail: P(X > x) = (scale / x) ** shape for x >= scale; infinite mean for shape <= 1."""

    #: Tail index; smaller is heavier.
    shape: float
    #: Shortest time, seconds.
    scale: float

    def _check(self) -> None:
        self._positive("shape", "scale")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.pareto, {"b": self.shape, "scale": self.scale}


@DELAYS.register("uniform")
@dataclass(frozen=True)
class Uniform(_ScipyDelay):
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


@DELAYS.register("lognormal")
@dataclass(frozen=True)
class Lognormal(_ScipyDelay):
    """exp of a normal variable with mean log(median) and standard deviation sigma."""

    #: Seconds.
    median: float
    #: Standard deviation of log X.
    sigma: float

    def _check(self) -> None:
        self._positive("median", "sigma")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.lognorm, {"s": self.sigma, "scale": self.median}


@DELAYS.register("gamma")
@dataclass(frozen=True)
class Gamma(_ScipyDelay):
    """E[X] = shape * scale; for whole shapes the time of that many exponential stages."""

    #: Larger is more regular.
    shape: float
    #: Seconds.
    scale: float

    def _check(self) -> None:
        self._positive("shape", "scale")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.gamma, {"a": self.shape, "scale": self.scale}


@DELAYS.register("weibull")
@dataclass(frozen=True)
class Weibull(_ScipyDelay):
    """P(X > x) = exp(-(x / scale) ** shape)."""

    #: Below 1 the tail is heavier than exponential.
    shape: float
    #: Seconds.
    scale: float

    def _check(self) -> None:
        self._positive("shape", "scale")

    def _law(self) -> tuple[Any, dict[str, float]]:
        return stats.weibull_min, {"c": self.shape, "scale": self.scale}


@DELAYS.register("bimodal")
@dataclass(frozen=True)
class Bimodal(Delay):
    """fast, or with probability p_slow, slow.

    >>> Bimodal(fast=1.0, slow=10.0, p_slow=0.1).expectation()
    1.9
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

    def expectation(self) -> float:
        return self.fast * (1.0 - self.p_slow) + self.slow * self.p_slow
