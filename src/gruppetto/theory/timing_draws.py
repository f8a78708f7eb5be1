"""The keyed delays of all slots, many at a time, with the bits that one at a time would have.

The law of this file: draw n of a slot is ``KeyedDelays.draw(slot, n)``, whatever the order and the
number in which draws are made here. Two shapes are served: a *ring* of the next draws of every
slot, for protocols under which slots use theirs up at different rates, and whole *rounds*, one
draw of every slot each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gruppetto.delays import Delay, KeyedDelays

__all__ = ["Delays", "Ring", "Rounds", "TakesUniforms", "Uniforms"]

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

#: Draws made of a slot at a time. Vectorised functions round alike in all of a long array but,
#: perhaps, its last few values: whole blocks have none of these.
BLOCK: Final = 256
_WORDS: Final = 4  # 64-bit words in one Philox block
#: About how many draws lie ready: few enough to stay near the processor.
_READY: Final = 2**17
#: Draws sent through a law at a time.
_CHUNK: Final = 2**14
#: Unused places at the end of a row.
_PADDING: Final = 8
#: Uniforms nearer than this are not ordered by themselves: a law may round them either way.
_NEAR: Final = 2.0**-36


class Delays(Protocol):
    """How long things take: what :class:`gruppetto.delays.KeyedDelays` offers."""

    def draw(self, slot: int, n: int) -> float:
        """Seconds that the n-th job (from 0) started on a slot takes."""
        ...


class TakesUniforms(Protocol):
    """The uniforms of all slots, each slot's in order."""

    def take(self, slots: Sequence[int], count: int) -> Floats:
        """The next ones of each of these slots. Shape [slots, count]."""
        ...


class Uniforms:
    """The uniforms of ``keyed_uniforms``, each slot's in order; generators are kept, not remade."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self._generators = [
            np.random.Philox(key=np.array([seed % 2**64, slot], dtype=np.uint64), counter=0)
            for slot in range(num_slots)
        ]

    def take(self, slots: Sequence[int], count: int) -> Floats:
        """The next ones of each of these slots. Shape [slots, count]."""
        found = np.empty((len(slots), count))
        for row, slot in zip(found, slots, strict=True):
            raw = self._generators[slot].random_raw(count * _WORDS)[::_WORDS]
            row[:] = raw >> np.uint64(11)
        found += 0.5
        found *= 2.0**-53
        return found


class _Laws:
    """Every slot's inverse CDF; slots of one law go through it together."""

    def __init__(self, delays: KeyedDelays, num_slots: int) -> None:
        laws = [delays.law(slot) for slot in range(num_slots)]
        # Most slots share one object; comparing laws takes long where they are made of samples.
        different = {id(law): law for law in laws}
        numbers: dict[Delay, int] = {}
        number_of = {key: numbers.setdefault(law, len(numbers)) for key, law in different.items()}
        self._number = np.array([number_of[id(law)] for law in laws])
        self._quantiles = [law.quantile for law in numbers]

    @property
    def common(self) -> Callable[[Floats], Floats] | None:
        """The inverse CDF of all slots, if they share one."""
        return self._quantiles[0] if len(self._quantiles) == 1 else None

    def quantiles(self, slots: Integers, uniforms: Floats) -> Floats:
        """Seconds for the uniforms [slots, count] of these slots; count is whole blocks."""
        numbers = self._number[slots]
        if (numbers == numbers[0]).all() and uniforms.size <= _CHUNK:
            quantile = self._quantiles[int(numbers[0])]
            return quantile(uniforms.reshape(-1)).reshape(uniforms.shape)
        found = np.empty_like(uniforms)
        step = max(1, _CHUNK // uniforms.shape[1])
        for number, quantile in enumerate(self._quantiles):
            rows = np.flatnonzero(numbers == number)
            for begin in range(0, len(rows), step):
                some = rows[begin : begin + step]
                found[some] = quantile(uniforms[some].reshape(-1)).reshape(len(some), -1)
        return found


class Ring:
    """The next draws of every slot: draw n of a slot is ``delays[slot, n % size]``.

    Whoever takes a draw counts it in ``started``. A slot has none left when its ``started`` has
    come up to its ``filled``; :meth:`refill` then draws for all slots that have used up a block.

    Args:
        delays: seconds per job.
        num_slots: P.
        uniforms: makes them from a seed, for so many slots; whoever does, they are the same.
    """

    def __init__(
        self,
        delays: Delays,
        num_slots: int,
        uniforms: Callable[[int, int], TakesUniforms] = Uniforms,
    ) -> None:
        blocks = 2
        while blocks < 32 and 2 * blocks * BLOCK * num_slots <= _READY:
            blocks *= 2
        #: Draws that lie ready of each slot; a power of two.
        self.size = blocks * BLOCK
        #: Rows are longer than ``size``: rows a power of two apart share cache lines.
        self.delays: Floats = np.zeros((num_slots, self.size + _PADDING))
        #: Jobs started on each slot, which is the number of its next draw.
        self.started: Integers = np.zeros(num_slots, dtype=np.int64)
        #: Draws made of each slot.
        self.filled: Integers = np.zeros(num_slots, dtype=np.int64)
        self._source = delays
        self._keyed: tuple[TakesUniforms, _Laws] | None = None
        if type(delays) is KeyedDelays and delays.are_independent:
            self._keyed = uniforms(delays.seed, num_slots), _Laws(delays, num_slots)
        self.refill()

    def refill(self) -> None:
        """Make draws in place of all whole blocks that are used up."""
        missing = (self.started // BLOCK * BLOCK + self.size - self.filled) // BLOCK
        for number in np.unique(missing[missing > 0]).tolist():
            count = number * BLOCK
            slots = np.flatnonzero(missing == number)
            step = max(1, _CHUNK // count)
            for begin in range(0, len(slots), step):
                self._fill(slots[begin : begin + step], count)

    def _fill(self, slots: Integers, count: int) -> None:
        for slot, row in zip(slots.tolist(), self._draws(slots, count), strict=True):
            at = int(self.filled[slot]) % self.size
            before_the_end = min(count, self.size - at)
            self.delays[slot, at : at + before_the_end] = row[:before_the_end]
            self.delays[slot, : count - before_the_end] = row[before_the_end:]
        self.filled[slots] += count

    def _draws(self, slots: Integers, count: int) -> Floats:
        if self._keyed is not None:
            uniforms, laws = self._keyed
            return laws.quantiles(slots, uniforms.take(slots.tolist(), count))
        draw = self._source.draw
        first = self.filled[slots].tolist()
        return np.array(
            [[draw(slot, n + i) for i in range(count)]
             for slot, n in zip(slots.tolist(), first, strict=True)]
        )  # fmt: skip


class Rounds:
    """One draw of every slot at a time, of which the K shortest are wanted.

    Where all slots share a law, uniforms are compared instead of seconds and only K of P go
    through the inverse CDF, which is monotone; near ties, which it may round, are done in full.
    """

    def __init__(self, delays: Delays, num_slots: int, num_shortest: int) -> None:
        self._num_slots = num_slots
        self._k = num_shortest
        self._source = delays
        self._uniforms: Uniforms | None = None
        self._laws: _Laws | None = None
        if type(delays) is KeyedDelays and delays.are_independent:
            self._uniforms = Uniforms(delays.seed, num_slots)
            self._laws = _Laws(delays, num_slots)
        self._num_taken = 0

    def shortest(self, num_rounds: int) -> Floats:
        """The K shortest of each of the next rounds, in no order. Shape [rounds, K].

        ``num_rounds`` is made of whole blocks.
        """
        first = self._num_taken
        self._num_taken += num_rounds
        if self._uniforms is None or self._laws is None:
            draw = self._source.draw
            rounds = range(first, first + num_rounds)
            rows = [[draw(slot, n) for slot in range(self._num_slots)] for n in rounds]
            return _smallest(np.array(rows, dtype=np.float64), self._k)
        columns = self._uniforms.take(range(self._num_slots), num_rounds)
        quantile = self._laws.common
        if quantile is None:
            columns = self._laws.quantiles(np.arange(self._num_slots), columns)
            return _smallest(np.ascontiguousarray(columns.T), self._k)
        uniforms = np.ascontiguousarray(columns.T)
        chosen = _smallest(uniforms, self._k)
        found = quantile(chosen.ravel()).reshape(num_rounds, self._k)
        for row in np.flatnonzero(_is_near(uniforms, self._k)).tolist():
            # In the order of slots, as one at a time: whole blocks again.
            full = np.resize(columns[:, row], -(-self._num_slots // BLOCK) * BLOCK)
            found[row] = _smallest(quantile(full)[None, : self._num_slots], self._k)[0]
        return found


def _smallest(rows: Floats, k: int) -> Floats:
    """The k smallest of each row, which is reordered."""
    if k < rows.shape[1]:
        rows.partition(k - 1, axis=1)
    return np.ascontiguousarray(rows[:, :k])


def _is_near(parted: Floats, k: int) -> npt.NDArray[np.bool_]:
    """Whether the k-th smallest is hardly smaller than the next, in rows made by _smallest."""
    if k == parted.shape[1]:
        return np.zeros(len(parted), dtype=np.bool_)
    near: npt.NDArray[np.bool_] = parted[:, k:].min(axis=1) - parted[:, k - 1] < _NEAR
    return near
