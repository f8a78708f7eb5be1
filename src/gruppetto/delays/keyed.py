"""The n-th job of a slot takes equally long in every engine: draws keyed by (seed, slot, n).

A *slot* is an original learner number; whoever replaces the learner inherits the slot and its
count. Draw n of a slot is the first word of Philox block n + 1 under the key (seed, slot), made
a uniform in (0, 1) and sent through the law's inverse CDF. Draws are made in fixed blocks of 256,
because vectorised functions may round differently from scalar ones and the bits must not depend
on how many were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gruppetto.delays.distributions import Constant
from gruppetto.delays.law import Delay, Floats
from gruppetto.errors import InvalidSetting

__all__ = ["KeyedDelays", "keyed_uniforms"]

_BLOCK = 256
_WORDS = 4  # 64-bit words in one Philox block


def keyed_uniforms(seed: int, slot: int, start: int, count: int) -> Floats:
    """Uniforms number start .. start + count - 1 of a slot, each in (0, 1). Shape [count]."""
    key = np.array([seed % 2**64, slot], dtype=np.uint64)
    # numpy steps the counter before it makes a block: from counter n comes block n + 1.
    raw = np.random.Philox(key=key, counter=start).random_raw(count * _WORDS)[::_WORDS]
    return (np.asarray(raw >> np.uint64(11), dtype=np.float64) + 0.5) * 2.0**-53


class KeyedDelays:
    """The delays of a run: one law for all learners, and other laws for some.

    Args:
        seed: the run's.
        delay: the law of every learner not named in ``per_learner``.
        per_learner: slot -> its own law.
        num_learners: slots that exist, to refuse a law for one that does not.

    Raises:
        InvalidSetting: a law for a learner that does not exist.
    """

    def __init__(
        self, seed: int, delay: Delay | None, per_learner: Mapping[int, Delay], num_learners: int
    ) -> None:
        for slot in per_learner:
            if not 0 <= slot < num_learners:
                raise InvalidSetting(
                    f"a delay is given for learner {slot}; expected a learner from 0 to "
                    f"{num_learners - 1}"
                )
        self.seed = seed
        self._default = delay if delay is not None else Constant(value=1.0)
        self._per_learner = dict(per_learner)
        self._blocks: dict[int, tuple[int, list[float]]] = {}

    def law(self, slot: int) -> Delay:
        """The law of a slot."""
        return self._per_learner.get(slot, self._default)

    @property
    def are_independent(self) -> bool:
        """Whether no law depends on the slot or on the number of the job."""
        return all(law.is_independent for law in (self._default, *self._per_learner.values()))

    def draw(self, slot: int, n: int) -> float:
        """Seconds that the n-th job (from 0) started on a slot takes."""
        block, index = divmod(n, _BLOCK)
        held = self._blocks.get(slot)
        if held is None or held[0] != block:
            uniforms = keyed_uniforms(self.seed, slot, block * _BLOCK, _BLOCK)
            seconds = self.law(slot).draws(uniforms, slot, block * _BLOCK)
            held = self._blocks[slot] = (block, seconds.tolist())
        return held[1][index]
