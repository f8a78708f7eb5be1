"""The same three protocols as in :mod:`.timing_python`, compiled by numba; needs gruppetto[fast].

Every loop runs until its block of updates is full or a learner is out of draws; it changes nothing
before it knows that the draws are there, so that it can be entered again after a refill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from gruppetto.theory.timing_draws import Floats, Integers, Ring
from gruppetto.theory.uniforms_compiled import Uniforms, compiled

__all__ = ["KAsyncCell", "KBatchAsyncCell", "KBatchSyncCell", "Uniforms"]

# ------------------------------------------------------- the agenda, a heap
# Ordered by (end, lease); parallel arrays, of which the first ``size`` entries count.


@compiled
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


@compiled
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


@compiled
def _order(ends: Floats, leases: Integers, learners: Integers, size: int) -> None:
    """Make the first ``size`` entries a heap."""
    for at in range(size // 2 - 1, -1, -1):
        _sink(ends, leases, learners, size, at, ends[at], leases[at], learners[at])


#: Ciura, "Best increments for the average case of shellsort", 2001.
_GAPS: Final = (701, 301, 132, 57, 23, 10, 4, 1)


@compiled
def _sort(ends: Floats, leases: Integers, learners: Integers, size: int) -> None:
    """Bring the first ``size`` entries in order; for few of them faster than a heap."""
    for gap in _GAPS:
        if 8 * gap > size and gap > 1:
            continue
        for begin in range(gap, size):
            end, lease, learner = ends[begin], leases[begin], learners[begin]
            at = begin
            while at >= gap and (
                ends[at - gap] > end or (ends[at - gap] == end and leases[at - gap] > lease)
            ):
                before = at - gap
                ends[at], leases[at], learners[at] = ends[before], leases[before], learners[before]
                at = before
            ends[at], leases[at], learners[at] = end, lease, learner


# ------------------------------------------------------------- the protocols
# ``state`` holds what single numbers a loop must remember; see _STATE.

#: Updates of this block, contributions held, server version, next lease, entries of the agenda.
#: Where rounds are simulated, how many of their first jobs have ended in place of the version, and
#: how many of these matter.
_STATE: Final = 6
#: Few rounds take more than so many times as long as those before.
_LONGER: Final = 1.6
#: What the newest round counts in how long rounds take.
_NEWEST: Final = 0.25


@compiled
def _k_batch_sync(
    k: int, mask: int, delays: Floats, started: Integers, filled: Integers,
    ends: Floats, leases: Integers, learners: Integers, state: Integers, clock: Floats,
    first_ends: Floats, first_leases: Integers, first_learners: Integers,
    is_contributor: npt.NDArray[np.bool_], times: Floats,
) -> None:  # fmt: skip
    num_learners = len(started)
    while state[0] < len(times):
        if state[5] == 0:  # a round begins: everybody gets work
            for p in range(num_learners):
                if started[p] == filled[p]:
                    return
            # Only the K that end first matter: those of about as long as rounds take, or all, if
            # they are too few.
            now = clock[0]
            clock[3] = now + _LONGER * clock[2]
            size = 0
            for p in range(num_learners):
                end = now + delays[p, started[p] & mask]
                started[p] += 1
                # Written in any case and kept if it counts: a branch would be guessed wrong.
                first_ends[size], first_learners[size] = end, p
                size += end <= clock[3]
            if size < k:
                clock[3] = np.inf
                size = num_learners
                for p in range(num_learners):
                    end = now + delays[p, (started[p] - 1) & mask]
                    first_ends[p], first_learners[p] = end, p
            for at in range(size):
                # Leases in order: contributors to the last update, the others.
                p = first_learners[at]
                first_leases[at] = p if is_contributor[p] else num_learners + p
            is_contributor[:] = False
            _sort(first_ends, first_leases, first_learners, size)
            state[1], state[2], state[3], state[4], state[5] = 0, 0, 2 * num_learners, 0, size
        num_held, at, lease, size, num_first = state[1], state[2], state[3], state[4], state[5]
        while True:
            # What began with the round is in order; what finishers took up is on the agenda.
            is_first = size == 0 or (at < num_first and first_ends[at] <= ends[0])
            learner, end = learners[0], ends[0]
            if is_first:
                learner, end = first_learners[at], first_ends[at]
            n = started[learner]
            if num_held + 1 == k or n == filled[learner]:
                break
            started[learner] = n + 1
            is_contributor[learner] = True
            num_held += 1
            following = end + delays[learner, n & mask]
            counts = following <= clock[3]
            if is_first:
                at += 1
                if counts:
                    _rise(ends, leases, learners, size, following, lease, learner)
                    size += 1
            elif counts:
                _sink(ends, leases, learners, size, 0, following, lease, learner)
            else:
                size -= 1
                _sink(ends, leases, learners, size, 0, ends[size], leases[size], learners[size])
            lease += 1
        state[1], state[2], state[3], state[4] = num_held, at, lease, size
        if num_held + 1 < k:
            return
        is_contributor[learner] = True
        clock[2] += _NEWEST * (end - clock[0] - clock[2])
        clock[0] = times[state[0]] = end
        state[0] += 1
        state[5] = 0


@compiled
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


@compiled
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
        #: The last update; seconds waited; seconds that rounds take; what ends later does not
        #: count in this round.
        self._clock: Floats = np.zeros(4)
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
        num = len(ring.started)
        self._first = np.zeros(num), np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int64)
        self._is_contributor = np.zeros(num, dtype=np.bool_)

    def advance(self, times: Floats, staleness: Integers | None) -> None:
        """Go on for as many updates as there is room for."""
        self._run(len(times), lambda: _k_batch_sync(
            self.k, *self._draws, *self._agenda, self._clock, *self._first, self._is_contributor,
            times,
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
