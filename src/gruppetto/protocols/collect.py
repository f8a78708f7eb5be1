"""The K-family as one table: who an update waits for, and what happens to unfinished work.

    protocol        an update waits for    when it fires, the rest   a finisher before that
    k-sync          K distinct learners    is cancelled              waits
    k-batch-sync    K mini-batches         is cancelled              starts another, same version
    k-async         K distinct learners    goes on, arrives late     waits
    k-batch-async   K mini-batches         goes on, arrives late     starts another, newest version

Two booleans span it; every protocol here is one of the four cells plus a rule for K and, in the
cells that go on, perhaps a bound (bounded.py). Sources:
Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win the Race", AISTATS 2018,
§2.3 (the cells); Gupta, Zhang, Wang, "Rudra", ICDM 2016 (hardsync, n-softsync, async).
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

from gruppetto.errors import InvalidSetting
from gruppetto.protocols.bounded import (
    UNBOUNDED,
    Bound,
    DiscardBound,
    OnStale,
    RestartBound,
    WaitBound,
)
from gruppetto.spec import Registry

__all__ = [
    "PROTOCOLS",
    "Async",
    "Backup",
    "BoundedProtocol",
    "Cell",
    "Hardsync",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "Protocol",
    "Rennala",
    "Softsync",
]


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table."""

    #: An update takes at most one gradient of each learner; a finisher waits for the update.
    distinct: bool
    #: Unfinished work is cancelled when the update fires.
    cancels: bool


K_SYNC: Final = Cell(distinct=True, cancels=True)
K_BATCH_SYNC: Final = Cell(distinct=False, cancels=True)
K_ASYNC: Final = Cell(distinct=True, cancels=False)
K_BATCH_ASYNC: Final = Cell(distinct=False, cancels=False)


def _at_least_one(protocol: Protocol, key: str, value: int) -> None:
    if value < 1:
        name = PROTOCOLS.name_of(protocol)
        raise InvalidSetting(f"{name}: expected {key} >= 1, got {key}={value}")


@dataclass(frozen=True)
class Protocol:
    """Who waits for whom: a cell and a rule for K."""

    def __post_init__(self) -> None:
        """Refuse values out of their range."""

    @property
    def cell(self) -> Cell:
        """Its row of the table."""
        raise NotImplementedError

    def num_to_wait(self, num_live: int) -> int:
        """K for this many live learners (expected ones included), at least 1."""
        raise NotImplementedError

    def most_to_wait(self, num_learners: int) -> int:
        """The largest K of a run that starts with so many learners."""
        return self.num_to_wait(num_learners)

    def most_held(self, num_learners: int) -> int:
        """How many contributions may be held at most, in a run that starts with so many."""
        return self.most_to_wait(num_learners)

    @property
    def bound(self) -> Bound:
        """What it adds to its cell's rules."""
        return UNBOUNDED

    @property
    def staleness_limit(self) -> int | None:
        """The staleness that no applied gradient exceeds; None where there is no such number."""
        return 0 if self.cell.cancels else None

    @property
    def measures_every(self) -> float | None:
        """Seconds of run time from one measurement of progress to the next; None for none."""
        return None

    def measured(self, loss: float | None, num_live: int) -> Protocol:
        """The protocol from a measurement of progress on: itself, unless it adapts K.

        Args:
            loss: on the fixed training sample; None where it was not finite.
            num_live: P at this moment, expected learners included.
        """
        return self

    def check(self, num_learners: int) -> None:
        """Refuse a number of learners this protocol cannot run with.

        Raises:
            InvalidSetting: K > P in a cell that waits for distinct learners.
        """
        k = self.num_to_wait(num_learners)
        if self.cell.distinct and k > num_learners:
            raise InvalidSetting(
                f"{PROTOCOLS.format(self)} waits for {k} distinct learners of {num_learners}; "
                f"expected k <= {num_learners}, or use the k-batch form"
            )

    def expected_mean_staleness(self, num_live: int) -> float | None:
        """Mean staleness in closed form, for any delays; None where unknown.

        (P-K)/K for k-async, (P-1)/K for k-batch-async, 0 for the cancelling cells: every update
        makes the gradients still being computed, P-K or P-1 of them, one update older.
        """
        if self.cell.cancels:
            return 0.0
        k = self.num_to_wait(num_live)
        return max(0, num_live - (k if self.cell.distinct else 1)) / k


PROTOCOLS: Registry[Protocol] = Registry("protocol")

#: How staleness is bounded unless told otherwise: what a restart breaks off would have been
#: thrown away on arrival.
_ON_STALE: Final[OnStale] = "restart"


@dataclass(frozen=True)
class BoundedProtocol(Protocol):
    """A protocol that goes on, with or without a bound on staleness."""

    #: s: no gradient staler than so many updates is applied; None for no bound.
    max_staleness: int | None = None
    #: What becomes of those that would be: "discard" on arrival, "restart" as soon as they are,
    #: "wait" so that none is. None for "restart".
    on_stale: OnStale | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = PROTOCOLS.name_of(self)
        if self.max_staleness is None:
            if self.on_stale is not None:
                raise InvalidSetting(
                    f"{name}: on_stale says what becomes of gradients beyond max_staleness; "
                    f"expected both, got on_stale={self.on_stale} alone"
                )
        elif self.max_staleness < 0:
            raise InvalidSetting(
                f"{name}: expected max_staleness >= 0, got max_staleness={self.max_staleness}"
            )
        if self.on_stale is not None and self.on_stale not in typing.get_args(OnStale):
            raise InvalidSetting(
                f"{name}: expected on_stale to be one of {', '.join(typing.get_args(OnStale))}, "
                f"got on_stale={self.on_stale}"
            )

    @cached_property
    def bound(self) -> Bound:
        """By ``max_staleness`` and ``on_stale``."""
        if self.max_staleness is None:
            return UNBOUNDED
        kinds = {"discard": DiscardBound, "restart": RestartBound, "wait": WaitBound}
        return kinds[self.on_stale or _ON_STALE](self.max_staleness)

    @property
    def staleness_limit(self) -> int | None:
        """``max_staleness``."""
        return self.max_staleness

    def check(self, num_learners: int) -> None:
        """Refuse a number of learners this protocol cannot run with.

        Raises:
            InvalidSetting: what the cell refuses; or waiting, with a bound that leaves some
                learners without work for good: s < ceil(P/K) - 1.
        """
        super().check(num_learners)
        k = self.num_to_wait(num_learners)
        if isinstance(self.bound, WaitBound) and num_learners > k * (self.bound.s + 1):
            need = math.ceil(num_learners / k) - 1
            raise InvalidSetting(
                f"{PROTOCOLS.format(self)} lets {k * (self.bound.s + 1)} gradients be under way, "
                f"and there are {num_learners} learners; expected max_staleness >= {need}, "
                "the learners divided by k, rounded up, less 1"
            )

    def most_held(self, num_learners: int) -> int:
        """All that can be under way, where they wait for each other; else K."""
        most = self.most_to_wait(num_learners)
        return most * (self.bound.s + 1) if isinstance(self.bound, WaitBound) else most

    def expected_mean_staleness(self, num_live: int) -> float | None:
        """The cell's; None with a bound: it depends on the delays."""
        return None if self.bound is not UNBOUNDED else super().expected_mean_staleness(num_live)


@dataclass(frozen=True)
class _FixedK(Protocol):
    """A cell with K given by the user."""

    #: K: contributions an update waits for.
    k: int

    def __post_init__(self) -> None:
        _at_least_one(self, "k", self.k)

    def num_to_wait(self, num_live: int) -> int:
        return self.k


@PROTOCOLS.register("k-sync")
@dataclass(frozen=True)
class KSync(_FixedK):
    """The first K distinct learners; everybody else's work is cancelled."""

    cell: ClassVar[Cell] = K_SYNC


@PROTOCOLS.register("k-batch-sync")
@dataclass(frozen=True)
class KBatchSync(_FixedK):
    """The first K mini-batches of this version, from any learner; the rest is cancelled."""

    cell: ClassVar[Cell] = K_BATCH_SYNC


@PROTOCOLS.register("k-async")
@dataclass(frozen=True)
class KAsync(BoundedProtocol, _FixedK):
    """The first K distinct learners, who wait for the update; the rest arrives late."""

    cell: ClassVar[Cell] = K_ASYNC


@PROTOCOLS.register("k-batch-async")
@dataclass(frozen=True)
class KBatchAsync(BoundedProtocol, _FixedK):
    """The first K mini-batches, from any learner; nobody waits, the rest arrives late."""

    cell: ClassVar[Cell] = K_BATCH_ASYNC


@PROTOCOLS.register("hardsync")
@dataclass(frozen=True)
class Hardsync(Protocol):
    """Every live learner: k-sync with K = P. Equals SGD with a P times larger mini-batch."""

    cell: ClassVar[Cell] = K_SYNC

    def num_to_wait(self, num_live: int) -> int:
        return max(1, num_live)


@dataclass(frozen=True)
class _FlooredK(Protocol):
    """A cell with K = floor(P/n)."""

    #: n: about how stale a gradient is; 1 is nearest to hardsync, P is async.
    n: int

    def __post_init__(self) -> None:
        _at_least_one(self, "n", self.n)

    def num_to_wait(self, num_live: int) -> int:
        return max(1, num_live // self.n)

    def check(self, num_learners: int) -> None:
        if self.n > num_learners:
            raise InvalidSetting(
                f"softsync:n={self.n} waits for floor({num_learners}/{self.n}) = 0 mini-batches; "
                f"expected n <= learners = {num_learners}"
            )


@PROTOCOLS.register("softsync")
@dataclass(frozen=True)
class Softsync(BoundedProtocol, _FlooredK):
    """n-softsync: k-batch-async with K = floor(P/n); mean staleness about n."""

    cell: ClassVar[Cell] = K_BATCH_ASYNC


@PROTOCOLS.register("async")
@dataclass(frozen=True)
class Async(BoundedProtocol):
    """Every gradient is an update: k-batch-async with K = 1."""

    cell: ClassVar[Cell] = K_BATCH_ASYNC

    def num_to_wait(self, num_live: int) -> int:
        return 1


@PROTOCOLS.register("backup")
@dataclass(frozen=True)
class Backup(Protocol):
    """b backup learners: k-sync with K = P - b."""

    cell: ClassVar[Cell] = K_SYNC

    #: b: learners an update does not wait for.
    b: int

    def __post_init__(self) -> None:
        if self.b < 0:
            raise InvalidSetting(f"backup: expected b >= 0, got {self.b}")

    def num_to_wait(self, num_live: int) -> int:
        return max(1, num_live - self.b)

    def check(self, num_learners: int) -> None:
        if self.b >= num_learners:
            raise InvalidSetting(
                f"backup:b={self.b} leaves no learner to wait for; "
                f"expected b < learners = {num_learners}"
            )


@PROTOCOLS.register("rennala")
@dataclass(frozen=True)
class Rennala(KBatchSync):
    """Rennala SGD: another name for k-batch-sync."""
