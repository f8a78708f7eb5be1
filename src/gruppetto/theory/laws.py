"""The delays of P learners, one law each, and the questions that closed forms ask of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gruppetto.delays import Aging, Constant, Delay, Empirical, expected_order_statistic
from gruppetto.errors import InvalidSetting

__all__ = ["Laws", "check_num_learners"]

Floats: TypeAlias = npt.NDArray[np.float64]

#: What is beyond the last node may be this much of the integral.
_TAIL = 1e-9
_CHUNK = 8192


def check_num_learners(num_learners: int) -> None:
    """Refuse fewer than one learner."""
    if num_learners < 1:
        raise InvalidSetting(
            f"theory: expected a number of learners >= 1, got num_learners={num_learners}"
        )


@dataclass(frozen=True)
class Laws:
    """The law of each learner's seconds per mini-batch; all independent."""

    laws: tuple[Delay, ...]

    @classmethod
    def of(
        cls, law: Delay, num_learners: int, per_learner: Mapping[int, Delay] | None = None
    ) -> Laws:
        """One law for all learners, and other laws for some.

        Raises:
            InvalidSetting: fewer than 1 learner, or a law for one that does not exist.
        """
        check_num_learners(num_learners)
        own = dict(per_learner) if per_learner is not None else {}
        for learner in own:
            if not 0 <= learner < num_learners:
                raise InvalidSetting(
                    f"theory: a law is given for learner {learner}; expected a learner from 0 to "
                    f"{num_learners - 1}"
                )
        return cls(tuple(own.get(learner, law) for learner in range(num_learners)))

    def __len__(self) -> int:
        return len(self.laws)

    def _distinct(self) -> tuple[Delay, ...]:
        return tuple(dict.fromkeys(self.laws))

    @property
    def rate(self) -> float:
        """Λ = Σ 1/E[X_i]: mini-batches per second of learners that never wait; may be infinite.

        >>> from gruppetto.delays import Exponential
        >>> Laws.of(Exponential(mean=2.0), 3, {0: Exponential(mean=1.0)}).rate
        2.0
        """
        means = [law.expectation() for law in self.laws]
        if 0.0 in means:
            return math.inf
        # Of learners alike exactly P/E[X], without the rounding of a sum; 0 if E[X] is infinite.
        return len(means) / means[0] if len(set(means)) == 1 else sum(1.0 / mean for mean in means)

    def renewal_time(self, n: float) -> float:
        """n/Λ: mean seconds of n mini-batches of learners that never wait; may be infinite."""
        rate = self.rate
        return n / rate if rate > 0 else math.inf

    @property
    def constant(self) -> float | None:
        """Seconds, where every mini-batch of every learner takes the same."""
        first = self.laws[0]
        return first.value if isinstance(first, Constant) and len(self._distinct()) == 1 else None

    def _all_age(self, *how: Aging) -> bool:
        return all(law.aging in how for law in self._distinct())

    @property
    def are_independent(self) -> bool:
        """Whether every mini-batch's time is a new draw: what all but renewal rests on."""
        return all(law.is_independent for law in self._distinct())

    @property
    def are_memoryless(self) -> bool:
        """All exponential."""
        return self._all_age(Aging.MEMORYLESS)

    @property
    def are_new_longer(self) -> bool:
        """All new-longer-than-used, in the weak sense: exponential laws are both."""
        return self._all_age(Aging.NEW_LONGER_THAN_USED, Aging.MEMORYLESS)

    @property
    def are_new_shorter(self) -> bool:
        """All new-shorter-than-used, in the weak sense: exponential laws are both."""
        return self._all_age(Aging.NEW_SHORTER_THAN_USED, Aging.MEMORYLESS)

    def order_statistic(self, k: int) -> float | None:
        """E[X_{K:P}] in seconds, the K-th smallest of one draw each; may be infinite.

        Where laws differ it is ∫ P(fewer than K have finished by t) dt, the number that have
        being Poisson-binomial.

        Args:
            k: K, from 1 to P.

        Returns:
            None where a tail is too heavy for the integral to be computed.

        >>> from gruppetto.delays import Constant, Exponential
        >>> slow = Laws.of(Constant(value=1.0), 3, {2: Constant(value=5.0)})
        >>> [round(slow.order_statistic(k), 9) for k in (1, 2, 3)]
        [1.0, 1.0, 5.0]
        >>> mixed = Laws.of(Exponential(mean=1.0), 2, {1: Exponential(mean=0.5)})
        >>> [round(mixed.order_statistic(k), 9) for k in (1, 2)]  # 1/3 and 1 + 1/2 - 1/3
        [0.333333333, 1.166666667]
        """
        for law in self._distinct():
            law.expectation()  # a law without values says so, before any integral does
        if len(self._distinct()) == 1:
            try:
                return float(expected_order_statistic(self.laws[0], k, len(self)))
            except InvalidSetting:  # K is in range, so it is the tail
                return None
        edges = np.unique(np.concatenate([[0.0], *(_edges(law) for law in self._distinct())]))
        nodes, weights = np.polynomial.legendre.leggauss(5)
        half = np.diff(edges) / 2.0
        at = (edges[:-1, None] + half[:, None] * (1.0 + nodes)).ravel()
        weight = (half[:, None] * weights).ravel()
        total = 0.0
        for start in range(0, at.size, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            total += float(weight[chunk] @ self._fewer_than(k, at[chunk]))
        tail = float(edges[-1] * self._fewer_than(k, np.nextafter(edges[-1:], 0.0))[0])
        return total if tail <= _TAIL * total or self._end() <= edges[-1] else None

    def _end(self) -> float:
        """After so many seconds everybody has finished for certain; mostly infinity."""
        last = np.array([5e-324])
        with np.errstate(over="ignore"):
            return max(float(law.upper_quantile(last)[0]) for law in self._distinct())

    def _fewer_than(self, k: int, at: Floats) -> Floats:
        """P(fewer than k learners have finished by t), elementwise."""
        late = {law: law.sf(at) for law in self._distinct()}
        # Counting those that have not finished adds positive numbers only, however small.
        unfinished = np.zeros((len(self) + 1, at.size))
        unfinished[0] = 1.0
        for law in self.laws:
            stepped = unfinished[:-1] * late[law]
            unfinished *= 1.0 - late[law]
            unfinished[1:] += stepped
        return np.asarray(unfinished[len(self) - k + 1 :].sum(axis=0), dtype=np.float64)


def _edges(law: Delay) -> Floats:
    """Where to cut the axis of time for one law: dense where its probability is, out to 1e-300."""
    if isinstance(law, Empirical):
        return np.asarray(law.seconds, dtype=np.float64)
    near = np.arange(1.0, 74.0) / 2.0
    far = np.arange(37.0, 690.0)
    with np.errstate(over="ignore"):
        low = law.quantile(1.0 / (1.0 + np.exp(np.concatenate([[0.0], near]))))
        high = law.upper_quantile(np.exp(-np.concatenate([np.log1p(np.exp(near)), far])))
    edges = np.concatenate([low, high])
    return np.asarray(edges[np.isfinite(edges)], dtype=np.float64)
