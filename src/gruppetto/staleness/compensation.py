"""Delay compensation: what a late gradient would say at the weights of now. Pure specs.

A modulation makes a late gradient smaller; compensation changes it, element by element, by how
far the weights have moved since it was computed. :mod:`gruppetto.training.compensation` does it
with tensors. A gradient of staleness 0 is left as it is, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = [
    "COMPENSATIONS",
    "AdaptiveDelayCompensation",
    "Compensation",
    "DelayCompensation",
    "GapAware",
    "NoCompensation",
]


@dataclass(frozen=True)
class Compensation:
    """A rule that changes a late gradient by how far the weights have moved."""

    @property
    def num_vectors(self) -> int:
        """Vectors of the weights' size that the server keeps or makes for it."""
        return 0


COMPENSATIONS: Registry[Compensation] = Registry("compensation")


@COMPENSATIONS.register("none")
@dataclass(frozen=True)
class NoCompensation(Compensation):
    """Late gradients are applied as they are.

    >>> NoCompensation().num_vectors
    0
    """


@COMPENSATIONS.register("dc-asgd")
@dataclass(frozen=True)
class DelayCompensation(Compensation):
    """g + λ·g⊙g⊙(w − w_past): a first-order step from the old weights to the new ones.

    λ·g⊙g stands for the diagonal of the Hessian. Source: Zheng et al., "Asynchronous Stochastic
    Gradient Descent with Delay Compensation", ICML 2017, DC-ASGD-c; λ = 0.04 is usual.

    >>> DelayCompensation(strength=0.5).compensated(2.0, moved=0.25)
    2.5
    """

    #: λ, >= 0.
    strength: float = 0.04

    def __post_init__(self) -> None:
        _check("dc-asgd", "strength", self.strength)

    def compensated(self, gradient: float, moved: float) -> float:
        """The rule for one element, ``moved`` being w − w_past."""
        return gradient + self.strength * gradient * gradient * moved

    @property
    def num_vectors(self) -> int:
        return 2


@COMPENSATIONS.register("dc-asgd-adaptive")
@dataclass(frozen=True)
class AdaptiveDelayCompensation(Compensation):
    """As dc-asgd with λ/√(MS + 1e-7) for λ, MS being a running mean of g⊙g.

    MS ← m·MS + (1 − m)·g⊙g for each gradient, fresh ones too, before it is used; one MS at the
    server, as in the paper's equations (its authors' code keeps one for each learner). Source:
    Zheng et al., ICML 2017, DC-ASGD-a; λ = 2 and m = 0.95 are usual.

    >>> rule = AdaptiveDelayCompensation(strength=0.5, decay=0.75)
    >>> rule.compensated(2.0, moved=0.25, mean_square=1.0)
    2.499999975000002
    """

    #: λ, >= 0.
    strength: float = 2.0
    #: m, in [0, 1).
    decay: float = 0.95

    def __post_init__(self) -> None:
        _check("dc-asgd-adaptive", "strength", self.strength)
        _check_decay("dc-asgd-adaptive", self.decay)

    def compensated(self, gradient: float, moved: float, mean_square: float) -> float:
        """The rule for one element, at an MS that includes this gradient."""
        strength = self.strength / math.sqrt(mean_square + 1e-7)
        return gradient + strength * gradient * gradient * moved

    @property
    def num_vectors(self) -> int:
        return 4


@COMPENSATIONS.register("gap-aware")
@dataclass(frozen=True)
class GapAware(Compensation):
    """g / (1 + |w − w_past| / C): smaller by how many average steps the weight has moved.

    C = γ_max·(√v + 1e-8) for each element: v is the running mean ρ·v + (1 − ρ)·(Δw/γ)² over the
    steps taken so far, corrected for its start as Adam's; γ is a step's learning rate and γ_max
    the highest before modulation so far, each of the element's parameter group. For SGD with
    momentum Δw/γ is the momentum buffer. Source: Barkai, Hakimi, Schuster, "Gap-Aware Mitigation
    of Gradient Staleness", ICLR 2020, as far as an implementation by others shows it, where
    ρ = 0.999 and 1e-8 come from. Weight decay, computed here at the newest weights, is left alone.

    >>> GapAware().compensated(3.0, moved=0.2, unit=0.1)
    1.0
    """

    #: ρ, in [0, 1).
    decay: float = 0.999

    def __post_init__(self) -> None:
        _check_decay("gap-aware", self.decay)

    def compensated(self, gradient: float, moved: float, unit: float) -> float:
        """The rule for one element, ``unit`` being its C."""
        return gradient / (1.0 + abs(moved) / unit)

    @property
    def num_vectors(self) -> int:
        return 4


def _check(rule: str, key: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidSetting(f"{rule}: expected {key} >= 0 and finite, got {key}={value}")


def _check_decay(rule: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise InvalidSetting(f"{rule}: expected 0 <= decay < 1, got decay={value}")
