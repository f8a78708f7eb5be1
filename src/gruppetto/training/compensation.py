"""Delay compensation with tensors: the rules of :mod:`gruppetto.staleness.compensation`.

Arithmetic is elementwise and of one operation at a time, so that a vector that is cut into
segments gives the same bits; vectors of less than float32 are computed and kept in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gruppetto.staleness.compensation import (
    AdaptiveDelayCompensation,
    Compensation,
    DelayCompensation,
    GapAware,
)
from gruppetto.training.parameters import Flat, Layout

__all__ = ["Compensator", "build_compensator"]

#: Added to the mean square before its root, as in the authors' code of DC-ASGD-a.
_MEAN_SQUARE_FLOOR = 1e-7
#: Added to a root mean square step.
_STEP_FLOOR = 1e-8


class Compensator:
    """Changes late gradients, and remembers what its rule needs between updates."""

    def compensate(self, gradient: Flat, weights: Flat, past: Flat, staleness: int) -> None:
        """Change a gradient in place; one of staleness 0 keeps its bits.

        Args:
            gradient: of one contribution; called in their order.
            weights: now, before the update.
            past: what the gradient was computed on.
            staleness: of it, in updates.
        """
        raise NotImplementedError

    def before_step(self, weights: Flat) -> None:
        """The optimizer is about to step."""

    def after_step(self, weights: Flat, rates: Sequence[float], rate: float) -> None:
        """The optimizer has stepped.

        Args:
            weights: after it.
            rates: of each parameter group, before modulation.
            rate: s̄, what modulation multiplied them by.
        """

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What it remembers: tensors, and JSON values."""
        return {}, {}

    def load(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""


def build_compensator(
    rule: Compensation | None, layout: Layout, weights: Flat
) -> Compensator | None:
    """The compensator of a rule; None where late gradients are left as they are.

    Args:
        rule: which.
        layout: of the flat vector.
        weights: the flat vector, for its dtypes and device.
    """
    match rule:
        case DelayCompensation():
            return _Constant(rule)
        case AdaptiveDelayCompensation():
            return _Adaptive(rule, weights)
        case GapAware():
            return _GapAware(rule, layout, weights)
    return None


class _Constant(Compensator):
    """g += λ·g⊙g⊙(w − w_past)"""

    def __init__(self, rule: DelayCompensation) -> None:
        self._rule = rule

    def compensate(self, gradient: Flat, weights: Flat, past: Flat, staleness: int) -> None:
        if staleness == 0:
            return
        for g, now, then in zip(gradient.vectors, weights.vectors, past.vectors, strict=True):
            wide = _wide(g)
            extra = wide * wide
            extra.mul_(now - then).mul_(self._rule.strength)
            g.copy_(extra.add_(wide))


class _Adaptive(Compensator):
    """g += λ/√(MS + 1e-7)·g⊙g⊙(w − w_past)"""

    def __init__(self, rule: AdaptiveDelayCompensation, weights: Flat) -> None:
        self._rule = rule
        self._mean_square = [_wide_zeros(v) for v in weights.vectors]

    def compensate(self, gradient: Flat, weights: Flat, past: Flat, staleness: int) -> None:
        rule = self._rule
        vectors = zip(
            gradient.vectors, self._mean_square, weights.vectors, past.vectors, strict=True
        )
        for g, mean_square, now, then in vectors:
            wide = _wide(g)
            square = wide * wide
            mean_square.mul_(rule.decay).add_(square * (1.0 - rule.decay))
            if staleness == 0:
                continue
            square.mul_(now - then).mul_(rule.strength)
            square.div_((mean_square + _MEAN_SQUARE_FLOOR).sqrt_())
            g.copy_(square.add_(wide))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {f"mean-square/{i}": v for i, v in enumerate(self._mean_square)}, {}

    def load(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        for i, vector in enumerate(self._mean_square):
            vector.copy_(tensors[f"mean-square/{i}"])


@dataclass(slots=True)
class _Part:
    """The part of a vector that belongs to one parameter group."""

    vector: int
    start: int
    end: int
    group: int
    #: Steps with a learning rate above 0.
    steps: int = 0
    #: γ_max.
    highest: float = 0.0


class _GapAware(Compensator):
    """g /= 1 + |w − w_past| / (γ_max·(√v + 1e-8))"""

    def __init__(self, rule: GapAware, layout: Layout, weights: Flat) -> None:
        self._decay = rule.decay
        self._squares = [_wide_zeros(v) for v in weights.vectors]
        self._before: Flat | None = None
        self._parts: list[_Part] = []
        for slot in layout.slots:
            vector = layout.dtypes.index(slot.dtype)
            last = next((p for p in reversed(self._parts) if p.vector == vector), None)
            if last is not None and last.group == slot.group:
                last.end = slot.end
            else:
                self._parts.append(_Part(vector, slot.start, slot.end, slot.group))

    def compensate(self, gradient: Flat, weights: Flat, past: Flat, staleness: int) -> None:
        if staleness == 0:
            return
        for part in self._parts:
            if part.steps == 0 or part.highest == 0.0:
                continue  # the weights of this group have not moved
            cut = slice(part.start, part.end)
            g, now, then = (flat.vectors[part.vector][cut] for flat in (gradient, weights, past))
            unit = self._squares[part.vector][cut] / (1.0 - self._decay**part.steps)
            unit.sqrt_().add_(_STEP_FLOOR).mul_(part.highest)
            penalty = _wide(now - then).abs().div_(unit).add_(1.0)
            g.copy_(_wide(g) / penalty)

    def before_step(self, weights: Flat) -> None:
        self._before = weights.clone()

    def after_step(self, weights: Flat, rates: Sequence[float], rate: float) -> None:
        before, self._before = self._before, None
        assert before is not None
        for part in self._parts:
            base = rates[part.group]
            part.highest = max(part.highest, base)
            if base * rate == 0.0:
                continue
            cut = slice(part.start, part.end)
            step = _wide(before.vectors[part.vector][cut] - weights.vectors[part.vector][cut])
            step.div_(base * rate).square_().mul_(1.0 - self._decay)
            self._squares[part.vector][cut].mul_(self._decay).add_(step)
            part.steps += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"squares/{i}": v for i, v in enumerate(self._squares)}
        return tensors, {"parts": [[part.steps, part.highest] for part in self._parts]}

    def load(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        for i, vector in enumerate(self._squares):
            vector.copy_(tensors[f"squares/{i}"])
        for part, (steps, highest) in zip(self._parts, plain["parts"], strict=True):
            part.steps, part.highest = steps, highest


def _wide(vector: Tensor) -> Tensor:
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def _wide_zeros(vector: Tensor) -> Tensor:
    return torch.zeros_like(vector, dtype=torch.promote_types(vector.dtype, torch.float32))
