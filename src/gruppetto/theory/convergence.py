"""Bounds on the error after so many updates, or seconds, of plain SGD with stale gradients.

The model: F is L-smooth; 2c(F(w) − F*) ≤ ‖∇F(w)‖² (strongly convex, or less); the gradient of m
samples is unbiased with variance at most σ²/m + (M_G/m)‖∇F(w)‖²; an update is the plain average of
K gradients times the learning rate η, without momentum, decay or modulation. Staleness enters
through one number, γ′ = 1 − γ + p₀/2 (:func:`staleness_factor`). Gaps are E[F(w)] − F*, in units of
the loss.

Source: Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win the Race", AISTATS
2018; its numbers of equations and theorems. Three of its statements are corrected here, each where
it is used: :func:`safe_learning_rate`, :func:`staleness_factor`, :func:`compensated_error`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from gruppetto.errors import InvalidSetting

__all__ = [
    "SYNCHRONOUS",
    "Problem",
    "compensated_error",
    "error_after_time",
    "error_after_updates",
    "error_floor",
    "gradient_after_updates",
    "gradient_floor",
    "safe_learning_rate",
    "staleness_factor",
    "time_to_reach",
    "updates_to_reach",
]

Floats: TypeAlias = npt.NDArray[np.float64]

#: γ′ of Lemma 2: no staleness. It is not the best that the proof gives, see staleness_factor.
SYNCHRONOUS: Final = 1.0


def _number(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not (low <= value <= high and math.isfinite(value)):
        between = f">= {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidSetting(f"convergence bound: expected {name} {between}, got {name}={value}")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidSetting(
            f"convergence bound: expected {name} > 0 and finite, got {name}={value}"
        )


def _whole(name: str, value: int) -> None:
    if value < 1 or value != int(value):
        raise InvalidSetting(
            f"convergence bound: expected {name} to be a whole number >= 1, got {name}={value}"
        )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The constants of the assumptions (§2.4), and where training starts.

    >>> Problem(smoothness=1.0, convexity=2.0, variance=1.0, batch_size=1, initial_gap=1.0)
    Traceback (most recent call last):
    gruppetto.errors.InvalidSetting: convergence bound: expected convexity c from 0 to the
        smoothness L = 1, got c=2.0
    """

    #: L: ‖∇F(w) − ∇F(v)‖ ≤ L‖w − v‖.
    smoothness: float
    #: c: 2c(F(w) − F*) ≤ ‖∇F(w)‖², at most L; 0 where F is not convex.
    convexity: float
    #: σ²: of one sample's gradient, the part that does not vanish with ‖∇F(w)‖.
    variance: float
    #: m: samples of one mini-batch.
    batch_size: int
    #: F(w_0) − F*.
    initial_gap: float
    #: M_G: one sample's variance grows by this times ‖∇F(w)‖².
    variance_growth: float = 0.0

    def __post_init__(self) -> None:
        _positive("smoothness", self.smoothness)
        if not 0 <= self.convexity <= self.smoothness:
            raise InvalidSetting(
                "convergence bound: expected convexity c from 0 to the smoothness "
                f"L = {self.smoothness:g}, got c={self.convexity}"
            )
        _number("variance", self.variance, 0)
        _whole("batch_size", self.batch_size)
        _number("initial_gap", self.initial_gap, 0)
        _number("variance_growth", self.variance_growth, 0)


def staleness_factor(gamma: float, p0: float) -> float:
    """γ′ = 1 − γ + p₀/2 of Theorem 3; the synchronous cells have :data:`SYNCHRONOUS`.

    γ: E‖∇F(w_j) − ∇F(w_τ)‖² ≤ γ E‖∇F(w_j)‖²; p₀: a gradient is fresh (τ = j) with at least this
    probability, whatever came before. 1/γ′ multiplies the floor, γ′ the rate of decay.

    Corrected: the paper has it that p₀/2 > γ makes an update of the asynchronous cells worth more
    than one of the synchronous. It compares two bounds of which one is less tight: with γ = 0 and
    p₀ = 1, which is k-async with K = P and so hardsync, Theorem 3 gives γ′ = 1.5 to the algorithm
    that has 1 in Lemma 2. Like is compared with like by taking 1.5 for the synchronous cells too,
    and then no staleness helps: γ′ ≤ 1.5.

    Raises:
        InvalidSetting: γ or p₀ outside [0, 1]. An estimate of γ above 1 means that the theory
            says nothing of such a run.

    >>> staleness_factor(gamma=0.1, p0=0.05)
    0.925
    >>> staleness_factor(gamma=0.0, p0=1.0)
    1.5
    """
    _number("gamma", gamma, 0, 1)
    _number("p0", p0, 0, 1)
    return 1.0 - gamma + p0 / 2.0


def safe_learning_rate(problem: Problem, k: int) -> float:
    """The largest η the bounds hold for: η ≤ 1 / (2L (M_G/(Km) + 1)), every cell.

    Lemma 2 (k-sync) prints this. Corrected: Theorem 3 (k-async, k-batch-async) prints 1/K in place
    of the 1, a rate up to K times larger. Its proof bounds the average v of K stale gradients by
    E‖v‖² ≤ σ²/(Km) + (1/K)(M_G/(Km) + 1) Σ‖∇F(w_τ)‖², the sum over K, by (36), and that needs the
    condition here. The paper's "maximum max{1/c, ...}" must mean min; 1/c is never the smaller,
    since c ≤ L.

    >>> problem = Problem(smoothness=10.0, convexity=1.0, variance=1.0, batch_size=8,
    ...                   initial_gap=1.0, variance_growth=32.0)
    >>> safe_learning_rate(problem, k=4), safe_learning_rate(problem, k=1)
    (0.025, 0.01)
    """
    _whole("k", k)
    growth = problem.variance_growth / (k * problem.batch_size)
    return 1.0 / (2.0 * problem.smoothness * (growth + 1.0))


def _check(problem: Problem, k: int, learning_rate: float, gamma_prime: float) -> None:
    _positive("learning_rate", learning_rate)
    safe = safe_learning_rate(problem, k)
    if learning_rate > safe * (1.0 + 1e-12):
        raise InvalidSetting(
            f"convergence bound: it holds for a learning_rate of at most {safe:g} = "
            f"1/(2L(M_G/(Km) + 1)), got learning_rate={learning_rate}"
        )
    if not 0 < gamma_prime <= 1.5:
        raise InvalidSetting(
            "convergence bound: expected gamma_prime above 0 and at most 1.5, "
            f"got gamma_prime={gamma_prime}"
        )


def _decay(problem: Problem, learning_rate: float, gamma_prime: float) -> float:
    """η c γ′, what an update takes off the gap above the floor."""
    if problem.convexity <= 0:
        raise InvalidSetting(
            "convergence bound: expected convexity c > 0; without it use "
            "gradient_after_updates, which bounds gradients instead of the error"
        )
    return learning_rate * problem.convexity * gamma_prime


def error_floor(
    problem: Problem, k: int, learning_rate: float, *, gamma_prime: float = SYNCHRONOUS
) -> float:
    """Where the bound ends: η L σ² / (2 c γ′ K m). Lemma 2 with γ′ = 1, Theorem 3 otherwise.

    >>> problem = Problem(smoothness=2.0, convexity=0.5, variance=4.0, batch_size=8, initial_gap=1)
    >>> error_floor(problem, k=4, learning_rate=0.1)
    0.025
    """
    _check(problem, k, learning_rate, gamma_prime)
    _decay(problem, learning_rate, gamma_prime)
    noise = learning_rate * problem.smoothness * problem.variance
    return noise / (2.0 * problem.convexity * gamma_prime * k * problem.batch_size)


def error_after_updates(
    problem: Problem,
    k: int,
    learning_rate: float,
    updates: npt.ArrayLike,
    *,
    gamma_prime: float = SYNCHRONOUS,
) -> Floats:
    """E[F(w_J)] − F* ≤ floor + (1 − η c γ′)^J (F(w_0) − F* − floor), elementwise in J.

    Lemma 2 (k-sync, k-batch-sync: γ′ = 1); Theorem 3 and Corollary 2 (k-async, k-batch-async).

    Args:
        problem: the constants.
        k: K, gradients averaged by an update.
        learning_rate: η, at most :func:`safe_learning_rate`.
        updates: J, any shape, each >= 0; need not be whole.
        gamma_prime: γ′, see :func:`staleness_factor`.

    >>> problem = Problem(smoothness=2.0, convexity=0.5, variance=4.0, batch_size=8, initial_gap=1)
    >>> error_after_updates(problem, 4, 0.1, [0, 1, 10_000])
    array([1.     , 0.95125, 0.025  ])
    """
    floor = error_floor(problem, k, learning_rate, gamma_prime=gamma_prime)
    j = np.asarray(updates, dtype=np.float64)
    if not np.all(j >= 0):
        raise InvalidSetting(f"convergence bound: expected updates >= 0, got {j.min()}")
    decay = _decay(problem, learning_rate, gamma_prime)
    left = np.exp(j * math.log1p(-decay))
    return np.asarray(floor + left * (problem.initial_gap - floor), dtype=np.float64)


def updates_to_reach(
    problem: Problem,
    k: int,
    learning_rate: float,
    error: float,
    *,
    gamma_prime: float = SYNCHRONOUS,
) -> int | None:
    """The first J at which :func:`error_after_updates` is at most ``error``.

    J = ⌈ln((F(w_0) − F* − floor) / (error − floor)) / −ln(1 − η c γ′)⌉.

    Returns:
        None where the floor is not below ``error``: a smaller rate, or a larger K, is needed.

    >>> problem = Problem(smoothness=2.0, convexity=0.5, variance=4.0, batch_size=8, initial_gap=1)
    >>> updates_to_reach(problem, 4, 0.1, 0.1), updates_to_reach(problem, 4, 0.1, 0.02)
    (51, None)
    """
    _positive("error", error)
    floor = error_floor(problem, k, learning_rate, gamma_prime=gamma_prime)
    if problem.initial_gap <= error:
        return 0
    if floor >= error:
        return None
    decay = _decay(problem, learning_rate, gamma_prime)
    ratio = (problem.initial_gap - floor) / (error - floor)
    # A hair off, so that rounding does not ask for one more.
    return math.ceil(math.log(ratio) / -math.log1p(-decay) - 1e-9)


def error_after_time(
    problem: Problem,
    k: int,
    learning_rate: float,
    seconds: npt.ArrayLike,
    update_time: float,
    *,
    gamma_prime: float = SYNCHRONOUS,
) -> Floats:
    """The bound against the clock (§4, Fig. 7): :func:`error_after_updates` at J = ⌊t/τ⌋.

    τ is the expected time per update. Putting the mean number of updates into the bound makes it a
    curve to compare protocols by, and no longer a bound: the number is random, and the mean of a
    convex function of it is larger.

    Args:
        problem: the constants.
        k: K, gradients averaged by an update.
        learning_rate: η, at most :func:`safe_learning_rate`.
        seconds: t, any shape, each >= 0.
        update_time: τ, seconds, see :func:`gruppetto.theory.update_time`.
        gamma_prime: γ′, see :func:`staleness_factor`.

    >>> problem = Problem(smoothness=2.0, convexity=0.5, variance=4.0, batch_size=8, initial_gap=1)
    >>> error_after_time(problem, 4, 0.1, [0.0, 0.49, 0.5], update_time=0.5)
    array([1.     , 1.     , 0.95125])
    """
    _positive("update_time", update_time)
    # The same hair as above: 0.3 seconds of updates of 0.1 are three.
    updates = np.floor(np.asarray(seconds, dtype=np.float64) / update_time + 1e-9)
    return error_after_updates(problem, k, learning_rate, updates, gamma_prime=gamma_prime)


def time_to_reach(
    problem: Problem,
    k: int,
    learning_rate: float,
    error: float,
    update_time: float,
    *,
    gamma_prime: float = SYNCHRONOUS,
) -> float | None:
    """Expected seconds until the bound is at most ``error``: updates times update time.

    Returns:
        None where the floor is not below ``error``.

    >>> problem = Problem(smoothness=2.0, convexity=0.5, variance=4.0, batch_size=8, initial_gap=1)
    >>> time_to_reach(problem, 4, 0.1, 0.1, update_time=0.5)
    25.5
    """
    _positive("update_time", update_time)
    updates = updates_to_reach(problem, k, learning_rate, error, gamma_prime=gamma_prime)
    return None if updates is None else updates * update_time


def gradient_floor(
    problem: Problem, k: int, learning_rate: float, *, gamma_prime: float = SYNCHRONOUS
) -> float:
    """Where the bound on mean squared gradients ends: L η σ² / (K m γ′) (Theorem 5).

    >>> problem = Problem(smoothness=2.0, convexity=0.0, variance=4.0, batch_size=8, initial_gap=1)
    >>> gradient_floor(problem, k=4, learning_rate=0.1)
    0.025
    """
    _check(problem, k, learning_rate, gamma_prime)
    noise = learning_rate * problem.smoothness * problem.variance
    return noise / (k * problem.batch_size * gamma_prime)


def gradient_after_updates(
    problem: Problem,
    k: int,
    learning_rate: float,
    updates: npt.ArrayLike,
    *,
    gamma_prime: float = SYNCHRONOUS,
) -> Floats:
    """Theorem 5, without convexity, elementwise in J.

    (1/(J+1)) Σ_{j=0..J} E‖∇F(w_j)‖² ≤ 2(F(w_0) − F*) / ((J+1) η γ′) + L η σ² / (K m γ′).

    The paper states it for the asynchronous cells; its proof with γ = 0 gives the synchronous ones.

    >>> problem = Problem(smoothness=2.0, convexity=0.0, variance=4.0, batch_size=8, initial_gap=1)
    >>> gradient_after_updates(problem, 4, 0.1, [0, 99, 10_000_000])
    array([20.025   ,  0.225   ,  0.025002])
    """
    floor = gradient_floor(problem, k, learning_rate, gamma_prime=gamma_prime)
    j = np.asarray(updates, dtype=np.float64)
    if not np.all(j >= 0):
        raise InvalidSetting(f"convergence bound: expected updates >= 0, got {j.min()}")
    start = 2.0 * problem.initial_gap / ((j + 1.0) * learning_rate * gamma_prime)
    return np.asarray(floor + start, dtype=np.float64)


def compensated_error(
    problem: Problem, learning_rates: Sequence[float], distance_bound: float, *, p0: float = 0.0
) -> float:
    """Theorem 4: async (K = 1) with rates η_j for which η_j E‖w_j − w_τ(j)‖² ≤ C, by (11).

    E[F(w_J)] − F* ≤ e_J, where e_0 = F(w_0) − F* and, one step per update,
    e_j = (1 − ρ_j) e_{j−1} + Δ_j, ρ_j = η_j c (1 + p₀/2), Δ_j = η_j² L σ²/(2m) + C L²/2.

    C replaces the assumption on γ. At a constant rate the floor is Δ/ρ, so C adds
    C L² / (2 η c (1 + p₀/2)) to it. Corrected: the sum printed has J + 1 terms Δ_0 ... Δ_J for J
    updates; the first belongs to none of them and only loosens the bound.

    Args:
        problem: the constants.
        learning_rates: η_1 ... η_J, each at most :func:`safe_learning_rate` for k=1.
        distance_bound: C, learning rate times squared distance of weights.
        p0: a gradient is fresh with at least this probability.

    >>> problem = Problem(smoothness=2.0, convexity=0.5, variance=4.0, batch_size=8, initial_gap=1)
    >>> round(compensated_error(problem, [0.1], distance_bound=0.001), 6)
    0.957
    """
    _number("distance_bound", distance_bound, 0)
    _number("p0", p0, 0, 1)
    error = problem.initial_gap
    for rate in learning_rates:
        _check(problem, 1, rate, SYNCHRONOUS)
        rho = _decay(problem, rate, 1.0 + p0 / 2.0)
        noise = rate**2 * problem.smoothness * problem.variance / (2.0 * problem.batch_size)
        error = (1.0 - rho) * error + noise + distance_bound * problem.smoothness**2 / 2.0
    return error
