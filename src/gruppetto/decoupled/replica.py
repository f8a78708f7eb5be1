"""Copies of one stage of a network: the same buffers, other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gruppetto.training.parameters import Flat, Layout

__all__ = ["Payload", "Replica", "as_payload", "other_buffers", "run_stage"]

#: What crosses a cut: the tensors of one mini-batch, detached and contiguous.
Payload = tuple[Tensor, ...]


def as_payload(outputs: Any) -> Payload:
    """A stage's outputs as they travel: without gaps and from the start of their memory, so that
    what is computed from them does not depend on which way they went. Nobody may change them."""
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return tuple(_plain(t.detach()) for t in tensors)


def _plain(tensor: Tensor) -> Tensor:
    has_gaps = not tensor.is_contiguous()
    if tensor.dim() == 4:  # pictures may have their channels last
        has_gaps = has_gaps and not tensor.is_contiguous(memory_format=torch.channels_last)
    if not has_gaps and tensor.storage_offset() == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def run_stage(stage: nn.Module, payload: Payload, *, as_tuple: bool) -> Any:
    """Call a stage, but the first, with what the one before it returned.

    Args:
        stage: takes one argument.
        payload: its tensors.
        as_tuple: the one before returned a tuple, perhaps of one.
    """
    return stage(payload if as_tuple else payload[0])


def other_buffers(stage: nn.Module) -> list[tuple[nn.Module, str]]:
    """Buffers that may change what a training forward pass computes: all but BatchNorm's averages,
    which it writes and does not read."""
    found = []
    for module in stage.modules():
        if isinstance(module, _BatchNorm) and module.training:
            continue
        found += [(module, name) for name, b in module._buffers.items() if b is not None]
    return found


class Replica:
    """A copy of a stage whose trained weights live in a flat vector given or of its own.

    Buffers are the stage's own tensors, unless :meth:`detach_buffers` gave it others; frozen
    parameters are shared for good.

    Args:
        stage: the live one.
        layout: of the stage's trained parameters in the flat vector.
        slot_of: the slot's index of each of the stage's parameters that has one, by ``id``.
        flat: the vector; None makes one.
        device: where the weights are.
    """

    def __init__(
        self,
        stage: nn.Module,
        layout: Layout,
        slot_of: Callable[[nn.Parameter], int | None],
        device: torch.device,
        flat: Flat | None = None,
    ) -> None:
        self.flat = layout.zeros(device) if flat is None else flat
        self.stage = copy.deepcopy(stage)
        views = layout.views(self.flat)
        #: (live module, its copy), for what belongs to a module by name.
        self._pairs = list(zip(stage.modules(), self.stage.modules(), strict=True))
        by_slot: dict[int, nn.Parameter] = {}
        for live, mine in self._pairs:
            for name, parameter in live._parameters.items():
                if parameter is None:
                    continue
                slot = slot_of(parameter)
                if slot is None:
                    mine._parameters[name] = parameter
                    continue
                copied = mine._parameters[name]
                assert copied is not None
                copied = by_slot.setdefault(slot, copied)
                copied.data = views[slot]
                mine._parameters[name] = copied
        #: In slot order.
        self.parameters: Sequence[nn.Parameter] = [by_slot[i] for i in range(len(layout.slots))]
        self._buffers = [
            (live, mine, name)
            for live, mine in self._pairs
            for name, buffer in live._buffers.items()
            if buffer is not None
        ]
        self.share_buffers()

    def share_buffers(self) -> None:
        """Read and write the live stage's buffers."""
        for live, mine, name in self._buffers:
            mine._buffers[name] = live._buffers[name]

    def hand_back_buffers(self) -> None:
        """Where a module has put another tensor in a buffer's place, the live one follows."""
        for live, mine, name in self._buffers:
            if mine._buffers[name] is not live._buffers[name]:
                buffer = mine._buffers[name]
                live._buffers[name] = None if buffer is None else buffer.detach()

    def detach_buffers(self, others: Sequence[Tensor]) -> None:
        """Give it buffers of its own: copies of the live ones, and of ``others`` where those
        decide what is computed, in the order of :func:`other_buffers`."""
        for live, mine, name in self._buffers:
            buffer = live._buffers[name]
            mine._buffers[name] = None if buffer is None else buffer.clone()
        for (module, name), value in zip(other_buffers(self.stage), others, strict=True):
            module._buffers[name] = value.clone()
