"""What connects the modules' processes, made before they fork: rings, and a barrier's counters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from gruppetto.decoupled.schedule import Schedule
from gruppetto.engines.decoupled.rings import Ring

__all__ = ["Channels", "Ends"]

#: Slots have room for mini-batches so much larger than the first one; what is not used takes none.
_HEADROOM: Final = 4


@dataclass(frozen=True)
class Ends:
    """One module's ends of the channels; None where there is nobody to talk to."""

    #: Outputs of the module before this one.
    inputs: Ring | None = None
    outputs: Ring | None = None
    #: Of this module's outputs.
    gradients: Ring | None = None
    #: Of its inputs, for the module before.
    input_gradients: Ring | None = None
    #: From module 1 to module K, which has another module's inputs and needs the labels.
    batches: Ring | None = None
    #: Event descriptor that counts this module's iterations for module 1, at a barrier.
    passed: int | None = None
    #: Module 1 only: module -> the same of the others.
    barrier: dict[int, int] = field(default_factory=dict)
    #: Of these rings' slots, once each has held a full mini-batch.
    num_bytes: int = 0

    def receive_on(self, device: torch.device) -> None:
        """Have what comes from neighbours come straight to the module's device; before the start.

        Samples stay on the CPU, where they are read.

        Raises:
            TaskError: memory of this device cannot be shared.
        """
        for ring in (self.inputs, self.gradients):
            if ring is not None:
                ring.receive_on(device)


class Channels:
    """Rings between neighbours, one for batches from module 1 to K, and the barrier's counters.

    Args:
        schedule: says how many modules, how much rings hold, and whether there is a barrier.
        cut_bytes: of a full mini-batch, crossing the cut behind module k = 1..K − 1.
        batch_bytes: of the tensors of a full mini-batch.
    """

    def __init__(self, schedule: Schedule, cut_bytes: Sequence[int], batch_bytes: int) -> None:
        modules, capacity = schedule.num_modules, schedule.capacity
        self._modules = modules
        self._capacity = capacity
        self._cut_bytes, self._batch_bytes = cut_bytes, batch_bytes
        self._outputs = [
            Ring(f"the outputs of module {k}", capacity, size, _HEADROOM)
            for k, size in enumerate(cut_bytes, 1)
        ]
        self._gradients = [
            Ring(f"the gradients of module {k}'s outputs", capacity, size, _HEADROOM)
            for k, size in enumerate(cut_bytes, 1)
        ]
        self._batches = None
        if modules > 1:
            # As many as can be between the forward passes of modules 1 and K, so that nobody ever
            # waits for room here: full rings, and a mini-batch in hand at each module but the last.
            most = (modules - 1) * (capacity + 1)
            self._batches = Ring("the samples of a mini-batch", most, batch_bytes, _HEADROOM)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        later = range(2, modules + 1) if schedule.barrier else ()
        self._passed = {k: os.eventfd(0, flags) for k in later}

    def ends(self, module: int) -> Ends:
        """Those of module k = 1..K."""
        is_first, is_last = module == 1, module == self._modules
        has_batches = self._batches is not None and (is_first or is_last)
        return Ends(
            inputs=None if is_first else self._outputs[module - 2],
            outputs=None if is_last else self._outputs[module - 1],
            gradients=None if is_last else self._gradients[module - 1],
            input_gradients=None if is_first else self._gradients[module - 2],
            batches=self._batches if has_batches else None,
            passed=self._passed.get(module),
            barrier=self._passed if is_first else {},
            num_bytes=self._num_bytes(module),
        )

    def _num_bytes(self, module: int) -> int:
        # Outputs one way and their gradient the other, at either side of the module.
        crossing = sum(self._cut_bytes[max(0, module - 2) : module])
        num_bytes = 2 * self._capacity * crossing
        if self._batches is not None and module in (1, self._modules):
            num_bytes += self._batches.capacity * self._batch_bytes
        return num_bytes

    def close(self) -> None:
        """Close all descriptors of this process."""
        batches = [] if self._batches is None else [self._batches]
        for ring in (*self._outputs, *self._gradients, *batches):
            ring.close()
        for descriptor in self._passed.values():
            os.close(descriptor)
