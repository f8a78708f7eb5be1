"""How far learners may drift apart: bounds on staleness, and on clocks.

The law of this file: a bound answers four questions about what stands, and changes nothing. Is this
gradient refused?  May this update fire?  May this learner start?  What is too old now?  Whatever it
answers, the run goes on: nothing ever waits for what cannot come.

* **discard**: a gradient that arrives more than s updates old goes back. An update applies all that
  is held, so the version stands still while gradients are held, and what was young enough when it
  arrived is so when it is applied. Every refusal follows s + 1 updates, of which a run has only so
  many.
* **restart**: what is being computed is cancelled by the update that makes it s + 1 old, and its
  learner starts on the new version. Nothing arrives too old, and every restart follows an update.
* **wait**: an update fires, and a learner starts, only if all gradients held and under way could
  then still be applied in time, K per update, earliest deadline first. Once nothing is under way
  that rule allows the update, and before it K learners to start; so it is enough that everybody
  who computes pushes, fails or dies. While an update is held back more than K may gather; it takes
  them all.
* **clocks**: a learner starts only while at most s of its own clocks ahead of the slowest. The
  slowest never waits.

Sources: Maranjyan, Tyurin, Richtárik, "Ringmaster ASGD", ICML 2025, arXiv:2501.16168 (discard and
restart, with R = s + 1); Ho, Cipar, Cui et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NeurIPS 2013 (clocks). The waiting is that of earliest
deadline first, which meets all deadlines that any order meets.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from gruppetto.protocols.clocks import Clocks
from gruppetto.protocols.ledger import Lease, Ledger

__all__ = [
    "UNBOUNDED",
    "Bound",
    "ClockBound",
    "DiscardBound",
    "OnStale",
    "RestartBound",
    "Standing",
    "WaitBound",
    "in_time",
]

OnStale: TypeAlias = Literal["discard", "restart", "wait"]


class Standing(typing.Protocol):
    """How things stand, as far as a bound looks at them; the coordinator is one."""

    #: Server version.
    version: int
    #: For the open leases.
    ledger: Ledger
    #: Of the live learners.
    clocks: Clocks

    @property
    def k(self) -> int:
        """K of the live learners, before it is clamped to what can still arrive."""
        ...

    @property
    def held_versions(self) -> Sequence[int]:
        """Versions that the held gradients were computed on."""
        ...


@dataclass(frozen=True)
class Bound:
    """The bound of a protocol; this one forbids nothing."""

    #: Whether it cancels what is being computed.
    restarts: ClassVar[bool] = False

    def refuses(self, staleness: int) -> bool:
        """Whether a gradient that arrives so stale is not to be applied."""
        return False

    def may_fire(self, now: Standing) -> bool:
        """Whether an update may be made of all that is held."""
        return True

    def may_start(self, learner: int, now: Standing) -> bool:
        """Whether an idle learner may compute on the current version."""
        return True

    def too_old(self, now: Standing) -> list[Lease]:
        """Open leases that are to be cancelled, their learners to start again."""
        return []


UNBOUNDED = Bound()


@dataclass(frozen=True)
class DiscardBound(Bound):
    """Refuses what arrives staler than ``s`` updates."""

    s: int

    def refuses(self, staleness: int) -> bool:
        return staleness > self.s


@dataclass(frozen=True)
class RestartBound(Bound):
    """Cancels what has become staler than ``s`` updates while it was computed."""

    restarts: ClassVar[bool] = True
    s: int

    def too_old(self, now: Standing) -> list[Lease]:
        oldest = now.version - self.s
        return [lease for lease in now.ledger.leased.values() if lease.version < oldest]


@dataclass(frozen=True)
class WaitBound(Bound):
    """Lets nothing become staler than ``s`` updates, by waiting."""

    s: int

    def may_fire(self, now: Standing) -> bool:
        under_way = (lease.version for lease in now.ledger.leased.values())
        return in_time(under_way, now.version + 1, now.k, self.s)

    def may_start(self, learner: int, now: Standing) -> bool:
        versions = [lease.version for lease in now.ledger.leased.values()]
        return in_time([*versions, *now.held_versions, now.version], now.version, now.k, self.s)


@dataclass(frozen=True)
class ClockBound(Bound):
    """Lets nobody start who is more than ``s`` clocks ahead of the slowest."""

    s: int

    def may_start(self, learner: int, now: Standing) -> bool:
        return now.clocks.lead(learner) <= self.s


def in_time(versions: Iterable[int], first: int, k: int, s: int) -> bool:
    """Whether gradients can all be applied at most ``s`` stale, ``k`` per update.

    Args:
        versions: that they are computed on, in any order.
        first: the server's version when the next update is made.
        k: gradients of one update.
        s: updates.

    >>> in_time([0, 0, 0], 0, 1, 2), in_time([0, 0, 0], 1, 1, 2), in_time([0, 0, 0], 1, 2, 2)
    (True, False, True)
    """
    return all(v + s >= first + n // k for n, v in enumerate(sorted(versions)))
