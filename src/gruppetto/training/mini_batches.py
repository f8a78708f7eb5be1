"""Mini-batch number -> samples: which indices, in which epoch's order, as which batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from gruppetto.errors import TaskError
from gruppetto.training.randomness import Stream, seed_everything, stream_seed
from gruppetto.training.task import Task, batch_maker, check_batch_size

__all__ = ["MiniBatches"]

#: Epochs whose order is remembered: late mini-batches reach back, prefetching reaches ahead.
_REMEMBERED = 4


class MiniBatches:
    """The stream of mini-batches of a run. Mini-batch b belongs to epoch b // per_epoch.

    A training set may make whole batches itself, which is how data in tensors is gathered and
    augmented without a Python loop over samples: where it has a method
    ``make_batch(indices: Tensor, generator: torch.Generator | None) -> batch`` (indices int64 [B])
    and the task has no collate function of its own, this is called instead of ``__getitem__``. The
    generator is seeded from (seed, mini-batch); what the method draws it must draw from there, for
    the global generators are not seeded before it. For evaluation the generator is None: no
    augmentation.

    Args:
        task: data, sampler and collate function.
        batch_size: samples of a mini-batch; the last one of an epoch may have fewer.
        seed: the run's.

    Raises:
        InvalidSetting: a mini-batch larger than the data.
        TaskError: a sampler that gives no indices.
    """

    def __init__(self, task: Task, batch_size: int, seed: int) -> None:
        check_batch_size(task, batch_size)
        self._task = task
        self._batch_size = batch_size
        self._seed = seed
        #: epoch -> the indices of its mini-batches.
        self._cut: dict[int, tuple[Tensor, ...]] = {}
        first = self._order(0)
        self.samples_per_epoch = len(first)
        if self.samples_per_epoch == 0:
            raise TaskError("sampler: expected at least one index for epoch 0, got none")
        self._cut[0] = torch.split(first, batch_size)
        #: Mini-batches of one epoch, the ragged last one included.
        self.per_epoch = -(-self.samples_per_epoch // batch_size)
        self._make_batch = batch_maker(task, task.train)
        # Indexing whole tensors gives the same bits as collating their rows, much faster.
        whole = task.collate_fn in (None, default_collate) and type(task.train) is TensorDataset
        self._tensors = task.train.tensors if whole and self._make_batch is None else None

    @property
    def is_global_free(self) -> bool:
        """Whether fetching draws from no process-global generator, and so may run in a thread.

        True for a plain ``TensorDataset`` and for ``make_batch``, unless the task has a sampler:
        a sampler is called under the global generators, seeded for it.
        """
        own = self._tensors is not None or self._make_batch is not None
        return own and self._task.sampler is None

    @property
    def is_cheap(self) -> bool:
        """Whether fetching is a mere indexing of tensors, which to prefetch would gain nothing."""
        return self._tensors is not None

    def indices(self, mini_batch: int) -> list[int]:
        """Sample indices of a mini-batch, in order."""
        picked: list[int] = self._pick(mini_batch).tolist()
        return picked

    def fetch(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
        """Fetch and collate a mini-batch under its own random stream.

        Returns:
            The batch, on the CPU, and its number of samples.
        """
        if self._tensors is not None:  # nothing here draws a random number
            picked = self._pick(mini_batch)
            return [torch.index_select(t, 0, picked) for t in self._tensors], len(picked)
        if self._make_batch is not None:
            picked = self._pick(mini_batch)
            seed = stream_seed(self._seed, Stream.DATA, mini_batch)
            return self._make_batch(picked, torch.Generator().manual_seed(seed)), len(picked)
        # First the indices: a sampler of the user draws from a stream of its own.
        indices = self.indices(mini_batch)
        seed_everything(self._seed, Stream.DATA, mini_batch, device)
        data = self._task.train
        if getattr(data, "__getitems__", None):
            samples = data.__getitems__(indices)
        else:
            samples = [data[i] for i in indices]
        return self._task.collate(samples), len(indices)

    def _pick(self, mini_batch: int) -> Tensor:
        epoch, position = divmod(mini_batch, self.per_epoch)
        cut = self._cut.get(epoch)
        return self._cut_epoch(epoch)[position] if cut is None else cut[position]

    def _cut_epoch(self, epoch: int) -> tuple[Tensor, ...]:
        order = self._order(epoch)
        if len(order) != self.samples_per_epoch:
            raise TaskError(
                f"sampler: expected {self.samples_per_epoch} indices as in epoch 0, got "
                f"{len(order)} for epoch {epoch}"
            )
        cut = self._cut[epoch] = torch.split(order, self._batch_size)
        while len(self._cut) > _REMEMBERED:
            del self._cut[min(self._cut)]
        return cut

    def _order(self, epoch: int) -> Tensor:
        seed = stream_seed(self._seed, Stream.ORDER, epoch)
        if self._task.sampler is None:
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(self._task.train), generator=generator)
        else:
            seed_everything(self._seed, Stream.ORDER, epoch, torch.device("cpu"))
            order = torch.tensor([int(i) for i in self._task.sampler(epoch)], dtype=torch.int64)
        return order
