"""Decoupled parallel backpropagation with delayed gradients (DDG)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gruppetto.decoupled.methods.base import METHODS, Keeps, LooksAhead
from gruppetto.errors import InvalidSetting

__all__ = ["DelayedGradients"]


@METHODS.register("ddg")
@dataclass(frozen=True)
class DelayedGradients(LooksAhead):
    """Gradients K − k updates late in module k, exact at the weights of their forward pass.

    w_k^{t+1} = w_k^t − γ_t ∇f_{k, x(t−K+k)}(w^{t−K+k}). Source: Huo, Gu, Yang, Huang, "Decoupled
    Parallel Backpropagation with Convergence Guarantee", ICML 2018.

    Args:
        stash: ``weights``: the weights of the forward pass are kept, and gradients are those of
            the paper. ``none``: the published code, where the graph's weights change under it:
            the input gradients mix old activations with new weights, and belong to no loss. For
            comparison only.

    >>> DelayedGradients(modules=3).delays
    (2, 1, 0)
    """

    stash: Literal["weights", "none"] = "weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stash not in ("weights", "none"):
            raise InvalidSetting(f"ddg: expected stash weights or none, got {self.stash!r}")
        if self.stash == "none" and self.lookahead:
            raise InvalidSetting(
                "ddg: lookahead runs forward passes on weights of their own, which stash=none has "
                "not; expected one of the two, got both"
            )

    @property
    def keeps(self) -> Keeps:  # type: ignore[override]
        return "graph-on-copy" if self.stash == "weights" else "graph-on-live"

    def delay(self, module: int) -> int:
        return self.modules - module
