"""The K-family as one table: who an update waits for, and what happens to unfinished work.

    protocol        an update waits for    when it fires, the rest   a finisher before that
    k-sync          K distinct learners    is cancelled              waits
    k-batch-sync    K mini-batches         is cancelled              starts another, same version
    k-async         K distinct learners    goes on, arrives late     waits
    k-batch-async   K mini-batches         goes on, arrives late     starts another, newest version

Two booleans span it; every protocol here is one of the four cells plus a rule for K. Sources:
Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win the Race", AISTATS 2018,
§2.3 (the cells); Gupta, Zhang, Wang, "Rudra", ICDM 2016 (hardsync, n-softsync, async).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = [
    "PROTOCOLS",
    "Async",
    "Backup",
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

    cell: ClassVar[Cell]

    def num_to_wait(self, num_live: int) -> int:
        """K for this many live learners (expected ones included), at least 1."""
        raise NotImplementedError

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
class KAsync(_FixedK):
    """The first K distinct learners, who wait for the update; the rest arrives late."""

    cell: ClassVar[Cell] = K_ASYNC


@PROTOCOLS.register("k-batch-async")
@dataclass(frozen=True)
class KBatchAsync(_FixedK):
    """The first K mini-batches, from any learner; nobody waits, the rest arrives late."""

    cell: ClassVar[Cell] = K_BATCH_ASYNC


@PROTOCOLS.register("hardsync")
@dataclass(frozen=True)
class Hardsync(Protocol):
    """Every live learner: k-sync with K = P. Equals SGD with a P times larger mini-batch."""

    cell: ClassVar[Cell] = K_SYNC

    def num_to_wait(self, num_live: int) -> int:
        return max(1, num_live)


@PROTOCOLS.register("softsync")
@dataclass(frozen=True)
class Softsync(Protocol):
    """n-softsync: k-batch-async with K = floor(P/n); mean staleness about n."""

    cell: ClassVar[Cell] = K_BATCH_ASYNC

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


@PROTOCOLS.register("async")
@dataclass(frozen=True)
class Async(Protocol):
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
