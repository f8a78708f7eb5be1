"""How a protocol spends time: its updates and their staleness, without any gradient.

The law of this file: fed the same delays, the updates are those that the coordinator makes in
virtual time, at the same times to the last bit, of contributions as stale; only faster. That holds
for learners that are there from the start and never fail, and for mini-batches that never run out:
the last updates of a finite run, which wait for less, are not simulated.

Memory grows with P and K, not with the number of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS, Protocol
from gruppetto.protocols.bounded import UNBOUNDED
from gruppetto.theory.timing_bounded import BoundedCell
from gruppetto.theory.timing_draws import BLOCK, Delays, Floats, Integers, Ring, Rounds

if TYPE_CHECKING:
    from gruppetto.theory import timing_python

__all__ = [
    "Delays",
    "Timing",
    "UpdateBlock",
    "check_simulated",
    "simulate",
    "simulate_counting",
    "update_blocks",
]

#: About how many jobs are simulated between two reports of progress.
_JOBS: Final = 2**18
#: Below so many jobs, plain Python is done before numba is imported.
_FEW_JOBS: Final = 500_000


@dataclass(frozen=True)
class UpdateBlock:
    """Some updates in a row."""

    #: When each was applied, seconds. Shape [updates].
    times: Floats
    #: Of each contribution, in arrival order. Shape [updates, K]; None where all are 0. Where a
    #: bound may hold updates back, they may be of more than K: rows then end in -1.
    staleness: Integers | None
    #: Seconds that learners waited for these updates, all together.
    idle: float
    #: Mini-batches that a bound cancelled, and discarded on arrival, until these updates.
    cancelled: int = 0
    discarded: int = 0
    #: Seconds that had gone into them.
    lost: float = 0.0


@dataclass(frozen=True)
class Timing:
    """What came out of a simulation."""

    #: Updates simulated.
    updates: int
    #: When the last one was applied, seconds.
    total_time: float
    #: Seconds per update.
    mean_update_time: float
    #: Over all contributions.
    mean_staleness: float
    #: The smallest that at least 95 % of the contributions do not exceed.
    p95_staleness: int
    #: The largest.
    max_staleness: int
    #: Share of the contributions with staleness 0.
    fresh_fraction: float
    #: K for every update; more where a bound holds updates back.
    mini_batches_applied: int
    #: Cancelled by these updates; what is under way after the last one is not.
    mini_batches_cancelled: int
    #: Share of the learners' time spent waiting for updates.
    idle_fraction: float
    #: Arrived too stale for the bound.
    mini_batches_discarded: int = 0
    #: Seconds of the learners that went into what a bound cancelled or discarded.
    lost_time: float = 0.0


def simulate(
    protocol: Protocol,
    delays: Delays,
    num_learners: int,
    num_updates: int,
    *,
    compiled: bool | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Timing:
    """Simulate a run without end up to an update.

    Args:
        protocol: who waits for whom.
        delays: seconds per job.
        num_learners: P.
        num_updates: how many, >= 1.
        compiled: see :func:`update_blocks`; it changes nothing but the speed.
        progress: called now and then with the updates made and the time of the last.

    Raises:
        InvalidSetting: the protocol cannot run with P learners, or a number is too small.

    >>> from gruppetto.delays import Exponential, KeyedDelays
    >>> from gruppetto.protocols import KAsync
    >>> timing = simulate(KAsync(k=5), KeyedDelays(0, Exponential(mean=1.0), {}, 20), 20, 20_000)
    >>> round(timing.mean_update_time, 2), round(timing.mean_staleness, 2), timing.p95_staleness
    (0.28, 3.0, 10)
    """
    timing, _ = simulate_counting(
        protocol, delays, num_learners, num_updates, compiled=compiled, progress=progress
    )
    return timing


def simulate_counting(
    protocol: Protocol,
    delays: Delays,
    num_learners: int,
    num_updates: int,
    *,
    compiled: bool | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[Timing, Integers]:
    """The same as :func:`simulate`, and how many contributions had each staleness.

    Returns:
        The timing, and contributions per staleness from 0 on. That has at most 20 P / K + 2
        entries: where ``max_staleness`` lies beyond, the last one is for all from there on.

    >>> from gruppetto.delays import Constant, KeyedDelays
    >>> from gruppetto.protocols import KBatchAsync
    >>> _, counts = simulate_counting(
    ...     KBatchAsync(k=2), KeyedDelays(0, Constant(value=2.0), {}, 3), 3, 4
    ... )
    >>> counts
    array([2, 6])
    """
    k = _num_to_wait(protocol, num_learners, num_updates)
    # No update makes more than the gradients under way older, so the mean is at most P / K and 5 %
    # cannot exceed twenty times that. What lies beyond is counted, not told apart.
    counts = np.zeros(20 * num_learners // k + 2, dtype=np.int64)
    done, now, idle, total, highest = 0, 0.0, 0.0, 0, 0
    applied, cancelled, discarded, lost = 0, 0, 0, 0.0
    for block in update_blocks(protocol, delays, num_learners, num_updates, compiled=compiled):
        done += len(block.times)
        now = float(block.times[-1])
        idle += block.idle
        cancelled += block.cancelled
        discarded += block.discarded
        lost += block.lost
        if block.staleness is not None:
            values = block.staleness.reshape(-1)
            if protocol.bound is not UNBOUNDED:
                values = values[values >= 0]
            applied += len(values)
            total += int(values.sum())
            highest = max(highest, int(values.max()))
            counts += np.bincount(np.minimum(values, len(counts) - 1), minlength=len(counts))
        if progress is not None:
            progress(done, now)
    if protocol.cell.cancels:
        counts[0] = applied = done * k
        cancelled = done * (num_learners - (k if protocol.cell.distinct else 1))
    at_or_below = np.cumsum(counts)
    timing = Timing(
        updates=done,
        total_time=now,
        mean_update_time=now / done,
        mean_staleness=total / applied,
        p95_staleness=int(np.searchsorted(at_or_below, 0.95 * applied)),
        max_staleness=highest,
        fresh_fraction=int(counts[0]) / applied,
        mini_batches_applied=applied,
        mini_batches_cancelled=cancelled,
        idle_fraction=idle / (num_learners * now) if now > 0 else 0.0,
        mini_batches_discarded=discarded,
        lost_time=lost,
    )
    return timing, counts[: highest + 1]


def update_blocks(
    protocol: Protocol,
    delays: Delays,
    num_learners: int,
    num_updates: int,
    *,
    compiled: bool | None = None,
) -> Iterator[UpdateBlock]:
    """The updates themselves, a block at a time.

    Args:
        protocol: who waits for whom.
        delays: seconds per job.
        num_learners: P.
        num_updates: how many, >= 1.
        compiled: by numba; None for yes where it is installed and there is enough to do. The
            updates are the same, to the last bit. k-sync has no need of it; a bound is simulated
            in plain Python.

    Raises:
        InvalidSetting: the protocol cannot run with P learners, a number is too small, or numba
            is wanted and missing.

    >>> from gruppetto.delays import Constant, KeyedDelays
    >>> from gruppetto.protocols import KBatchAsync
    >>> delays = KeyedDelays(0, Constant(value=2.0), {}, 3)
    >>> [block] = update_blocks(KBatchAsync(k=2), delays, 3, 4)
    >>> block.times
    array([2., 4., 4., 6.])
    >>> block.staleness
    array([[0, 0], [1, 1], [1, 1], [1, 1]])
    """
    k = _num_to_wait(protocol, num_learners, num_updates)
    if protocol.cell.distinct and protocol.cell.cancels:
        return _k_sync_blocks(k, delays, num_learners, num_updates)
    if protocol.bound is not UNBOUNDED:
        return _bounded_blocks(BoundedCell(protocol, Ring(delays, num_learners)), num_updates)
    jobs = num_updates * (k + num_learners if protocol.cell.cancels else k)
    cells = _cells(compiled, jobs)
    kind: Any = cells.KAsyncCell if protocol.cell.distinct else cells.KBatchAsyncCell
    if protocol.cell.cancels:
        kind = cells.KBatchSyncCell
    ring = Ring(delays, num_learners, cells.Uniforms)
    return _cell_blocks(kind(k, ring), protocol, num_learners, num_updates)


def _num_to_wait(protocol: Protocol, num_learners: int, num_updates: int) -> int:
    """K, after everything is checked."""
    for name, number in (("learners", num_learners), ("updates", num_updates)):
        if number < 1:
            raise InvalidSetting(f"{name}: expected at least 1, got {number}")
    if not isinstance(protocol, Protocol):
        raise InvalidSetting(
            f"expected a protocol, like {PROTOCOLS.format(PROTOCOLS.parse('async'))}, "
            f"got {protocol!r}"
        )
    check_simulated(protocol, num_learners)
    return protocol.num_to_wait(num_learners)


def check_simulated(protocol: Protocol, num_learners: int) -> None:
    """Refuse what no simulation can tell.

    Raises:
        InvalidSetting: the protocol cannot run with P learners, or adapts to a loss.
    """
    protocol.check(num_learners)
    if protocol.measures_every is not None:
        raise InvalidSetting(
            f"{PROTOCOLS.format(protocol)} follows the training loss, and a simulation computes no "
            "gradients; expected a protocol with a K of its own, like k-sync:k=2"
        )


def _cells(compiled: bool | None, jobs: int) -> Any:
    """The module with the cells; importing numba takes half a second."""
    if compiled is False or (compiled is None and jobs < _FEW_JOBS):
        return import_module("gruppetto.theory.timing_python")
    try:
        return import_module("gruppetto.theory.timing_compiled")
    except ImportError:
        if compiled is None:
            return import_module("gruppetto.theory.timing_python")
        raise InvalidSetting("compiled simulation needs numba; install gruppetto[fast]") from None


def _cell_blocks(
    cell: timing_python.KAsyncCell, protocol: Protocol, num_learners: int, num_updates: int
) -> Iterator[UpdateBlock]:
    each = max(cell.k, num_learners) if protocol.cell.cancels else cell.k
    step = max(1, _JOBS // each)
    idle = 0.0
    for begin in range(0, num_updates, step):
        count = min(step, num_updates - begin)
        times = np.empty(count)
        staleness: Integers | None = None
        if not protocol.cell.cancels:
            staleness = np.empty((count, cell.k), dtype=np.int64)
        cell.advance(times, staleness)
        yield UpdateBlock(times, staleness, cell.idle - idle)
        idle = cell.idle


def _bounded_blocks(cell: BoundedCell, num_updates: int) -> Iterator[UpdateBlock]:
    step = max(1, _JOBS // (4 * cell.width))
    idle, cancelled, discarded, lost = 0.0, 0, 0, 0.0
    for begin in range(0, num_updates, step):
        count = min(step, num_updates - begin)
        times, staleness = np.empty(count), np.empty((count, cell.width), dtype=np.int64)
        cell.advance(times, staleness)
        yield UpdateBlock(
            times,
            staleness,
            cell.idle - idle,
            cell.num_cancelled - cancelled,
            cell.num_discarded - discarded,
            cell.lost - lost,
        )
        idle, lost = cell.idle, cell.lost
        cancelled, discarded = cell.num_cancelled, cell.num_discarded


def _k_sync_blocks(
    k: int, delays: Delays, num_learners: int, num_updates: int
) -> Iterator[UpdateBlock]:
    """Every learner starts one job per update: its n-th job belongs to update n."""
    rounds = Rounds(delays, num_learners, k)
    # Whole blocks, and no more of them than are wanted.
    step = max(1, _JOBS // (num_learners * BLOCK)) * BLOCK
    now = 0.0
    for begin in range(0, num_updates, step):
        count = min(step, num_updates - begin)
        shortest = rounds.shortest(-(-count // BLOCK) * BLOCK)[:count]
        longest = shortest.max(axis=1)
        # One addition after the other, as a clock does.
        times = np.add.accumulate(np.concatenate(([now], longest)))[1:]
        now = float(times[-1])
        yield UpdateBlock(times, None, float((longest[:, None] - shortest).sum()))
