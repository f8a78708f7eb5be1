"""The uniforms of keyed delays, compiled by numba; needs gruppetto[fast].

A keyed uniform is the first of the four words of a block that its number is turned into. Numpy's
generator makes all four, one after the other; here the other three are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from gruppetto.theory.timing_draws import Floats, Integers

__all__ = ["Uniforms", "compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """By numba, and kept for the next process where there is a folder for it."""
    try:
        return cast(F, njit(cache=True)(function))
    except RuntimeError:  # there is no folder to keep compiled code in
        return cast(F, njit(function))


_HALVES: Any = types.UniTuple(types.uint64, 2)  # type: ignore[no-untyped-call]


def _typed_product(typing_context: Any, left: Any, right: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, narrow = ir.IntType(128), ir.IntType(64)
        left, right = (builder.zext(argument, wide) for argument in arguments)
        product = builder.mul(left, right)
        upper = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), narrow)
        halves = upper, builder.trunc(product, narrow)
        return context.make_tuple(builder, signature.return_type, halves)

    return _HALVES(types.uint64, types.uint64), generate


#: The upper and the lower half of a product of two 64-bit numbers.
_product: Any = intrinsic(_typed_product)


#: Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
_MULTIPLIERS: Final = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_WEYL: Final = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS: Final = 10
_UNUSED_BITS: Final = np.uint64(11)
_ZERO: Final = np.uint64(0)


@compiled
def _take(seed: np.uint64, slots: Integers, first: Integers, found: Floats) -> None:
    """The uniforms of each slot from a number on: of each block of four words the first."""
    for row in range(len(slots)):
        numbers = found[row]
        own, begin = np.uint64(slots[row]), np.uint64(first[row])
        for i in range(len(numbers)):
            # Numpy counts before it draws.
            a, b, c, d = begin + np.uint64(i + 1), _ZERO, _ZERO, _ZERO
            key, slot = seed, own
            for _ in range(_ROUNDS):
                upper, lower = _product(_MULTIPLIERS[0], a)
                other_upper, other_lower = _product(_MULTIPLIERS[1], c)
                a, b, c, d = other_upper ^ b ^ key, other_lower, upper ^ d ^ slot, lower
                key += _WEYL[0]
                slot += _WEYL[1]
            numbers[i] = (float(a >> _UNUSED_BITS) + 0.5) * 2.0**-53


class Uniforms:
    """As :class:`.timing_draws.Uniforms`, to the bit; numpy makes all four words of a block."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self._seed = np.uint64(seed % 2**64)
        self._taken: Integers = np.zeros(num_slots, dtype=np.int64)

    def take(self, slots: Sequence[int], count: int) -> Floats:
        """The next ones of each of these slots. Shape [slots, count]."""
        rows = np.array(slots, dtype=np.int64)
        found = np.empty((len(rows), count))
        _take(self._seed, rows, self._taken[rows], found)
        self._taken[rows] += count
        return found
