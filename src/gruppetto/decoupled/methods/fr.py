"""Features replay (FR): inputs are kept, and the backward pass replays the forward one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gruppetto.decoupled.methods.base import METHODS, Keeps, Method

__all__ = ["FeaturesReplay"]


@METHODS.register("fr")
@dataclass(frozen=True)
class FeaturesReplay(Method):
    """Old inputs, current weights: module k runs the mini-batch of K − k updates ago forward again.

    Needs the memory of inputs instead of graphs, and one forward pass more in all modules but the
    last. The replay draws the same random numbers, and moves no buffers. Source: Huo, Gu, Huang,
    "Training Neural Networks Using Features Replay", NeurIPS 2018.

    >>> FeaturesReplay(modules=3).delays
    (2, 1, 0)
    """

    keeps: ClassVar[Keeps] = "input"

    def delay(self, module: int) -> int:
        return self.modules - module
