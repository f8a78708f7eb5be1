"""Asynchronous protocols whose bound is part of them, and a bound that is given apart.

Sources: Maranjyan, Tyurin, Richtárik, "Ringmaster ASGD", ICML 2025, arXiv:2501.16168; Ho, Cipar,
Cui et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NeurIPS 2013.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gruppetto.errors import InvalidSetting
from gruppetto.protocols.bounded import Bound, ClockBound, OnStale, RestartBound
from gruppetto.protocols.collect import (
    K_BATCH_ASYNC,
    PROTOCOLS,
    BoundedProtocol,
    Cell,
    Protocol,
)

__all__ = ["Ringmaster", "Ssp", "with_bound"]


@dataclass(frozen=True)
class _BoundedAsync(Protocol):
    """Every gradient is an update, and a bound is part of the protocol."""

    cell: ClassVar[Cell] = K_BATCH_ASYNC

    def num_to_wait(self, num_live: int) -> int:
        return 1

    def expected_mean_staleness(self, num_live: int) -> float | None:
        """Unknown: it depends on the delays."""
        return None


@PROTOCOLS.register("ringmaster")
@dataclass(frozen=True)
class Ringmaster(_BoundedAsync):
    """Ringmaster ASGD: async that restarts what is r updates old; max_staleness = r - 1."""

    #: R: no gradient so many updates old, or more, is wanted.
    r: int

    def __post_init__(self) -> None:
        if self.r < 1:
            raise InvalidSetting(f"ringmaster: expected r >= 1, got r={self.r}")

    @cached_property
    def bound(self) -> Bound:
        """Restarts what is r updates old."""
        return RestartBound(self.r - 1)

    @property
    def staleness_limit(self) -> int | None:
        """r - 1."""
        return self.r - 1


@PROTOCOLS.register("ssp")
@dataclass(frozen=True)
class Ssp(_BoundedAsync):
    """Stale synchronous parallel: async, nobody more than s mini-batches ahead of the slowest."""

    #: s: clocks, a learner's own gradients applied, that it may be ahead when it starts another.
    s: int

    def __post_init__(self) -> None:
        if self.s < 0:
            raise InvalidSetting(f"ssp: expected s >= 0, got s={self.s}")

    @cached_property
    def bound(self) -> Bound:
        """Keeps a learner idle that is too far ahead."""
        return ClockBound(self.s)


def with_bound(
    protocol: Protocol, max_staleness: int | None = None, on_stale: OnStale | None = None
) -> Protocol:
    """A protocol with a bound on staleness that is given apart from it.

    Raises:
        InvalidSetting: it has another one, or it is of a cell that cancels, where nothing is stale.

    >>> PROTOCOLS.format(with_bound(PROTOCOLS.parse("async"), max_staleness=3))
    'async:max_staleness=3'
    """
    given = {"max_staleness": max_staleness, "on_stale": on_stale}
    wanted = {key: value for key, value in given.items() if value is not None}
    if not wanted:
        return protocol
    text, options = PROTOCOLS.format(protocol), " and ".join(wanted).replace("_", " ")
    if protocol.cell.cancels:
        raise InvalidSetting(
            f"{options}: {text} cancels what would be late, no gradient in it is stale; expected "
            "an asynchronous protocol like k-async, k-batch-async, softsync or async"
        )
    if not isinstance(protocol, BoundedProtocol):
        raise InvalidSetting(
            f"{options}: {text} takes no bound beside its own rules; expected k-async, "
            "k-batch-async, softsync or async"
        )
    for key, value in wanted.items():
        own = getattr(protocol, key)
        if own is not None and own != value:
            raise InvalidSetting(
                f"{key.replace('_', ' ')}: {text} says {own} and {value} is given beside it; "
                "expected one of the two"
            )
    return dataclasses.replace(
        protocol,
        max_staleness=protocol.max_staleness if max_staleness is None else max_staleness,
        on_stale=protocol.on_stale if on_stale is None else on_stale,
    )
