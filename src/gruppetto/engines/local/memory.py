"""Memory that processes share and that cannot leak, and which of its blocks are free."""

from __future__ import annotations

import heapq
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from gruppetto.errors import GruppettoError
from gruppetto.training.packing import (
    GradientSpace,
    GradientsPacking,
    Weights,
    WeightsPacking,
)

__all__ = ["Blocks", "MemoryPlan", "RunMemory", "share"]

#: Blocks start at multiples of so many bytes.
_PAGE = mmap.PAGESIZE


def share(num_bytes: int, descriptor: int | None = None) -> tuple[int, Tensor]:
    """Map an anonymous file; it is gone when the last process that maps it is.

    Args:
        num_bytes: its size.
        descriptor: of a file made by another process; None makes one. Pages take memory only
            once they are written to.

    Returns:
        The descriptor, and all bytes as a uint8 tensor.
    """
    if descriptor is None:
        descriptor = os.memfd_create("gruppetto", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
    mapped = mmap.mmap(descriptor, num_bytes)
    return descriptor, torch.frombuffer(mapped, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How much a run shares."""

    num_versions: int
    num_gradients: int

    @classmethod
    def for_run(cls, num_learners: int, num_held: int, keeps_past: bool = False) -> MemoryPlan:
        """Each learner reads one version and writes one gradient; others are held or arrive.

        Args:
            num_learners: P.
            num_held: gradients that wait for one update at most, K.
            keeps_past: held gradients keep the version they were computed on.
        """
        # Beside the gradient a learner writes, one that it has pushed may not have been looked at
        # yet.
        gradients = 2 * num_learners + num_held
        # One version more is the newest, and one is being written.
        return cls((gradients if keeps_past else num_learners) + 2, gradients)


class RunMemory:
    """The versions and gradients of a run, mapped before the processes fork.

    Args:
        plan: how many.
        packings: of the model, from the server.
    """

    def __init__(self, plan: MemoryPlan, packings: tuple[WeightsPacking, GradientsPacking]) -> None:
        self.plan = plan
        self._weights, self._gradients = packings
        self._weights_bytes = -(-self._weights.num_bytes // _PAGE) * _PAGE
        self._gradient_bytes = -(-self._gradients.num_bytes // _PAGE) * _PAGE
        self._gradients_start = plan.num_versions * self._weights_bytes
        size = self._gradients_start + plan.num_gradients * self._gradient_bytes
        self._descriptor, self._bytes = share(size)
        self._versions: dict[int, Weights] = {}
        self._spaces: dict[int, GradientSpace] = {}

    def version(self, block: int) -> Weights:
        """The weights in a block, as views; made once per process."""
        held = self._versions.get(block)
        if held is None:
            start = block * self._weights_bytes
            held = self._weights.weights(self._bytes[start : start + self._weights.num_bytes])
            self._versions[block] = held
        return held

    def gradient(self, block: int) -> GradientSpace:
        """The gradient in a block, as views; made once per process."""
        held = self._spaces.get(block)
        if held is None:
            start = self._gradients_start + block * self._gradient_bytes
            held = self._gradients.space(self._bytes[start : start + self._gradients.num_bytes])
            self._spaces[block] = held
        return held


class Blocks:
    """Which blocks are free; the lowest is taken first, so that few pages are ever touched."""

    def __init__(self, count: int, what: str) -> None:
        self._free = list(range(count))
        self._what = what

    def take(self) -> int:
        """A free block.

        Raises:
            GruppettoError: none is free: more is in use than was planned for.
        """
        if not self._free:
            raise GruppettoError(f"no block is free for another {self._what}: a bug in the engine")
        return heapq.heappop(self._free)

    def give_back(self, block: int) -> None:
        """A block that nobody reads or writes any more."""
        heapq.heappush(self._free, block)
