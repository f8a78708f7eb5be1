"""The asynchronous protocols with a bound, simulated event by event in plain Python.

As in :mod:`.timing_python`, for P learners that are there from the start, never fail and never run
out of mini-batches. Who may fire, start or go on is decided here once more, apart from
:mod:`gruppetto.protocols.bounded`; both give the same updates, to the last bit.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
import numpy.typing as npt

from gruppetto.protocols.bounded import (
    ClockBound,
    DiscardBound,
    RestartBound,
    WaitBound,
    in_time,
)
from gruppetto.protocols.collect import Protocol
from gruppetto.theory.timing_draws import Ring
from gruppetto.theory.timing_python import Cell

__all__ = ["BoundedCell"]

_NOT_THERE: Final = -1


class BoundedCell(Cell):
    """K contributions, of distinct learners or not, under a bound.

    Args:
        protocol: one with a bound.
        ring: the delays.
    """

    def __init__(self, protocol: Protocol, ring: Ring) -> None:
        super().__init__(protocol.num_to_wait(len(ring.started)), ring)
        self._distinct = protocol.cell.distinct
        self._bound = protocol.bound
        #: Contributions of an update at most: more than K where updates are held back.
        self.width = self.k
        if isinstance(self._bound, WaitBound):
            self.width *= self._bound.s + 1
        self.num_cancelled = 0
        self.num_discarded = 0
        #: Seconds that went into what was cancelled or discarded.
        self.lost = 0.0
        self._version = 0
        self._next_lease = 0
        #: (end, lease, learner); those of cancelled leases stay until they are due.
        self._agenda: list[tuple[float, int, int]] = []
        #: learner -> (lease, version, start) of what it computes.
        self._work: dict[int, tuple[int, int, float]] = {}
        #: (learner, version) of what has arrived for the next update.
        self._held: list[tuple[int, int]] = []
        #: learner -> since when it is without work, and the sum of what is over.
        self._free = dict.fromkeys(range(self._num_learners), 0.0)
        self._idle_before = 0.0
        self._clocks = [0] * self._num_learners
        for learner in range(self._num_learners):  # they join one after the other
            self._give_work([learner])

    def advance(
        self, times: npt.NDArray[np.float64], staleness: npt.NDArray[np.int64] | None
    ) -> None:
        """Go on for as many updates as there is room for.

        Args:
            times: of the updates; shape [updates].
            staleness: of their contributions, then -1; shape [updates, width].
        """
        assert staleness is not None
        staleness[:] = _NOT_THERE
        for update in range(len(times)):
            found = self._update()
            times[update] = self._time
            staleness[update, : len(found)] = found
        waiting = sum(self._time - since for since in self._free.values())
        self.idle = self._idle_before + waiting

    def _update(self) -> list[int]:
        """Events up to the next update; staleness of its contributions."""
        while True:
            self._time, lease, learner = heapq.heappop(self._agenda)
            if self._work.get(learner, (_NOT_THERE,))[0] != lease:
                continue  # cancelled meanwhile
            _, version, start = self._work.pop(learner)
            self._free[learner] = self._time
            bound = self._bound
            if isinstance(bound, DiscardBound) and self._version - version > bound.s:
                self.num_discarded += 1
                self.lost += self._time - start
                self._give_work([*sorted(self._free.keys() - {learner}), learner])
                continue
            self._held.append((learner, version))
            if len(self._held) >= self.k and self._may_fire():
                return self._fire()
            self._give_work(sorted(self._free))

    def _may_fire(self) -> bool:
        if not isinstance(self._bound, WaitBound):
            return True
        under_way = [version for _, version, _ in self._work.values()]
        return in_time(under_way, self._version + 1, self.k, self._bound.s)

    def _fire(self) -> list[int]:
        found = [self._version - version for _, version in self._held]
        contributors = {learner for learner, _ in self._held}
        for learner, _ in self._held:
            self._clocks[learner] += 1
        self._held.clear()
        self._version += 1
        if isinstance(self._bound, RestartBound):
            oldest = self._version - self._bound.s
            late = [n for n, (_, version, _) in self._work.items() if version < oldest]
            for learner in late:
                self.lost += self._time - self._work.pop(learner)[2]
                self._free[learner] = self._time
            self.num_cancelled += len(late)
        self._give_work(sorted(self._free, key=lambda n: (n not in contributors, n)))
        return found

    def _give_work(self, learners: list[int]) -> None:
        waiting = {learner for learner, _ in self._held} if self._distinct else set()
        for learner in learners:
            if learner in waiting or not self._may_start(learner):
                continue
            self._idle_before += self._time - self._free.pop(learner)
            self._work[learner] = self._next_lease, self._version, self._time
            end = self._time + self._draw(learner)
            heapq.heappush(self._agenda, (end, self._next_lease, learner))
            self._next_lease += 1

    def _may_start(self, learner: int) -> bool:
        if isinstance(self._bound, ClockBound):
            return self._clocks[learner] - min(self._clocks) <= self._bound.s
        if not isinstance(self._bound, WaitBound):
            return True
        versions = [version for _, version, _ in self._work.values()]
        versions += [version for _, version in self._held]
        return in_time([*versions, self._version], self._version, self.k, self._bound.s)
