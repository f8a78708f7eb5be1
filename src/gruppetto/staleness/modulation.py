"""What a late gradient is worth: factors s = rate / base rate, pure functions of numbers.

``apply_to`` says what the factors do at the server:

* ``learning-rate`` (default): the gradients are averaged with weights n_i·s_i and the update's
  learning rate is multiplied by the sample-weighted mean of the s_i. For plain SGD this is the
  papers' rule; it also works for Adam, which cancels any factor on the gradient.
* ``gradient``: the literal form, g = Σ n_i s_i g_i / Σ n_i, before momentum.

This file holds the contract and the rules of the first papers on parameter servers;
:mod:`gruppetto.staleness.rules` holds the later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gruppetto.spec import Registry

__all__ = [
    "MODULATIONS",
    "ApplyTo",
    "Factors",
    "Inverse",
    "InverseMean",
    "Modulation",
    "NoModulation",
    "Situation",
]

ApplyTo = Literal["learning-rate", "gradient"]


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known about one gradient when its update fires."""

    #: Of this gradient, in updates, >= 0.
    staleness: int
    #: Expected of this protocol in closed form, else measured so far.
    mean_staleness: float = 0.0
    #: P, learners that are here or still expected, >= 1.
    num_live: int = 1
    #: The server's, just before the update: updates taken so far.
    version: int = 0


@dataclass(frozen=True)
class Modulation:
    """A rule that turns a gradient's staleness into a factor on its learning rate."""

    def factor(self, at: Situation) -> float | None:
        """The factor of one gradient, before normalising.

        Returns:
            s >= 0, where 0 leaves the gradient out; None where the server must compute it from
            tensors, see :attr:`needs_distance`.
        """
        raise NotImplementedError

    def factor_at_distance(self, squared_distance: float, rate: float) -> float:
        """The factor of one gradient, for rules that :attr:`needs_distance`.

        Args:
            squared_distance: ‖w − w_past‖² over all trained parameters, between the weights now
                and those the gradient was computed on.
            rate: the first parameter group's learning rate now, before modulation, >= 0.
        """
        raise NotImplementedError

    @property
    def needs_distance(self) -> bool:
        """Whether the factor follows from how far the weights have moved."""
        return False

    @property
    def applies_to(self) -> ApplyTo:
        """Whether the factors scale the learning rate or the gradient."""
        return getattr(self, "apply_to", "learning-rate")

    @property
    def is_normalised(self) -> bool:
        """Whether factors are divided by their running mean, see :class:`Factors`."""
        return getattr(self, "normalise", False)


class Factors:
    """The factors of a run, update by update: all that modulation remembers.

    A rule with ``normalise=true`` keeps the mean step size: each of its factors is divided by the
    mean of the raw factors of all gradients of the run up to and including its update, each
    gradient counting once. So the mean of a whole run's factors is near 1 and single ones exceed
    1; the first update's mean is 1. This is FLSim's w(σ)/w(average σ), with the measured mean of w
    in place of w at an average given beforehand. The mean follows from events alone.

    Args:
        modulation: the rule.

    >>> half = Factors(Inverse(normalise=True))
    >>> half.of([Situation(0)]), half.of([Situation(4)])
    ([1.0], [0.4])
    >>> [round(f, 4) for f in half.of([Situation(1), Situation(4)])]
    [1.6, 0.4]
    """

    __slots__ = ("_count", "_rule", "_total")

    def __init__(self, modulation: Modulation) -> None:
        self._rule = modulation
        self._total = 0.0
        self._count = 0

    def of(self, situations: Sequence[Situation]) -> list[float | None]:
        """The factors of one update's gradients, in order; call it once for each update."""
        raw = [self._rule.factor(at) for at in situations]
        if not self._rule.is_normalised:
            return raw
        known = [factor for factor in raw if factor is not None]
        for factor in known:
            self._total += factor
        self._count += len(known)
        # All of them zero: nothing has counted yet, and nothing does now.
        mean = self._total / self._count if self._total > 0 else 1.0
        return [None if factor is None else factor / mean for factor in raw]


MODULATIONS: Registry[Modulation] = Registry("modulation")


@MODULATIONS.register("none")
@dataclass(frozen=True)
class NoModulation(Modulation):
    """Every gradient counts fully, however late.

    >>> NoModulation().factor(Situation(7))
    1.0
    """

    def factor(self, at: Situation) -> float:
        return 1.0


@MODULATIONS.register("inverse")
@dataclass(frozen=True)
class Inverse(Modulation):
    """α₀ / max(1, σ) per gradient: staleness 0 and 1 count fully.

    Source: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD", IJCAI 2016.

    >>> [Inverse().factor(Situation(s)) for s in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """

    apply_to: ApplyTo = "learning-rate"
    normalise: bool = False

    def factor(self, at: Situation) -> float:
        return 1.0 / at.staleness if at.staleness > 1 else 1.0


@MODULATIONS.register("inverse-mean")
@dataclass(frozen=True)
class InverseMean(Modulation):
    """α₀ / (1 + mean staleness), the same for every gradient; with cap=true, at most `inverse`.

    The mean is the protocol's closed form, (P-1)/K or (P-K)/K, where there is one and the
    measured mean otherwise. The 1 keeps hardsync's rate at staleness 0. Source: Gupta, Zhang,
    Wang, "Rudra", ICDM 2016 (α₀/⟨σ⟩ for n-softsync), with 1 added.

    >>> at = Situation(staleness=9, mean_staleness=3.0)
    >>> InverseMean().factor(at), InverseMean(cap=True).factor(at)
    (0.25, 0.1111111111111111)
    """

    cap: bool = False
    apply_to: ApplyTo = "learning-rate"

    def factor(self, at: Situation) -> float:
        factor = 1.0 / (1.0 + at.mean_staleness)
        return min(factor, 1.0 / at.staleness) if self.cap and at.staleness > 1 else factor
