"""Which block of the shared memory holds which version of the weights, and who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gruppetto.engines.local.memory import Blocks, RunMemory
from gruppetto.protocols.messages import Contribution
from gruppetto.training.learner import Gradient
from gruppetto.training.packing import Weights

__all__ = ["PublishesWeights", "Versions"]


class PublishesWeights(Protocol):
    """A server, as far as this engine needs it."""

    def apply(self, contributions: Sequence[Contribution], gradients: Sequence[Gradient]) -> None:
        """Take one update."""
        ...

    def publish_to(self, place: Weights) -> None:
        """Copy the current version somewhere."""
        ...


class Versions:
    """The versions of a run that are in use.

    Args:
        memory: shared with the learners.
    """

    def __init__(self, memory: RunMemory) -> None:
        self._blocks = Blocks(memory.plan.num_versions, "version")
        self._memory = memory
        self._readers: dict[int, int] = {}
        self.newest = 0
        self.block = -1

    def publish(self, version: int, server: PublishesWeights) -> None:
        """Write a version down; from now on it is the newest."""
        block = self._blocks.take()
        server.publish_to(self._memory.version(block))
        before, self.block, self.newest = self.block, block, version
        if before >= 0 and not self._readers.get(before):
            self._blocks.give_back(before)

    def hold(self) -> int:
        """The block of the newest version, for one reader more."""
        self._readers[self.block] = self._readers.get(self.block, 0) + 1
        return self.block

    def release(self, block: int) -> None:
        """One reader less."""
        self._readers[block] -= 1
        if not self._readers[block] and block != self.block:
            self._blocks.give_back(block)
