"""Rules of thumb for many learners: the learning rate, or the mini-batch, as a function of P.

P learners with mini-batches of μ samples see μP samples per synchronous update. Either the rate
follows that product, or μ is chosen so that the product stays what it was. Source: Gupta, Zhang,
Wang, "Rudra", 2015, arXiv:1509.04210 (λ is the number of learners there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = [
    "BATCH_SCALINGS",
    "RATE_SCALINGS",
    "BatchScaling",
    "ProductBatch",
    "RateScaling",
    "SqrtBatch",
]


@dataclass(frozen=True)
class RateScaling:
    """A rule for the base learning rate, applied once, at the start of a run."""

    def factor(self, batch_size: int, num_learners: int) -> float:
        """What every learning rate is multiplied by, > 0.

        Args:
            batch_size: μ, samples of one learner's mini-batch, >= 1.
            num_learners: P, >= 1.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class BatchScaling:
    """A rule for the mini-batch of one learner, applied once, at the start of a run."""

    def batch_size(self, num_learners: int) -> int:
        """μ, samples of one learner's mini-batch, >= 1.

        Args:
            num_learners: P, >= 1.

        Raises:
            InvalidSetting: the rule gives no whole mini-batch for so many learners.
        """
        raise NotImplementedError


RATE_SCALINGS: Registry[RateScaling] = Registry("learning-rate scaling")
BATCH_SCALINGS: Registry[BatchScaling] = Registry("batch scaling")


@RATE_SCALINGS.register("sqrt-batch")
@dataclass(frozen=True)
class SqrtBatch(RateScaling):
    """α₀·sqrt(μP/B) for --scale-lr: B is the mini-batch α₀ was tuned for, with one learner.

    Rudra's rule for hardsync, where an update averages μP samples. The larger average is less
    noisy by sqrt(μP/B), and so bears a step that is longer by as much.

    >>> SqrtBatch(batch=128).factor(batch_size=128, num_learners=4)
    2.0
    """

    #: B, in samples.
    batch: int

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InvalidSetting(f"sqrt-batch: expected batch >= 1, got batch={self.batch}")

    def factor(self, batch_size: int, num_learners: int) -> float:
        return math.sqrt(batch_size * num_learners / self.batch)


@BATCH_SCALINGS.register("product")
@dataclass(frozen=True)
class ProductBatch(BatchScaling):
    """μ = total / P for --scale-batch: more learners, smaller mini-batches, the same μP.

    Rudra's rule μλ ≈ constant: the error follows the product more than either factor. A total
    that P does not divide is refused, with the nearest that work.

    >>> ProductBatch(total=128).batch_size(num_learners=4)
    32
    >>> ProductBatch(total=100).batch_size(num_learners=8)
    Traceback (most recent call last):
    gruppetto.errors.InvalidSetting: scale batch: product:total=100 cannot be shared by 8 learners
    evenly; expected a multiple of 8, nearest 96 and 104
    """

    #: μP, in samples.
    total: int

    def __post_init__(self) -> None:
        if self.total < 1:
            raise InvalidSetting(f"product: expected total >= 1, got total={self.total}")

    def batch_size(self, num_learners: int) -> int:
        share, rest = divmod(self.total, num_learners)
        if rest:
            nearest = [n * num_learners for n in (share, share + 1) if n]
            raise InvalidSetting(
                f"scale batch: product:total={self.total} cannot be shared by {num_learners} "
                f"learners evenly; expected a multiple of {num_learners}, nearest "
                f"{' and '.join(map(str, nearest))}"
            )
        return share
