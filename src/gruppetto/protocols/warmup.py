"""How a run begins before its protocol takes over: hardsync, for some epochs.

Protocols count mini-batches and know no epochs: whoever builds a coordinator turns the epochs of a
warm-up into ``warmup_mini_batches``. Source: the warm start of Gupta, Zhang, Wang, "Rudra", 2015,
arXiv:1509.04210, against late gradients of many learners while weights are still random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = ["WARMUPS", "HardsyncWarmup", "Warmup"]


@dataclass(frozen=True)
class Warmup:
    """Other rules than the protocol's, until so many epochs are settled."""

    #: Epochs, a fraction allowed, > 0.
    epochs: float

    def __post_init__(self) -> None:
        if not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise InvalidSetting(
                f"warmup {WARMUPS.name_of(self)}: expected epochs > 0 and finite, "
                f"got epochs={self.epochs}"
            )


WARMUPS: Registry[Warmup] = Registry("warmup")


@WARMUPS.register("hardsync")
@dataclass(frozen=True)
class HardsyncWarmup(Warmup):
    """Every update waits for every live learner, until so many epochs are applied.

    >>> WARMUPS.parse("hardsync:epochs=0.5")
    HardsyncWarmup(epochs=0.5)
    """
