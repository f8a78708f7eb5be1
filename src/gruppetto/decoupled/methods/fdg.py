"""Fully decoupled learning with delayed gradients (FDG)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gruppetto.decoupled.methods.base import METHODS, LooksAhead
from gruppetto.errors import InvalidSetting

__all__ = ["FullyDecoupled"]


@METHODS.register("fdg")
@dataclass(frozen=True)
class FullyDecoupled(LooksAhead):
    """Inputs late too, gradients 2 (K − k) updates late, and shrunk by beta at each module.

    No module waits for another's pass of the same iteration, forward or backward. The gradient
    that module k receives has been multiplied by beta K − k times, so beta^(K−k) in all: a factor
    on the gradient, like ``exponential`` with apply_to=gradient, chosen per module by its place.
    Source: Zhuang, Wang, Liu, Lin, "Fully Decoupled Neural Network Learning Using Delayed
    Gradients", TNNLS 2021.

    Args:
        beta: in (0, 1]; the paper's best are 0.2 to 0.8.

    >>> FullyDecoupled(modules=3).delays
    (4, 2, 0)
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.beta, (int, float))
        if not (is_number and math.isfinite(self.beta) and 0.0 < self.beta <= 1.0):
            raise InvalidSetting(f"fdg: expected beta in (0, 1], got beta={self.beta!r}")

    def delay(self, module: int) -> int:
        return 2 * (self.modules - module)

    @property
    def shrink(self) -> float:
        return self.beta
