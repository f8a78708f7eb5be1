"""A torch optimizer that runs on ranges of the flat vector.

Elementwise optimizers get as few, as long tensors as possible: a range covers neighbouring
parameters that have had gradients at the same updates. When an update has a gradient for some of
a range and none for others, the range is split for good, its state with it, so that an absent
gradient is ``None`` to the optimizer, exactly as in plain PyTorch: no decay, no momentum, no step
count. Other optimizers get every parameter as a view in its own shape.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gruppetto.errors import InvalidSetting
from gruppetto.training.optimizers import ELEMENTWISE
from gruppetto.training.parameters import Flat, Layout, Slot

__all__ = ["OptimizerOnRanges", "Range"]


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(slots=True)
class Range:
    """Neighbouring slots of one group and dtype, and the tensor the optimizer sees."""

    first: int
    last: int
    weights: Tensor


class OptimizerOnRanges:
    """Steps a flat vector with a torch optimizer that was built over a model's parameters.

    Args:
        optimizer: freshly built by the user; its groups, options and state are taken over.
        parameters: the model's, by name.
        layout: of the flat vector.
        weights: the flat vector itself, changed in place by :meth:`step`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, torch.nn.Parameter],
        layout: Layout,
        weights: Flat,
    ) -> None:
        self.optimizer = optimizer
        self._layout = layout
        self._weights = weights
        self.is_elementwise = type(optimizer).__name__ in ELEMENTWISE and type(
            optimizer
        ).__module__.startswith("torch.optim")
        ours = type(optimizer).__module__.startswith("torch.optim")
        self._bare_step = inspect.unwrap(type(optimizer).step) if ours else None
        if any(group.get("differentiable") for group in optimizer.param_groups):
            self._bare_step = None
        if all(vector.device.type == "cpu" for vector in weights.vectors):
            for group in optimizer.param_groups:
                if group.get("foreach", True) is None and group.get("fused", True) is None:
                    # What torch finds out anew at every step: on a CPU it loops over tensors.
                    group["foreach"] = False
        self.ranges: list[Range] = []
        for index, slot in enumerate(layout.slots):
            self._take_over(parameters[slot.name], self._new_range(index, index), slot)
        if self.is_elementwise:
            self._merge()
        self._publish_groups()

    # ------------------------------------------------------------- stepping

    def step(self, gradient: Flat, absent: frozenset[int], rate: float) -> None:
        """One optimizer step with every group's learning rate multiplied by ``rate``.

        Args:
            gradient: combined, in the layout.
            absent: indices of slots without a gradient.
            rate: s̄, 1.0 for the base rate.
        """
        if absent:
            self._split(absent)
        for part in self.ranges:
            part.weights.grad = None if part.first in absent else self._cut(gradient, part)
        groups = self.optimizer.param_groups
        base = [group["lr"] for group in groups]
        if rate != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * rate
        try:
            self._take_step()
        finally:
            for group, lr in zip(groups, base, strict=True):
                group["lr"] = lr
        for part in self.ranges:
            part.weights.grad = None

    def _take_step(self) -> None:
        """``optimizer.step()``, without the layers around it where nothing hangs on them.

        Torch wraps every step for its profiler and for hooks, which costs more than the step of a
        small network. A user's hook, a scheduler's counter or an unknown torch keeps the wrapper.
        """
        hooks = [getattr(self.optimizer, name, True) for name in _HOOKS]
        if self._bare_step is None or any(hooks) or "step" in vars(self.optimizer):
            self.optimizer.step()
        else:
            with torch.no_grad():
                self._bare_step(self.optimizer)

    # ----------------------------------------------------- saving, restoring

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name and everything else as plain numbers, to be saved.

        Raises:
            InvalidSetting: the optimizer keeps state that is neither tensor nor number.
        """
        tensors: dict[str, Tensor] = {}
        plain: list[dict[str, Any]] = []
        for number, part in enumerate(self.ranges):
            rest: dict[str, Any] = {}
            # Sorted: the order of keys says nothing, and a file may give them back in another.
            for key, value in sorted(self.optimizer.state.get(part.weights, {}).items()):
                if isinstance(value, Tensor):
                    tensors[f"{number}/{key}"] = value
                elif value is None or isinstance(value, (bool, int, float, str)):
                    rest[key] = value
                else:
                    raise InvalidSetting(
                        f"optimizer {type(self.optimizer).__name__} keeps {key!r} as "
                        f"{type(value).__name__}; expected tensors and numbers only"
                    )
            plain.append({"first": part.first, "last": part.last, "state": rest})
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        return tensors, {"ranges": plain, "groups": groups}

    def load(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self.optimizer.state.clear()
        self.ranges = []
        for number, entry in enumerate(plain["ranges"]):
            part = self._new_range(entry["first"], entry["last"])
            state = dict(entry["state"])
            prefix = f"{number}/"
            for name, value in tensors.items():
                if name.startswith(prefix):
                    state[name[len(prefix) :]] = value.clone()
            if state:
                self.optimizer.state[part.weights] = state
        for group, saved in zip(self.optimizer.param_groups, plain["groups"], strict=True):
            for key, value in saved.items():
                # JSON has no tuples; the optimizer's own defaults say where one belongs.
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        self._publish_groups()

    # -------------------------------------------------------------- helpers

    def _vector(self, flat: Flat, slot: Slot) -> Tensor:
        return flat.vectors[self._layout.dtypes.index(slot.dtype)]

    def _new_range(self, first: int, last: int) -> Range:
        slots = self._layout.slots
        if self.is_elementwise:
            vector = self._vector(self._weights, slots[first])
            weights = vector[slots[first].start : slots[last].end].detach()
        else:
            weights = self._layout.view(self._weights, slots[first]).detach()
        part = Range(first, last, weights.requires_grad_())
        self.ranges.append(part)
        return part

    def _cut(self, gradient: Flat, part: Range) -> Tensor:
        slots = self._layout.slots
        if self.is_elementwise:
            vector = self._vector(gradient, slots[part.first])
            return vector[slots[part.first].start : slots[part.last].end]
        return self._layout.view(gradient, slots[part.first])

    def _take_over(self, parameter: torch.nn.Parameter, part: Range, slot: Slot) -> None:
        """Move state that a constructor made for a parameter (Adagrad's sums) to its range."""
        state = self.optimizer.state.pop(parameter, None)
        if not state:
            return
        for key, value in state.items():
            # A step count is one number for the parameter, also where that is a number itself.
            is_whole = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_whole and key != "step" and self.is_elementwise:
                wide = torch.zeros_like(part.weights, requires_grad=False)
                wide[: slot.size] = value.reshape(-1)
                state[key] = wide
        self.optimizer.state[part.weights] = state

    def _merge(self) -> None:
        parts, self.ranges = self.ranges, []
        state = self.optimizer.state
        slots = self._layout.slots
        while parts:
            run = [parts.pop(0)]
            while parts and self._fits(slots[run[-1].last], slots[parts[0].first]):
                run.append(parts.pop(0))
            whole = self._new_range(run[0].first, run[-1].last)
            states = [state.pop(part.weights, {}) for part in run]
            merged = {
                key: torch.cat([s[key] for s in states])
                if isinstance(value, Tensor) and value.shape == run[0].weights.shape
                else value
                for key, value in states[0].items()
            }
            if merged:
                state[whole.weights] = merged

    @staticmethod
    def _fits(left: Slot, right: Slot) -> bool:
        return left.group == right.group and left.dtype == right.dtype and left.end == right.start

    def _split(self, absent: frozenset[int]) -> None:
        parts, self.ranges = self.ranges, []
        changed = False
        for part in parts:
            members = range(part.first, part.last + 1)
            if len({index in absent for index in members}) == 1:
                self.ranges.append(part)
                continue
            changed = True
            state = self.optimizer.state.pop(part.weights, {})
            start = part.first
            for index in members:
                if index == part.last or (index in absent) != (index + 1 in absent):
                    self._split_off(part, start, index, state)
                    start = index + 1
        if changed:
            self._publish_groups()

    def _split_off(self, part: Range, first: int, last: int, state: dict[str, Any]) -> None:
        slots = self._layout.slots
        piece = self._new_range(first, last)
        low = slots[first].start - slots[part.first].start
        high = slots[last].end - slots[part.first].start
        own = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                whole = value.shape == part.weights.shape
                value = value[low:high].clone() if whole else value.clone()
            own[key] = value
        if own:
            self.optimizer.state[piece.weights] = own

    def _publish_groups(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [
                part.weights
                for part in self.ranges
                if self._layout.slots[part.first].group == index
            ]
