"""How many gradients an update should wait for, as the error falls: AdaSync's rule."""

from __future__ import annotations

import math
from typing import Literal

from gruppetto.errors import InvalidSetting

__all__ = ["adapted_k"]


def adapted_k(
    k0: int, loss0: float, loss: float, num_learners: int, *, time_grows: Literal["linear", "log"]
) -> int:
    """AdaSync: the K that minimises the bound of Theorem 5 over the next interval of time.

    With J = t/τ(K) updates in t seconds the bound is
    u(K) = 2(F(w) − F*) τ(K) / (t η γ′) + L η σ² / (K m γ′). Setting u′(K) = 0 at the start, where
    K is K₀, and now, all unknown constants cancel (γ′ and F* ≈ 0 taken as constant):

    * "linear", τ(K) = K E[X]/P (k-batch-async, k-batch-sync): K = K₀ sqrt(F(w_0)/F(w));
    * "log", τ(K) ≈ Δ + ln(P/(P−K))/μ (k-sync; k-async with exponential delays):
      K²/(P−K) = r, r = (K₀²/(P−K₀)) F(w_0)/F(w), so K = (−r + sqrt(r² + 4rP))/2; K₀ < P.

    The AISTATS paper has the ingredients only; this is our derivation. Re-implementations of its
    extension (Dutta, Wang, Joshi, arXiv:2003.10579) use the same rules, but the square root also
    for k-async. (K₀, F(w_0)) stay what they were at the start: renewing one of them compounds.

    Args:
        k0: K₀, at the start.
        loss0: F(w_0), > 0.
        loss: F(w), > 0, measured the same way.
        num_learners: P.
        time_grows: how the time per update grows with K.

    Returns:
        K rounded to the nearest whole number, from 1 to P.

    >>> [adapted_k(1, 2.3, 2.3 / ratio, 8, time_grows="log") for ratio in (1, 4.6, 46)]
    [1, 2, 5]
    >>> [adapted_k(1, 2.3, 2.3 / ratio, 8, time_grows="linear") for ratio in (1, 4.6, 46)]
    [1, 2, 7]
    """
    return min(max(round(_adapted(k0, loss0, loss, num_learners, time_grows)), 1), num_learners)


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
    r = k0**2 / (num_learners - k0) * loss0 / loss
    # (−r + sqrt(r² + 4rP))/2 without the difference of two large numbers.
    return 2.0 * num_learners / (1.0 + math.sqrt(1.0 + 4.0 * num_learners / r))


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise InvalidSetting(f"adapted k: expected {name} >= 1, got {name}={value}")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidSetting(f"adapted k: expected {name} > 0 and finite, got {name}={value}")
