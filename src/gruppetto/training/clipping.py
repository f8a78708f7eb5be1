"""Clipping at the server, on the combined gradient, before the optimizer's step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry
from gruppetto.training.parameters import Flat, squared_norm

__all__ = ["CLIPS", "Clip", "ClipNorm", "ClipValue"]


@dataclass(frozen=True)
class Clip:
    """A rule that shortens a gradient in place."""

    #: The bound, > 0.
    max: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max) and self.max > 0):
            raise InvalidSetting(f"clip: expected max > 0 and finite, got max={self.max}")

    def apply(self, gradient: Flat) -> None:
        """Clip in place."""
        raise NotImplementedError


CLIPS: Registry[Clip] = Registry("clip")


@CLIPS.register("norm")
@dataclass(frozen=True)
class ClipNorm(Clip):
    """Scale the gradient so that its L2 norm over all parameters is at most max."""

    def apply(self, gradient: Flat) -> None:
        norm = math.sqrt(sum(squared_norm(v) for v in gradient.vectors))
        if norm > self.max:
            gradient.scale_(self.max / norm)


@CLIPS.register("value")
@dataclass(frozen=True)
class ClipValue(Clip):
    """Clamp every element to [-max, max]."""

    def apply(self, gradient: Flat) -> None:
        for vector in gradient.vectors:
            vector.clamp_(-self.max, self.max)
