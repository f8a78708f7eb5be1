"""What a law of delays can answer: quantiles, probabilities, moments, and how it ages.

Laws are frozen and pure: seconds, on top of scipy.stats. Every law is sampled by its inverse CDF
from one keyed uniform (see :mod:`gruppetto.delays.keyed`), so that the n-th job of a learner takes
equally long in every engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = ["DELAYS", "Aging", "Delay", "Floats", "ScipyDelay"]

Floats: TypeAlias = npt.NDArray[np.float64]


class Aging(Enum):
    """Whether a job that has run for a while has less left than a new one takes.

    Definition 3 of Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018,
    compares P(X > x + t | X > t) with P(X > x) for all x, t >= 0.
    """

    #: A used job has less left: P(X > x + t | X > t) <= P(X > x). Known as NBU elsewhere.
    NEW_LONGER_THAN_USED = "new-longer-than-used"
    #: A used job has more left: >=. Known as NWU elsewhere.
    NEW_SHORTER_THAN_USED = "new-shorter-than-used"
    #: Both: the exponential law, and no other.
    MEMORYLESS = "memoryless"
    #: Neither holds for all x and t.
    NEITHER = "neither"
    #: Not decided: a law made of samples.
    UNKNOWN = "unknown"


DELAYS: Registry[Delay] = Registry("delay")


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

    # --------------------------------------------------------------------- drawing

    @property
    def is_independent(self) -> bool:
        """Whether every job is a new draw from the same law, whichever slot's and the how-manieth.

        Closed forms and vectorised simulations rest on it.
        """
        return True

    def draws(self, q: Floats, slot: int, start: int) -> Floats:
        """Seconds of the jobs ``start``, ``start + 1``, ... of a slot, for their uniforms q."""
        return self.quantile(q)

    # --------------------------------------------------------------- probabilities

    def quantile(self, q: Floats) -> Floats:
        """Inverse CDF: seconds for probabilities in (0, 1), elementwise."""
        raise NotImplementedError

    def upper_quantile(self, q: Floats) -> Floats:
        """Seconds exceeded with probability q in (0, 1), elementwise.

        The same as ``quantile(1 - q)``, and exact where 1 - q would round to 1.
        """
        raise NotImplementedError

    def cdf(self, x: Floats) -> Floats:
        """P(X <= x) for seconds x, elementwise."""
        raise NotImplementedError

    def sf(self, x: Floats) -> Floats:
        """P(X > x) for seconds x, elementwise; exact also where it is tiny."""
        raise NotImplementedError

    # --------------------------------------------------------------------- moments

    def expectation(self) -> float:
        """E[X] in seconds; may be infinite."""
        raise NotImplementedError

    def variance(self) -> float:
        """E[(X - E[X])²] in seconds²; may be infinite."""
        raise NotImplementedError

    def finite_expectation(self, purpose: str) -> float:
        """E[X] in seconds, for what makes no sense without one.

        Args:
            purpose: what needs it, for the message.

        Raises:
            InvalidSetting: E[X] is infinite.
        """
        mean = self.expectation()
        if not math.isfinite(mean):
            raise InvalidSetting(
                f"delay {DELAYS.format(self)} has an infinite mean; expected a finite one for "
                f"{purpose}"
            )
        return mean

    # ----------------------------------------------------------------------- aging

    @property
    def aging(self) -> Aging:
        """How it ages; decides whether k-async's time per update is bounded by k-sync's."""
        raise NotImplementedError


class ScipyDelay(Delay):
    """A law that scipy.stats knows."""

    def _law(self) -> tuple[Any, dict[str, float]]:
        """The family and its parameters. (A frozen family takes half a millisecond to make.)"""
        raise NotImplementedError

    def quantile(self, q: Floats) -> Floats:
        family, parameters = self._law()
        return np.asarray(family.ppf(q, **parameters), dtype=np.float64)

    def cdf(self, x: Floats) -> Floats:
        family, parameters = self._law()
        return np.asarray(family.cdf(x, **parameters), dtype=np.float64)

    def sf(self, x: Floats) -> Floats:
        family, parameters = self._law()
        return np.asarray(family.sf(x, **parameters), dtype=np.float64)

    def expectation(self) -> float:
        family, parameters = self._law()
        with np.errstate(over="ignore", invalid="ignore"):  # of the variance, which comes along
            return float(family.mean(**parameters))

    def variance(self) -> float:
        family, parameters = self._law()
        with np.errstate(over="ignore", invalid="ignore"):
            value = float(family.var(**parameters))
        return math.inf if math.isnan(value) else value
