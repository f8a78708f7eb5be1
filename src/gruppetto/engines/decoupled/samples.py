"""Where modules 1 and K get the samples of a mini-batch: read in one, received in the other."""

from __future__ import annotations

from typing import Any

import torch

from gruppetto.engines.decoupled.batches import BatchPacking, copied_batch
from gruppetto.engines.decoupled.rings import Message
from gruppetto.engines.local.reader import Reader
from gruppetto.training.task import to_device

__all__ = ["Samples"]


class Samples:
    """Mini-batches, as one module of a network meets them.

    Args:
        device: where the module computes.
        packing: how a batch travels; None in a network of one module.
        reader: of module 1; None for the others.
        is_kept: module 1 keeps batches beyond their forward pass.
        num_mini_batches: of the run, for reading ahead; None for a run that something else ends.
    """

    def __init__(
        self,
        device: torch.device,
        packing: BatchPacking | None,
        reader: Reader | None = None,
        is_kept: bool = False,
        num_mini_batches: int | None = None,
    ) -> None:
        self.device = device
        self._packing = packing
        self._reader = reader
        self._is_kept = is_kept
        self._num_mini_batches = num_mini_batches

    def fetch(self, mini_batch: int) -> tuple[Any, int]:
        """A mini-batch on the CPU, and its number of samples; then read the next one ahead.

        Raises:
            Exception: whatever the user's data raises.
        """
        assert self._reader is not None
        following = mini_batch + 1
        if following == self._num_mini_batches:
            following = -1
        self._reader.expect(mini_batch, following)
        batch, num_samples = self._reader.fetch(mini_batch, self.device)
        # Readers may use the memory of a batch again for the one after next.
        return (copied_batch(batch) if self._is_kept else batch), num_samples

    def pack(self, batch: Any) -> tuple[list[torch.Tensor], bytes]:
        """For the last module.

        Raises:
            TaskError: the batch holds what cannot travel.
        """
        assert self._packing is not None
        return self._packing.pack(batch)

    def unpack(self, message: Message) -> Any:
        """What module 1 has packed, on the device."""
        assert self._packing is not None
        return self.on_device(self._packing.unpack(message.tensors, message.rest))

    def on_device(self, batch: Any) -> Any:
        """A batch where the module computes."""
        return batch if self.device.type == "cpu" else to_device(batch, self.device)
