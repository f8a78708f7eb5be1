"""AdaSync: K grows as the loss falls, so that early updates come fast and late ones are exact.

Cut run time into intervals of t seconds. From the weights w at the beginning of one, J = t/τ(K)
updates follow, where τ(K) is the mean time per update, and the bound of Theorem 5 of Dutta et al.
2018 on the mean squared gradient is

    u(K) = 2(F(w) − F*) τ(K) / (t η γ′) + L η σ² / (K m γ′).

u′(K) = 0 says K² τ′(K) = C / (F(w) − F*) with a C of unknown constants. Take F* ≈ 0 and γ′ as
constant: then C is known from the start, where K is K₀ by the user's choice, and cancels.

* k-batch-sync, k-batch-async: τ(K) = K E[X]/P, exact for exponential delays, so τ′ is constant
  and **K = K₀ sqrt(F(w₀)/F(w))**.
* k-sync, k-async: τ(K) = E[X_{K:P}] ≈ Δ + ln(P/(P−K))/μ, for (shifted) exponential delays, so
  τ′ ≈ 1/(μ(P−K)) and **K²/(P−K) = r with r = K₀²/(P−K₀) · F(w₀)/F(w)**, whose root is
  **K = (−r + sqrt(r² + 4rP))/2**; it needs K₀ < P.

An open question is k-async. Exponential delays give it the same τ(K) as k-sync (Lemma 5 with
equality), hence the formula here. Re-implementations of the paper that AdaSync comes from (Dutta,
Wang, Joshi, arXiv:2003.10579), which we could not read, use the square root for k-async instead.
No derivation known to us gives that, so τ(K) decides. The two are close while K is small:
of 8 learners, K₀ = 1 and a loss 4.6 times smaller, 1.99 and 2.14; 46 times smaller, 4.67 and 6.78.

(K₀, F(w₀)) stay what they were at the start: renewing one of them alone would compound the growth.
K may also shrink, where the loss rises.

Source: the bound and τ(K) are those of Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale
Gradients Can Win the Race", AISTATS 2018; the rules are derived here.
"""

from __future__ import annotations

import copy
import math
import typing
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from gruppetto.errors import InvalidSetting
from gruppetto.protocols.collect import (
    K_ASYNC,
    K_BATCH_ASYNC,
    K_BATCH_SYNC,
    K_SYNC,
    PROTOCOLS,
    Cell,
    Protocol,
)

__all__ = ["AdaSync", "Over", "adapted_k"]

Over: TypeAlias = Literal["k-sync", "k-batch-sync", "k-async", "k-batch-async"]

_CELLS: Final[dict[str, Cell]] = {
    "k-sync": K_SYNC,
    "k-batch-sync": K_BATCH_SYNC,
    "k-async": K_ASYNC,
    "k-batch-async": K_BATCH_ASYNC,
}


@PROTOCOLS.register("adasync")
@dataclass(frozen=True)
class AdaSync(Protocol):
    """One of the four cells, with a K that grows as the training loss falls.

    K changes at a measurement of progress and at no other event. It is rounded to the nearest whole
    number (a tie to the even one) and lies from 1 to P, the live learners at that moment; if some
    die later, an update waits for no more than are left. A loss that is not finite leaves K as
    it is, one of 0 or less is the limit of the rule, K = P, and F(w₀) is the first loss that is
    finite and above 0. Where deaths leave P ≤ K₀ in a cell that waits for distinct learners, K = P.

    >>> start = AdaSync(over="k-sync", k0=1, interval=60.0).measured(2.3, 8)
    >>> [start.measured(2.3 / ratio, 8).k for ratio in (1, 4.6, 46)]
    [1, 2, 5]
    """

    #: The cell: who contributes, and what happens to unfinished work.
    over: Over
    #: K₀, at the start.
    k0: int
    #: Seconds of run time between measurements.
    interval: float
    #: K by the newest measurement.
    k: int = field(init=False)
    #: F(w₀), of the first measurement.
    first_loss: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.over not in typing.get_args(Over):
            raise InvalidSetting(
                f"adasync: expected over to be one of {', '.join(_CELLS)}, got over={self.over}"
            )
        if self.k0 < 1:
            raise InvalidSetting(f"adasync: expected k0 >= 1, got k0={self.k0}")
        if not (self.interval > 0 and math.isfinite(self.interval)):
            raise InvalidSetting(
                f"adasync: expected interval > 0 seconds and finite, got interval={self.interval}"
            )
        object.__setattr__(self, "k", self.k0)

    @property
    def cell(self) -> Cell:
        """The cell it is over."""
        return _CELLS[self.over]

    @property
    def measures_every(self) -> float | None:
        """``interval``."""
        return self.interval

    def num_to_wait(self, num_live: int) -> int:
        """K by the newest measurement, and no more than there are learners."""
        return min(self.k, max(1, num_live))

    def most_to_wait(self, num_learners: int) -> int:
        """P."""
        return num_learners

    def check(self, num_learners: int) -> None:
        """Refuse a number of learners this protocol cannot run with.

        Raises:
            InvalidSetting: K₀ > P; K₀ = P in a cell that waits for distinct learners, other than
                of a single one: K could only stay there.
        """
        is_distinct = self.cell.distinct and num_learners > 1
        if self.k0 > num_learners or (is_distinct and self.k0 == num_learners):
            raise InvalidSetting(
                f"{PROTOCOLS.format(self)}: K goes from k0 to the number of learners; expected k0 "
                f"{'<' if is_distinct else '<='} learners = {num_learners}"
            )

    def measured(self, loss: float | None, num_live: int) -> AdaSync:
        """The protocol with the K that a loss gives it; see the class for what is no loss."""
        if loss is None or num_live < 1:
            return self
        first = loss if self.first_loss is None else self.first_loss
        if first <= 0:
            return self
        after = copy.copy(self)
        object.__setattr__(after, "first_loss", first)
        object.__setattr__(after, "k", self._k(first, loss, num_live))
        return after

    def _k(self, first: float, loss: float, num_live: int) -> int:
        if loss <= 0 or (self.cell.distinct and self.k0 >= num_live):
            return num_live
        grows: Literal["linear", "log"] = "log" if self.cell.distinct else "linear"
        return adapted_k(self.k0, first, loss, num_live, time_grows=grows)


def adapted_k(
    k0: int, loss0: float, loss: float, num_learners: int, *, time_grows: Literal["linear", "log"]
) -> int:
    """AdaSync's rule: the K that minimises the bound of the next interval; see the module.

    Args:
        k0: K₀, at the start.
        loss0: F(w₀), > 0.
        loss: F(w), > 0, measured the same way.
        num_learners: P.
        time_grows: how the time per update grows with K: "linear" in the k-batch cells, "log" in
            those that wait for distinct learners.

    Returns:
        K rounded to the nearest whole number, from 1 to P.

    Raises:
        InvalidSetting: a number out of its range, or K₀ ≥ P where time grows with the logarithm.

    >>> [adapted_k(1, 2.3, 2.3 / ratio, 8, time_grows="log") for ratio in (1, 4.6, 46)]
    [1, 2, 5]
    >>> [adapted_k(1, 2.3, 2.3 / ratio, 8, time_grows="linear") for ratio in (1, 4.6, 46)]
    [1, 2, 7]
    """
    exact = _adapted(k0, loss0, loss, num_learners, time_grows)
    return round(min(max(exact, 1.0), float(num_learners)))


def _adapted(k0: int, loss0: float, loss: float, num_learners: int, time_grows: str) -> float:
    _at_least_one("k0", k0)
    _at_least_one("num_learners", num_learners)
    _positive("loss0", loss0)
    _positive("loss", loss)
    if time_grows == "linear":
        return k0 * math.sqrt(loss0 / loss)
    if time_grows != "log":
        raise InvalidSetting(f"adapted k: expected time_grows linear or log, got {time_grows!r}")
    if k0 >= num_learners:
        raise InvalidSetting(
            f"adapted k: expected k0 below the number of learners, {num_learners}, where an "
            f"update's time grows with the logarithm, got k0={k0}"
        )
    r = k0**2 / (num_learners - k0) * (loss0 / loss)
    if r == 0.0:  # too small a ratio for floats
        return 0.0
    # (−r + sqrt(r² + 4rP))/2 without the difference of two large numbers.
    return 2.0 * num_learners / (1.0 + math.sqrt(1.0 + 4.0 * num_learners / r))


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise InvalidSetting(f"adapted k: expected {name} >= 1, got {name}={value}")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidSetting(f"adapted k: expected {name} > 0 and finite, got {name}={value}")
