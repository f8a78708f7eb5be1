"""The same three protocols as in :mod:`.timing_python`, compiled by numba; needs gruppetto[fast].

Every loop runs until its block of updates is full or a learner is out of draws; it changes nothing
before it knows that the draws are there, so that it can be entered again after a refill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from gruppetto.theory.timing_draws import Floats, Integers, Ring

__all__ = ["KAsyncCell", "KBatchAsyncCell", "KBatchSyncCell"]

F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    try:
        return cast(F, njit(cache=True)(function))
    except RuntimeError:  # there is no folder to keep compiled code in
        return cast(F, njit(function))


# ------------------------------------------------------- the agenda, a heap
# Ordered by (end, lease); parallel arrays, of which the first ``size`` entries count.


@_compiled
def _sink(
    ends: Floats, leases: Integers, learners: Integers, size: int, at: int,
    end: float, lease: int, learner: int,
) -> None:  # fmt: skip
    """Put an entry into the hole at ``at`` or below."""
    child = 2 * at + 1
    while child < size:
        right = child + 1
        if right < size and (
            ends[right] < ends[child]
            or (ends[right] == ends[child] and leases[right] < leases[child])
        ):
            child = right
        if end < ends[child] or (end == ends[child] and lease < leases[child]):
            break
        ends[at], leases[at], learners[at] = ends[child], leases[child], learners[child]
        at = child
        child = 2 * at + 1
    ends[at], leases[at], learners[at] = end, lease, learner


@_compiled
def _rise(
    ends: Floats, leases: Integers, learners: Integers, at: int,
    end: float, lease: int, learner: int,
) -> None:  # fmt: skip
    """Put an entry into the hole at ``at`` or above."""
    while at > 0:
        parent = (at - 1) // 2
        if ends[parent] < end or (ends[parent] == end and leases[parent] < lease):
            break
        ends[at], leases[at], learners[at] = ends[parent], leases[parent], learners[parent]
        at = parent
    ends[at], leases[at], learners[at] = end, lease, learner


@_compiled
def _order(ends: Floats, leases: Integers, learners: Integers, size: int) -> None:
    """Make the first ``size`` entries a heap."""
    for at in range(size // 2 - 1, -1, -1):
        _sink(ends, leases, learners, size, at, ends[at], leases[at], learners[at])


# ------------------------------------------------------------- the protocols
# ``state`` holds what single numbers a loop must remember; see _STATE.

#: Updates of this block, contributions held, server version, next lease, entries of the agenda.
_STATE: Final = 5
#: Few rounds take more than so many times as long as the one before.
_LONGER: Final = 1.5


@_compiled
def _k_batch_sync(
    k: int, mask: int, delays: Floats, started: Integers, filled: Integers,
    ends: Floats, leases: Integers, learners: Integers, state: Integers, clock: Floats,
    is_contributor: npt.NDArray[np.bool_], times: Floats,
) -> None:  # fmt: skip
    num_learners = len(started)
    while state[0] < len(times):
        if state[4] == 0:  # a round begins: everybody gets work
            for p in range(num_learners):
                if started[p] == filled[p]:
                    return
            # Only the K that end first matter: those of about as long as the last round took, or
            # all, if they are too few.
            latest = clock[0] + _LONGER * clock[2]
            size = 0
            for p in range(num_learners):
                end = clock[0] + delays[p, started[p] & mask]
                if end <= latest:
                    ends[size], learners[size] = end, p
                    size += 1
            if size < k:
                size = num_learners
                for p in range(num_learners):
                    ends[p], learners[p] = clock[0] + delays[p, started[p] & mask], p
            for at in range(size):
                # Leases in order: contributors to the last update, the others.
                p = learners[at]
                leases[at] = p if is_contributor[p] else num_learners + p
            for p in range(num_learners):
                started[p] += 1
                is_contributor[p] = False
            _order(ends, leases, learners, size)
            state[1], state[3], state[4] = 0, 2 * num_learners, size
        learner, end = learners[0], ends[0]
        if state[1] + 1 == k:
            is_contributor[learner] = True
            clock[2] = end - clock[0]
            clock[0] = times[state[0]] = end
            state[0] += 1
            state[4] = 0
            continue
        n = started[learner]
        if n == filled[learner]:
            return
        started[learner] = n + 1
        is_contributor[learner] = True
        end += delays[learner, n & mask]
        _sink(ends, leases, learners, state[4], 0, end, state[3], learner)
        state[1] += 1
        state[3] += 1


@_compiled
def _k_async(
    k: int, mask: int, delays: Floats, started: Integers, filled: Integers,
    ends: Floats, leases: Integers, learners: Integers, state: Integers, clock: Floats,
    versions: Integers, held: Integers, held_ends: Floats, times: Floats, staleness: Integers,
) -> None:  # fmt: skip
    while state[0] < len(times):
        size = state[4]
        while state[1] < k:
            held[state[1]], held_ends[state[1]] = learners[0], ends[0]
            state[1] += 1
            size -= 1
            _sink(ends, leases, learners, size, 0, ends[size], leases[size], learners[size])
        state[4] = size
        for i in range(k):
            if started[held[i]] == filled[held[i]]:
                return
        now = held_ends[k - 1]
        for i in range(k):
            clock[1] += now - held_ends[i]
            staleness[state[0], i] = state[2] - versions[held[i]]
        times[state[0]] = now
        state[0] += 1
        state[2] += 1
        held.sort()
        for i in range(k):
            p = held[i]
            end = now + delays[p, started[p] & mask]
            started[p] += 1
            versions[p] = state[2]
            _rise(ends, leases, learners, size, end, state[3], p)
            state[3] += 1
            size += 1
        state[1], state[4] = 0, size


@_compiled
def _k_batch_async(
    k: int, mask: int, delays: Floats, started: Integers, filled: Integers,
    ends: Floats, leases: Integers, learners: Integers, state: Integers,
    versions: Integers, times: Floats, staleness: Integers,
) -> None:  # fmt: skip
    num_learners = len(started)
    update, num_held, version, lease = state[0], state[1], state[2], state[3]
    while update < len(times):
        learner, end = learners[0], ends[0]
        n = started[learner]
        if n == filled[learner]:
            break
        started[learner] = n + 1
        # Nothing is applied between its push and this update: staleness is known now.
        staleness[update, num_held] = version - versions[learner]
        num_held += 1
        if num_held == k:
            times[update] = end
            update += 1
            num_held = 0
            version += 1
        versions[learner] = version
        end += delays[learner, n & mask]
        _sink(ends, leases, learners, num_learners, 0, end, lease, learner)
        lease += 1
    state[0], state[1], state[2], state[3] = update, num_held, version, lease


class _Cell:
    """P learners and an update of K contributions."""

    def __init__(self, k: int, ring: Ring) -> None:
        self.k = k
        self._ring = ring
        num = len(ring.started)
        self._ends: Floats = np.zeros(num)
        self._leases: Integers = np.zeros(num, dtype=np.int64)
        self._learners: Integers = np.zeros(num, dtype=np.int64)
        self._state: Integers = np.zeros(_STATE, dtype=np.int64)
        #: The last update; seconds waited; seconds from the update before the last.
        self._clock: Floats = np.zeros(3)
        self._draws = (ring.size - 1, ring.delays, ring.started, ring.filled)
        self._agenda = (self._ends, self._leases, self._learners, self._state)

    @property
    def idle(self) -> float:
        """Seconds that learners have waited for updates, all together."""
        return float(self._clock[1])

    def _begin(self) -> None:
        """Everybody gets work at time 0."""
        num = len(self._leases)
        self._ends[:] = self._ring.delays[:, 0]
        self._ring.started[:] = 1
        self._leases[:] = self._learners[:] = np.arange(num)
        self._state[3] = self._state[4] = num
        _order(self._ends, self._leases, self._learners, num)

    def _run(self, room: int, loop: Callable[[], None]) -> None:
        self._state[0] = 0
        loop()
        while self._state[0] < room:
            self._ring.refill()
            loop()


class KBatchSyncCell(_Cell):
    """K mini-batches of this version; a finisher starts another, the rest is cancelled."""

    def __init__(self, k: int, ring: Ring) -> None:
        super().__init__(k, ring)
        self._is_contributor = np.zeros(len(ring.started), dtype=np.bool_)

    def advance(self, times: Floats, staleness: Integers | None) -> None:
        """Go on for as many updates as there is room for."""
        self._run(len(times), lambda: _k_batch_sync(
            self.k, *self._draws, *self._agenda, self._clock, self._is_contributor, times
        ))  # fmt: skip


class KAsyncCell(_Cell):
    """K distinct learners, who wait for the update; the rest goes on and arrives late."""

    def __init__(self, k: int, ring: Ring) -> None:
        super().__init__(k, ring)
        self._versions: Integers = np.zeros(len(ring.started), dtype=np.int64)
        self._held: Integers = np.zeros(k, dtype=np.int64)
        self._held_ends: Floats = np.zeros(k)
        self._begin()

    def advance(self, times: Floats, staleness: Integers | None) -> None:
        """Go on for as many updates as there is room for; staleness is [updates, K]."""
        assert staleness is not None
        self._run(len(times), lambda: _k_async(
            self.k, *self._draws, *self._agenda, self._clock, self._versions, self._held,
            self._held_ends, times, staleness,
        ))  # fmt: skip


class KBatchAsyncCell(_Cell):
    """K mini-batches; a finisher starts another at once, nobody waits or is cancelled."""

    def __init__(self, k: int, ring: Ring) -> None:
        super().__init__(k, ring)
        self._versions: Integers = np.zeros(len(ring.started), dtype=np.int64)
        self._begin()

    def advance(self, times: Floats, staleness: Integers | None) -> None:
        """Go on for as many updates as there is room for; staleness is [updates, K]."""
        assert staleness is not None
        self._run(len(times), lambda: _k_batch_async(
            self.k, *self._draws, *self._agenda, self._versions, times, staleness
        ))  # fmt: skip
