"""Backpropagation in K modules: the control. Every module waits for the backward pass above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gruppetto.decoupled.methods.base import METHODS, Keeps, Method

__all__ = ["Backpropagation"]


@METHODS.register("bp")
@dataclass(frozen=True)
class Backpropagation(Method):
    """Plain backpropagation, split: the control; no gradient is stale and nothing overlaps.

    >>> Backpropagation(modules=3).delays
    (0, 0, 0)
    """

    #: The weights do not change between the two passes: no copy is needed.
    keeps: ClassVar[Keeps] = "graph-on-live"

    def delay(self, module: int) -> int:
        return 0
