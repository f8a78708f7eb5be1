"""Which block of the shared memory holds which version of the weights, and who reads it.

Readers of a version are the learners that compute on it and, where the server needs them for an
update, the gradients that were computed on it and are not applied yet. One block per version,
however many readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from gruppetto.engines.local.memory import Blocks, RunMemory
from gruppetto.protocols.messages import Contribution
from gruppetto.training.learner import Gradient
from gruppetto.training.packing import Weights
from gruppetto.training.parameters import Flat

__all__ = ["PublishesWeights", "Versions"]


class PublishesWeights(Protocol):
    """A server, as far as this engine needs it."""

    @property
    def needs_past(self) -> bool:
        """Whether an update needs the weights each gradient was computed on."""
        ...

    def apply(
        self,
        contributions: Sequence[Contribution],
        gradients: Sequence[Gradient],
        past: Sequence[Flat] = (),
    ) -> None:
        """Take one update; ``past`` are flat weights, one for each gradient, where needed."""
        ...

    def publish_to(self, place: Weights) -> None:
        """Copy the current version somewhere."""
        ...


class Versions:
    """The versions of a run that are in use.

    Args:
        memory: shared with the learners.
        keeps_past: gradients that are held keep the version they were computed on.
    """

    def __init__(self, memory: RunMemory, keeps_past: bool = False) -> None:
        self._keeps_past = keeps_past
        self._blocks = Blocks(memory.plan.num_versions, "version")
        self._memory = memory
        self._readers: dict[int, int] = {}
        #: lease of a held gradient -> version and block it was computed on.
        self._past: dict[int, tuple[int, int]] = {}
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

    # ----------------------------------------------- what gradients were computed on

    def keep(self, lease: int, version: int, block: int) -> None:
        """A learner has read a block; from now on the gradient it pushed is, where wanted."""
        if self._keeps_past:
            self._past[lease] = version, block
        else:
            self.release(block)

    def past(self, leases: Iterable[int]) -> list[Flat]:
        """The weights that held gradients were computed on; none where they are not kept."""
        if not self._keeps_past:
            return []
        return [self._memory.version(self._past[lease][1]).flat for lease in leases]

    def forget(self, lease: int) -> None:
        """A gradient is applied or dropped; nothing happens to one that was not kept."""
        if lease in self._past:
            self.release(self._past.pop(lease)[1])

    def past_state(self, leases: Iterable[int]) -> tuple[dict[str, Tensor], dict[str, int]]:
        """For a checkpoint: each version that these gradients were computed on, once.

        Returns:
            Tensors by name, and lease -> version as JSON has it.
        """
        kept = {lease: self._past[lease] for lease in leases if lease in self._past}
        tensors = {
            f"past/{version}/{i}": vector
            for version, block in dict(kept.values()).items()
            for i, vector in enumerate(self._memory.version(block).flat.vectors)
        }
        return tensors, {str(lease): version for lease, (version, _) in kept.items()}

    def restore_past(self, tensors: Mapping[str, Tensor], kept: Mapping[str, int]) -> None:
        """Take back what :meth:`past_state` gave."""
        blocks: dict[int, int] = {}
        for lease, version in kept.items():
            if version not in blocks:
                block = blocks[version] = self._blocks.take()
                for i, vector in enumerate(self._memory.version(block).flat.vectors):
                    vector.copy_(tensors[f"past/{version}/{i}"])
            block = blocks[version]
            self._readers[block] = self._readers.get(block, 0) + 1
            self._past[int(lease)] = version, block
