"""What a late gradient is worth: factors s = rate / base rate in [0, 1], pure functions of numbers.

``apply_to`` says what the factors do at the server:

* ``learning-rate`` (default): the gradients are averaged with weights n_i·s_i and the update's
  learning rate is multiplied by the sample-weighted mean of the s_i. For plain SGD this is the
  papers' rule; it also works for Adam, which cancels any factor on the gradient.
* ``gradient``: the literal form, g = Σ n_i s_i g_i / Σ n_i, before momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gruppetto.spec import Registry

__all__ = ["MODULATIONS", "ApplyTo", "Inverse", "InverseMean", "Modulation", "NoModulation"]

ApplyTo = Literal["learning-rate", "gradient"]


@dataclass(frozen=True)
class Modulation:
    """A rule that turns a gradient's staleness into a factor on its learning rate."""

    def factor(self, staleness: int, mean_staleness: float) -> float | None:
        """The factor of one gradient.

        Args:
            staleness: of this gradient, in updates, >= 0.
            mean_staleness: expected of this protocol in closed form, else measured so far.

        Returns:
            s in [0, 1]; None where the server must compute it from tensors.
        """
        raise NotImplementedError

    @property
    def applies_to(self) -> ApplyTo:
        """Whether the factors scale the learning rate or the gradient."""
        return getattr(self, "apply_to", "learning-rate")


MODULATIONS: Registry[Modulation] = Registry("modulation")


@MODULATIONS.register("none")
@dataclass(frozen=True)
class NoModulation(Modulation):
    """Every gradient counts fully, however late.

    >>> NoModulation().factor(7, 3.0)
    1.0
    """

    def factor(self, staleness: int, mean_staleness: float) -> float:
        return 1.0


@MODULATIONS.register("inverse")
@dataclass(frozen=True)
class Inverse(Modulation):
    """α₀ / max(1, σ) per gradient: staleness 0 and 1 count fully.

    Source: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD", IJCAI 2016.

    >>> [Inverse().factor(s, 0.0) for s in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """

    apply_to: ApplyTo = "learning-rate"

    def factor(self, staleness: int, mean_staleness: float) -> float:
        return 1.0 / staleness if staleness > 1 else 1.0


@MODULATIONS.register("inverse-mean")
@dataclass(frozen=True)
class InverseMean(Modulation):
    """α₀ / (1 + mean staleness), the same for every gradient; with cap=true, at most `inverse`.

    The mean is the protocol's closed form, (P-1)/K or (P-K)/K, where there is one and the
    measured mean otherwise. The 1 keeps hardsync's rate at staleness 0. Source: Gupta, Zhang,
    Wang, "Rudra", ICDM 2016 (α₀/⟨σ⟩ for n-softsync), with 1 added.

    >>> InverseMean().factor(9, 3.0), InverseMean(cap=True).factor(9, 3.0)
    (0.25, 0.1111111111111111)
    """

    cap: bool = False
    apply_to: ApplyTo = "learning-rate"

    def factor(self, staleness: int, mean_staleness: float) -> float:
        factor = 1.0 / (1.0 + mean_staleness)
        return min(factor, 1.0 / staleness) if self.cap and staleness > 1 else factor
