"""When the progress of a run is measured: at the start, and every so many seconds of run time."""

from __future__ import annotations

import math
from collections.abc import Callable

from gruppetto.protocols.messages import ProgressMeasured

__all__ = ["Measuring"]


class Measuring:
    """Measurements at the multiples of an interval, those that were missed left out.

    Args:
        interval: seconds of run time, > 0.
        measure: the loss at the server's current weights; None where it is not finite.
    """

    def __init__(self, interval: float, measure: Callable[[], float | None]) -> None:
        self._interval = interval
        self._measure = measure
        #: The next measurement is due at so many intervals.
        self.number = 0

    @property
    def next_at(self) -> float:
        """Run time of the next measurement."""
        return self.number * self._interval

    def take(self, now: float) -> ProgressMeasured:
        """Measure, at run time ``now``."""
        event = ProgressMeasured(self._measure())
        self.passed(now)
        return event

    def passed(self, now: float) -> None:
        """A measurement was made at ``now``; the next one is due at the first multiple after it."""
        self.number = max(self.number, math.floor(now / self._interval)) + 1
