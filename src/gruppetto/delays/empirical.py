"""A law made of measured seconds: each of them again, equally likely."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from gruppetto.delays.law import DELAYS, Aging, Delay, Floats
from gruppetto.errors import InvalidSetting

__all__ = ["Empirical"]


@DELAYS.register("empirical")
@dataclass(frozen=True)
class Empirical(Delay):
    """Each of the measured times again, equally likely.

    The inverse CDF is a step: the ceil(n q)-th smallest of n values, nothing in between. So a draw
    is one of the values, and mean and variance are exactly those of the values.

    A spec names a file; as this room reads none, the law then has no values until
    ``gruppetto.runs.seconds.load_delay`` has given it some. A law made of values alone has no
    spec that could be read back.

    Args:
        file: where the values are; see ``gruppetto.runs.seconds.read_seconds``.

    Raises:
        InvalidSetting: a file's name that a spec cannot hold.

    >>> law = Empirical.of([3.0, 1.0, 2.0, 2.0])
    >>> law.quantile(np.array([0.25, 0.26, 0.99])).tolist()
    [1.0, 2.0, 3.0]
    >>> DELAYS.format(DELAYS.parse("empirical:file=/data/times.csv"))
    'empirical:file=/data/times.csv'
    """

    #: CSV, Parquet or one number per line; empty for values from elsewhere.
    file: str
    #: The values, smallest first; empty where they are still in the file.
    seconds: tuple[float, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if not self.file:
            raise InvalidSetting("delay empirical: expected file=PATH, got no path")
        if self.file != self.file.strip() or any(c in self.file for c in ",\n"):
            raise InvalidSetting(
                "delay empirical: expected a file whose name has no comma, no line break and no "
                f"space at its ends, got {self.file!r}"
            )

    @classmethod
    def of(cls, values: Iterable[float]) -> Empirical:
        """A law of values from anywhere, at least one; seconds, in any order.

        Raises:
            InvalidSetting: no value, or one that is negative, infinite or not a number.
        """
        law = object.__new__(cls)
        object.__setattr__(law, "file", "")
        law._take(values)
        return law

    def with_values(self, values: Iterable[float], file: str | None = None) -> Empirical:
        """The same law with values.

        Args:
            values: seconds, at least one, in any order.
            file: another name for where they are: the absolute one.

        Raises:
            InvalidSetting: no value, or one that is negative, infinite or not a number.
        """
        law = Empirical(self.file if file is None else file)
        law._take(values)
        return law

    def _take(self, values: Iterable[float]) -> None:
        given = np.asarray(values if isinstance(values, np.ndarray) else list(values))
        if given.size and (given.ndim != 1 or given.dtype.kind not in "fiu"):
            raise InvalidSetting("delay empirical: expected a list of numbers, got something else")
        if not given.size:
            raise InvalidSetting("delay empirical: expected at least one value, got none")
        seconds = np.sort(given.astype(np.float64))
        # Sorted, so negative ones come first, infinite ones and not-a-numbers last.
        for value in (float(seconds[0]), float(seconds[-1])):
            if not math.isfinite(value) or value < 0:
                raise InvalidSetting(
                    f"delay empirical: expected seconds >= 0 and finite, got {value}"
                )
        object.__setattr__(self, "seconds", tuple(seconds.tolist()))

    def _array(self) -> Floats:
        """The values, ascending; made once.

        Raises:
            InvalidSetting: they are still in the file.
        """
        held = cast("Floats | None", self.__dict__.get("_held"))
        if held is not None:
            return held
        if not self.seconds:
            raise InvalidSetting(
                f"delay {DELAYS.format(self)}: expected its values to be loaded before use, got "
                "the name of their file only"
            )
        held = np.array(self.seconds)
        held.setflags(write=False)
        object.__setattr__(self, "_held", held)
        return held

    def quantile(self, q: Floats) -> Floats:
        values = self._array()
        n = values.size
        ranks = np.ceil(np.asarray(q) * n).astype(np.int64)
        return values[np.clip(ranks, 1, n) - 1]

    def upper_quantile(self, q: Floats) -> Floats:
        values = self._array()
        n = values.size
        ranks = n - np.floor(np.asarray(q) * n).astype(np.int64)
        return values[np.clip(ranks, 1, n) - 1]

    def cdf(self, x: Floats) -> Floats:
        values = self._array()
        return np.searchsorted(values, x, side="right") / values.size

    def sf(self, x: Floats) -> Floats:
        values = self._array()
        return (values.size - np.searchsorted(values, x, side="right")) / values.size

    def expectation(self) -> float:
        values = self._array()
        return math.fsum(values) / values.size

    def variance(self) -> float:
        """Of the law, so divided by n."""
        return float(np.var(self._array()))

    @property
    def aging(self) -> Aging:
        return Aging.UNKNOWN
