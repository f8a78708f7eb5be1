"""Where a learner gets its mini-batches from: read ahead while it computes or sleeps.

* Whole tensors indexed in memory cost less than any hand-over: read on the spot.
* A dataset that makes batches with a generator of its own is read by a thread.
* Everything else, any dataset of a user, is read by a process (:mod:`.loader`), because samples
  are drawn under the process-wide generators, and a thread would disturb those of dropout.

All give the same samples: what a mini-batch holds depends on its number alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from gruppetto.engines.local.loader import LoaderProcess, Request
from gruppetto.training.mini_batches import MiniBatches

__all__ = ["Reader", "open_reader"]


class Reader(ABC):
    """Reads mini-batches, if it can before they are asked for."""

    def __init__(self) -> None:
        #: Seconds that the newest :meth:`fetch` waited.
        self.waited = 0.0

    def expect(self, mini_batch: int, following: int) -> None:
        """A mini-batch will be fetched, then perhaps another one (-1: nothing is known)."""
        return  # whoever cannot read ahead has nothing to do

    def fetch(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
        """The batch, on the CPU, and its number of samples.

        Raises:
            Exception: whatever the user's data raises.
        """
        started = time.perf_counter()
        try:
            return self._get(mini_batch, device)
        finally:
            self.waited = time.perf_counter() - started

    def close(self) -> None:
        """Nothing more is read."""
        return  # whoever has opened nothing has nothing to do

    @abstractmethod
    def _get(self, mini_batch: int, device: torch.device) -> tuple[Any, int]: ...


class _OnTheSpot(Reader):
    def __init__(self, mini_batches: MiniBatches) -> None:
        super().__init__()
        self._mini_batches = mini_batches

    def _get(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
        return self._mini_batches.fetch(mini_batch, device)


class _InThread(Reader):
    """One thread reads what is expected, in order."""

    def __init__(self, mini_batches: MiniBatches) -> None:
        super().__init__()
        self._mini_batches = mini_batches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gruppetto-loader")
        self._under_way: dict[int, Future[tuple[Any, int]]] = {}

    def expect(self, mini_batch: int, following: int) -> None:
        # What was reserved and then taken by another learner is forgotten.
        before = self._under_way
        wanted = [n for n in (mini_batch, following) if n >= 0]
        for n, future in before.items():
            if n not in wanted:
                future.cancel()
        self._under_way = {n: before[n] if n in before else self._start(n) for n in wanted}

    def _start(self, mini_batch: int) -> Future[tuple[Any, int]]:
        return self._thread.submit(self._mini_batches.fetch, mini_batch, torch.device("cpu"))

    def _get(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
        return self._under_way.pop(mini_batch).result()


class _InProcess(Reader):
    """One process reads what is expected, in order, into one of two blocks."""

    def __init__(self, mini_batches: MiniBatches) -> None:
        super().__init__()
        self._loader = LoaderProcess(mini_batches)
        self._under_way: dict[int, Request] = {}

    def close(self) -> None:
        self._loader.close()

    def expect(self, mini_batch: int, following: int) -> None:
        before = self._under_way
        current = before.get(mini_batch)
        if current is None:
            # Not into the block of one that was read ahead and may still be wanted.
            after = before.get(following)
            current = self._loader.request(mini_batch, 0 if after is None else 1 - after.block)
        self._under_way = {mini_batch: current}
        if following >= 0:
            after = before.get(following)
            # The block of the current one is in use until the next order comes.
            if after is None or after.block == current.block:
                after = self._loader.request(following, 1 - current.block)
            self._under_way[following] = after
        self._loader.forget_others(self._under_way.values())

    def _get(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
        return self._loader.receive(self._under_way.pop(mini_batch))


def open_reader(mini_batches: MiniBatches) -> Reader:
    """The reader for a run's data; call it before anything is computed, it may fork."""
    if mini_batches.is_cheap:
        return _OnTheSpot(mini_batches)
    if mini_batches.is_global_free:
        return _InThread(mini_batches)
    return _InProcess(mini_batches)
