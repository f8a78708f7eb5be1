"""The three protocols that are simulated event by event, in plain Python and numpy.

Each class is one cell of the table in :mod:`gruppetto.protocols.collect`, for P learners that are
there from the start, never fail and never run out of mini-batches. :mod:`.timing_compiled` says
the same in another form; both give the same numbers, to the last bit.

Jobs that end at the same time are delivered in lease order. After an update its contributors
lease first, then the others, each in the order of their numbers.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from gruppetto.theory.timing_draws import Ring, Uniforms

__all__ = ["Cell", "KAsyncCell", "KBatchAsyncCell", "KBatchSyncCell", "Uniforms"]


class Cell:
    """P learners and an update of K contributions."""

    def __init__(self, k: int, ring: Ring) -> None:
        self.k = k
        #: Seconds that learners have waited for updates, all together.
        self.idle = 0.0
        self._ring = ring
        self._num_learners = len(ring.started)
        self._time = 0.0
        # Single numbers are read and written faster through a memoryview.
        self._delays = ring.delays.reshape(-1).data
        self._started = ring.started.data
        self._filled = ring.filled.data
        self._size, self._stride = ring.size, ring.delays.shape[1]

    def _draw(self, learner: int) -> float:
        n = self._started[learner]
        if n == self._filled[learner]:
            self._ring.refill()
        self._started[learner] = n + 1
        seconds: float = self._delays[learner * self._stride + n % self._size]
        return seconds


class KBatchSyncCell(Cell):
    """K mini-batches of this version; a finisher starts another, the rest is cancelled."""

    def __init__(self, k: int, ring: Ring) -> None:
        super().__init__(k, ring)
        self._contributors: set[int] = set()

    def advance(
        self, times: npt.NDArray[np.float64], staleness: npt.NDArray[np.int64] | None
    ) -> None:
        """Go on for as many updates as there is room for."""
        for update in range(len(times)):
            times[update] = self._round()

    def _round(self) -> float:
        heap = self._first_jobs()
        lease = 2 * self._num_learners
        contributors = set()
        for _ in range(self.k - 1):
            end, _, learner = heap[0]
            contributors.add(learner)
            heapq.heapreplace(heap, (end + self._draw(learner), lease, learner))
            lease += 1
        self._time, _, learner = heap[0]
        contributors.add(learner)
        self._contributors = contributors
        return self._time

    def _first_jobs(self) -> list[tuple[float, int, int]]:
        """All that end no later than K of them do."""
        ring = self._ring
        if (ring.started == ring.filled).any():
            ring.refill()
        ends = self._time + ring.delays[np.arange(self._num_learners), ring.started % ring.size]
        ring.started += 1
        heap = []
        bound = np.partition(ends, self.k - 1)[self.k - 1] if self.k < len(ends) else np.inf
        for learner in np.flatnonzero(ends <= bound).tolist():
            # Leases in order: contributors to the last update, the others.
            order = learner if learner in self._contributors else self._num_learners + learner
            heap.append((ends.item(learner), order, learner))
        heapq.heapify(heap)
        return heap


class _GoingOnCell(Cell):
    """Nobody is cancelled: who works on which version is remembered from update to update."""

    def __init__(self, k: int, ring: Ring) -> None:
        super().__init__(k, ring)
        self._version = 0
        self._agenda = [(self._draw(p), p, p, 0) for p in range(self._num_learners)]
        heapq.heapify(self._agenda)
        self._next_lease = self._num_learners


class KAsyncCell(_GoingOnCell):
    """K distinct learners, who wait for the update; the rest goes on and arrives late."""

    def advance(
        self, times: npt.NDArray[np.float64], staleness: npt.NDArray[np.int64] | None
    ) -> None:
        """Go on for as many updates as there is room for; staleness is [updates, K]."""
        assert staleness is not None
        agenda, k, now = self._agenda, self.k, self._time
        for update in range(len(times)):
            held = [heapq.heappop(agenda) for _ in range(k)]
            now = held[-1][0]
            for end, *_ in held:
                self.idle += now - end
            times[update] = now
            staleness[update] = [self._version - version for *_, version in held]
            self._version += 1
            for learner in sorted([learner for _, _, learner, _ in held]):
                end = now + self._draw(learner)
                heapq.heappush(agenda, (end, self._next_lease, learner, self._version))
                self._next_lease += 1
        self._time = now


class KBatchAsyncCell(_GoingOnCell):
    """K mini-batches; a finisher starts another at once, nobody waits or is cancelled."""

    def advance(
        self, times: npt.NDArray[np.float64], staleness: npt.NDArray[np.int64] | None
    ) -> None:
        """Go on for as many updates as there is room for; staleness is [updates, K]."""
        assert staleness is not None
        agenda, k = self._agenda, self.k
        version, lease = self._version, self._next_lease
        for update in range(len(times)):
            held = []
            newest = version
            for i in range(k):
                end, _, learner, used = agenda[0]
                held.append(version - used)
                if i == k - 1:
                    newest = version + 1
                heapq.heapreplace(agenda, (end + self._draw(learner), lease, learner, newest))
                lease += 1
            times[update] = end
            staleness[update] = held
            version = newest
        self._version, self._next_lease = version, lease
