"""What a report knows about a simulation: one line of ``gruppetto simulate``, read from its JSON.

A cell of the K-family has the same colour in all figures and tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gruppetto.report.style import run_style

__all__ = [
    "CELLS",
    "Simulated",
    "all_times",
    "case_name",
    "cell_colour",
    "read_simulations",
    "time_unit",
]

#: In the order of the colours.
CELLS: Final = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")


@dataclass(frozen=True)
class Simulated:
    """One line of ``gruppetto simulate``."""

    protocol: str
    cell: str
    k: int
    learners: int
    #: Seconds per update; None where they are not finite.
    update_time: float | None
    #: Over the repeats.
    lowest: float | None
    highest: float | None
    #: Seconds that theory gives, and whether that is exact, an upper bound or nothing.
    expected: float | None
    kind: str
    why: str
    mean_staleness: float
    p95_staleness: int
    max_staleness: int
    fresh: float
    #: Contributions per staleness.
    histogram: tuple[int, ...]
    #: Mini-batches.
    applied: int
    cancelled: int
    #: Shares of the learners' time.
    idle: float
    cancelled_time: float
    #: Its cell and K do not say all: a bound holds updates, learners or gradients back.
    is_bounded: bool = False

    @property
    def useful(self) -> float:
        """Share of the learners' time that went into what was applied."""
        return max(0.0, 1.0 - self.idle - self.cancelled_time)

    @property
    def throughput(self) -> float | None:
        """Mini-batches applied per second; None where that is not finite."""
        return self.k / self.update_time if self.update_time else None


def read_simulations(records: Sequence[Mapping[str, Any]]) -> list[Simulated]:
    """Records with the keys of ``gruppetto simulate --json`` -> what is drawn of them."""
    return [
        Simulated(
            protocol=record["protocol"],
            cell=record["cell"],
            k=record["k"],
            learners=record["learners"],
            update_time=record["mean_update_time"],
            lowest=record["update_time_range"][0],
            highest=record["update_time_range"][1],
            expected=record["expected_update_time"],
            kind=record["expected_is"],
            why=record["expected_why"],
            mean_staleness=record["mean_staleness"],
            p95_staleness=record["p95_staleness"],
            max_staleness=record["max_staleness"],
            fresh=record["fresh_fraction"],
            histogram=tuple(record["staleness_histogram"]),
            applied=record["mini_batches_applied"],
            cancelled=record["mini_batches_cancelled"],
            idle=record["idle_fraction"] or 0.0,
            cancelled_time=record["cancelled_time_fraction"],
            is_bounded=bool(record.get("is_bounded", False)),
        )
        for record in records
    ]


def cell_colour(cell: str) -> str:
    """The colour of a cell, in all figures and tables."""
    return run_style(CELLS.index(cell)).colour


def time_unit(seconds: Sequence[float]) -> tuple[str, float]:
    """Seconds, or milliseconds where all times are well below one; and how many are a second.

    >>> time_unit([0.004, 0.05]), time_unit([0.05, 3.0])
    (('ms', 1000.0), ('s', 1.0))
    """
    return ("ms", 1e3) if 0.0 < max(seconds, default=0.0) < 0.5 else ("s", 1.0)


def all_times(cases: Sequence[Simulated]) -> list[float]:
    """Everything that has to be on a time axis."""
    found = [(case.update_time, case.lowest, case.highest, case.expected) for case in cases]
    return [value for each in found for value in each if value is not None]


def case_name(case: Simulated, cases: Sequence[Simulated]) -> str:
    """A case among others: its protocol, and how many learners where that differs."""
    alike = len({each.learners for each in cases}) == 1
    return case.protocol if alike else f"{case.protocol}, P = {case.learners:,}"
