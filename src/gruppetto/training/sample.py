"""A fixed sample of the training set, for measurements that are repeated during a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.randomness import Stream, seed_everything, stream_seed
from gruppetto.training.task import Task, batch_maker, to_device

__all__ = ["FixedSample"]

#: Samples of one batch.
_BATCH: Final = 256


class FixedSample:
    """The same min(size, N) of the N training samples, in the same batches, each time.

    They are drawn from those of epoch 0 by a stream of their own, and fetched anew each time under
    the same seeds, so that augmentation is the same each time; datasets with ``make_batch`` do
    not augment here. The global random numbers are changed: see :func:`keep_global_randomness`.

    Args:
        task: whose training data it is.
        mini_batches: of the run.
        size: samples, at most.
        seed: the run's.
        stream: random numbers of the sample (n = 0) and of its batches (n = 1, 2, ...).
        device: where batches are wanted.
    """

    def __init__(
        self,
        task: Task,
        mini_batches: MiniBatches,
        size: int,
        seed: int,
        stream: Stream,
        device: torch.device,
    ) -> None:
        self._task = task
        self._seed = seed
        self._stream = stream
        self._device = device
        epoch = [i for b in range(mini_batches.per_epoch) for i in mini_batches.indices(b)]
        # A sampler of the user may give an index twice, or leave some out.
        population = torch.tensor(sorted(set(epoch)), dtype=torch.int64)
        generator = torch.Generator().manual_seed(stream_seed(seed, stream, 0))
        order = torch.randperm(len(population), generator=generator)[:size]
        #: Indices of the samples, shape [min(size, N)].
        self.indices = population[order]

    def __len__(self) -> int:
        return len(self.indices)

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Number of samples and batch, one after the other; what is drawn next has its own seed."""
        for number, picked in enumerate(torch.split(self.indices, _BATCH)):
            seed_everything(self._seed, self._stream, 1 + number, self._device)
            yield len(picked), to_device(self._fetch(picked), self._device)

    def _fetch(self, picked: Tensor) -> Any:
        data = self._task.train
        make_batch = batch_maker(self._task, data)
        if make_batch is not None:
            return make_batch(picked, None)
        indices = picked.tolist()
        if getattr(data, "__getitems__", None):
            return self._task.collate(data.__getitems__(indices))
        return self._task.collate([data[i] for i in indices])
