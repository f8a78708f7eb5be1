"""Every mini-batch's story: to do -> leased -> pushed -> applied; none lost, none twice.

The law of this file: a mini-batch number is in exactly one place at any time,

    to do (new, returned or reserved) | leased | pushed | applied | given up | dropped

and only the methods below move it. Mini-batch b belongs to epoch b // batches_per_epoch and the
lowest number is leased first, so an epoch cannot trail. Nothing here knows about versions'
meaning, protocols or learners' health.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

__all__ = ["Lease", "Ledger", "OnLate"]

OnLate = Literal["requeue", "drop"]


@dataclass(frozen=True, slots=True)
class Lease:
    """One piece of work: this mini-batch, by this learner, on this version."""

    number: int
    learner: int
    mini_batch: int
    version: int


class Ledger:
    """Mini-batches and leases.

    Args:
        num_mini_batches: mini-batches of the whole run; None for no end.
        on_late: what is cancelled, discarded or lost goes back (``requeue``) or is counted and
            forgotten (``drop``).
        max_attempts: a mini-batch that itself failed this often is given up.
    """

    def __init__(
        self,
        num_mini_batches: int | None,
        *,
        on_late: OnLate = "requeue",
        max_attempts: int = 3,
    ) -> None:
        self.num_mini_batches = num_mini_batches
        self.on_late = on_late
        self.max_attempts = max_attempts
        #: Open leases, by number.
        self.leased: dict[int, Lease] = {}
        #: Leases closed by their push and not applied yet, in arrival order.
        self.pushed: dict[int, Lease] = {}
        self.num_applied = 0
        self.num_given_up = 0
        self.num_dropped = 0
        #: Numbers from here on were never leased nor reserved.
        self._next_new = 0
        #: Numbers below _next_new that were reserved only, never leased.
        self._fresh: set[int] = set()
        self._next_lease = 0
        #: Heap of unreserved numbers below _next_new that are to do.
        self._returned: list[int] = []
        #: learner -> the number it takes next.
        self._reserved: dict[int, int] = {}
        self._failures: dict[int, int] = {}

    # -------------------------------------------------------------- looking

    @property
    def num_to_do(self) -> float:
        """Mini-batches to do, reserved ones included; infinite for a run without end."""
        if self.num_mini_batches is None:
            return float("inf")
        new = self.num_mini_batches - self._next_new
        return new + len(self._returned) + len(self._reserved)

    @property
    def num_ever_leased(self) -> int:
        """Different mini-batches leased so far, however often each."""
        return self._next_new - len(self._fresh)

    @property
    def num_settled(self) -> int:
        """Mini-batches that will not be worked on again: applied, given up or dropped."""
        return self.num_applied + self.num_given_up + self.num_dropped

    @property
    def num_left(self) -> int:
        """Mini-batches neither applied, given up nor dropped; of those ever leased, if no end."""
        total = self.num_mini_batches
        if total is None:
            total = self.num_ever_leased
        return total - self.num_settled

    def was_given(self, lease: int) -> bool:
        """Whether this lease number has ever been handed out."""
        return 0 <= lease < self._next_lease

    def is_finished(self) -> bool:
        """Whether every mini-batch is applied, given up or dropped."""
        return self.num_left == 0 and self.num_mini_batches is not None

    # --------------------------------------------------------------- moving

    def lease(self, learner: int, version: int, avoid: int | None = None) -> Lease | None:
        """Lease the learner's reserved mini-batch, else the lowest unreserved one, else the
        lowest reserved one. None when nothing is to do.

        ``avoid`` has just failed on this learner: it is neither leased nor reserved while there
        is anything else, so that it is tried at another time, perhaps by another learner.
        """
        mini_batch = self._take(learner, avoid)
        if mini_batch is None:
            return None
        self._fresh.discard(mini_batch)
        lease = Lease(self._next_lease, learner, mini_batch, version)
        self._next_lease += 1
        self.leased[lease.number] = lease
        return lease

    def reserve(self, learner: int, avoid: int | None = None) -> int | None:
        """Reserve the lowest unreserved mini-batch for a learner that has just leased one."""
        reserved = self._lowest_unreserved(avoid)
        if reserved is not None:
            self._reserved[learner] = reserved
        return reserved

    def push(self, lease: int) -> Lease:
        """An open lease's gradient arrived."""
        closed = self.pushed[lease] = self.leased.pop(lease)
        return closed

    def apply(self) -> list[Lease]:
        """Everything pushed becomes applied, in arrival order."""
        applied = list(self.pushed.values())
        self.num_applied += len(applied)
        self.pushed.clear()
        if self._failures:
            for lease in applied:
                self._failures.pop(lease.mini_batch, None)
        return applied

    def cancel(self, lease: int) -> Lease:
        """Close an open lease; its mini-batch is late."""
        closed = self.leased.pop(lease)
        self._late(closed.mini_batch)
        return closed

    def fail(self, lease: int) -> Lease:
        """Close an open lease whose mini-batch failed; retried until ``max_attempts``."""
        closed = self.leased.pop(lease)
        if not self._give_up(closed.mini_batch):
            heapq.heappush(self._returned, closed.mini_batch)
        return closed

    def lose(self, learner: int, lease: int | None, is_failure: bool = True) -> None:
        """A learner is gone: its reservation is free; its open lease counts as a failure, unless
        nobody failed."""
        self.unreserve(learner)
        if lease is not None:
            closed = self.leased.pop(lease)
            if not is_failure:
                heapq.heappush(self._returned, closed.mini_batch)
            elif not self._give_up(closed.mini_batch):
                self._late(closed.mini_batch)

    def unreserve(self, learner: int) -> None:
        """Return what is reserved for a learner, if anything."""
        reserved = self._reserved.pop(learner, None)
        if reserved is not None:
            heapq.heappush(self._returned, reserved)

    def stop(self) -> list[Lease]:
        """End early: open leases close, everything unfinished is left. Returns those leases."""
        closed = list(self.leased.values())
        for lease in (*closed, *self.pushed.values()):
            heapq.heappush(self._returned, lease.mini_batch)
        self.leased.clear()
        self.pushed.clear()
        return closed

    # -------------------------------------------------------------- helpers

    def _lowest_unreserved(self, avoid: int | None = None) -> int | None:
        if self._returned:
            if self._returned[0] != avoid:
                return heapq.heappop(self._returned)
            # Only its own failure is set aside, the next lowest may be returned or new.
            heapq.heappop(self._returned)
            other = self._lowest_unreserved()
            if other is None:
                return avoid
            heapq.heappush(self._returned, avoid)
            return other
        if self.num_mini_batches is None or self._next_new < self.num_mini_batches:
            new = self._next_new
            self._next_new += 1
            self._fresh.add(new)
            return new
        return None

    def _take(self, learner: int, avoid: int | None) -> int | None:
        mini_batch = self._reserved.pop(learner, None)
        if mini_batch is None:
            mini_batch = self._lowest_unreserved(avoid)
        if mini_batch is None and self._reserved:
            holder = min(self._reserved, key=self._reserved.__getitem__)
            mini_batch = self._reserved.pop(holder)
        return mini_batch

    def _late(self, mini_batch: int) -> None:
        if self.on_late == "drop":
            self.num_dropped += 1
            self._failures.pop(mini_batch, None)
        else:
            heapq.heappush(self._returned, mini_batch)

    def _give_up(self, mini_batch: int) -> bool:
        failures = self._failures[mini_batch] = self._failures.get(mini_batch, 0) + 1
        if failures < self.max_attempts:
            return False
        del self._failures[mini_batch]
        self.num_given_up += 1
        return True
