"""Counting staleness: the server's version just before applying, minus the gradient's version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["StalenessStatistics"]


class StalenessStatistics:
    """A running histogram of staleness, one count per applied gradient.

    >>> s = StalenessStatistics([0, 0, 1, 3])
    >>> s.mean, s.max, s.quantile(0.5)
    (1.0, 3, 0)
    """

    __slots__ = ("count", "histogram", "total")

    def __init__(self, values: Iterable[int] = ()) -> None:
        self.histogram: Counter[int] = Counter()
        self.count = 0
        self.total = 0
        for value in values:
            self.add(value)

    def add(self, staleness: int) -> None:
        """Count one applied gradient."""
        self.histogram[staleness] += 1
        self.count += 1
        self.total += staleness

    @property
    def mean(self) -> float:
        """Mean staleness, 0.0 before anything was applied."""
        return self.total / self.count if self.count else 0.0

    @property
    def max(self) -> int:
        """Largest staleness seen, 0 before anything was applied."""
        return max(self.histogram, default=0)

    def quantile(self, q: float) -> int:
        """Smallest staleness with at least a share ``q`` of the gradients at or below it."""
        seen = 0
        for value in sorted(self.histogram):
            seen += self.histogram[value]
            if seen >= q * self.count:
                return value
        return 0
