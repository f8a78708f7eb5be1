"""The K-th fastest of P independent, identically distributed delays: X_{K:P}.

K-sync's update waits for it (Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS
2018, Lemma 3). Closed forms where there are some (David and Nagaraja, "Order Statistics", 3rd ed.);
otherwise E[X_{K:P}] = ∫ Q(u) f(u) du with the quantile function Q and the Beta(K, P-K+1) density
f, by the trapezoidal rule in a variable t(u) in which every one of these densities is about one
unit wide and falls exponentially at both ends:

    u = 1 / (1 + exp(-s)),  dt/ds = sqrt(1 + P u (1 - u))

In the middle t is sqrt(P) times twice the arcsine of sqrt(u), in the tails the log-odds s. The
integrand is analytic, so the rule converges faster than any power of its step.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

from gruppetto.delays.distributions import (
    Bimodal,
    Constant,
    Exponential,
    Pareto,
    ShiftedExponential,
    Uniform,
    Weibull,
)
from gruppetto.delays.empirical import Empirical
from gruppetto.delays.law import DELAYS, Delay, Floats
from gruppetto.errors import InvalidSetting

__all__ = [
    "expected_order_statistic",
    "expected_order_statistics",
    "order_statistic_variance",
    "order_statistic_variances",
]

#: Which order statistics: k's from 1 to p. Shape [K].
_Ks: TypeAlias = npt.NDArray[np.int64]

#: Step in t. Halving it changes no result by more than 1e-12.
_STEP = 0.25
#: Where the left tail of a density is cut: exp(-40) of its mass.
_CUT = 40.0
#: Log-odds at which doubles end.
_FARTHEST = 700.0
#: Elements of a work array.
_CHUNK = 2**21


def expected_order_statistic(law: Delay, k: int, p: int) -> float:
    """E[X_{k:p}]: mean seconds of the k-th fastest of p; may be infinite.

    Args:
        law: of each.
        k: 1 for the fastest, p for the slowest.
        p: how many, at least 1.

    Raises:
        InvalidSetting: k or p out of range, or a tail too heavy for double precision.

    >>> from gruppetto.delays import Exponential
    >>> round(expected_order_statistic(Exponential(mean=1.0), 10, 20), 6)
    0.668771
    """
    _check(k, p)
    return float(_means(law, np.array([k], dtype=np.int64), p)[0])


def expected_order_statistics(law: Delay, p: int) -> Floats:
    """E[X_{k:p}] for k = 1 .. p, in seconds, never falling. Shape [p].

    Raises:
        InvalidSetting: p out of range, or a tail too heavy for double precision.

    >>> from gruppetto.delays import Uniform
    >>> expected_order_statistics(Uniform(low=0.0, high=4.0), 3).tolist()
    [1.0, 2.0, 3.0]
    """
    _check(1, p)
    # Neighbours that are equal may round apart.
    return np.maximum.accumulate(_means(law, np.arange(1, p + 1, dtype=np.int64), p))


def order_statistic_variance(law: Delay, k: int, p: int) -> float:
    """Variance of X_{k:p} in seconds²; may be infinite. See :func:`expected_order_statistic`.

    >>> from gruppetto.delays import Exponential
    >>> order_statistic_variance(Exponential(mean=1.0), 2, 2)
    1.25
    """
    _check(k, p)
    return float(_variances(law, np.array([k], dtype=np.int64), p)[0])


def order_statistic_variances(law: Delay, p: int) -> Floats:
    """Variance of X_{k:p} for k = 1 .. p, in seconds². Shape [p]."""
    _check(1, p)
    return _variances(law, np.arange(1, p + 1, dtype=np.int64), p)


def _check(k: int, p: int) -> None:
    if p < 1:
        raise InvalidSetting(f"order statistics: expected p >= 1, got p={p}")
    if not 1 <= k <= p:
        raise InvalidSetting(f"order statistics: expected 1 <= k <= p, got k={k} and p={p}")


def _means(law: Delay, k: _Ks, p: int) -> Floats:
    # X_{K:P} has a mean even where X has none, if enough others are slower (for Pareto; the laws
    # that are integrated have all moments).
    match law:
        case Constant():
            return np.full(k.shape, float(law.value))
        case Exponential():
            return law.mean * _harmonic(k, p, 1)
        case ShiftedExponential():
            return law.shift + law.mean * _harmonic(k, p, 1)
        case Uniform():
            return law.low + (law.high - law.low) * k / (p + 1)
        case Pareto():
            return law.scale * np.exp(_log_pareto_moment(1.0 / law.shape, k, p))
        case Weibull() if p == 1:
            return np.array([law.expectation()])
        case Bimodal() | Empirical():
            values, probabilities = _steps(law)
            return _sum_steps(values, probabilities, k, p)
    return _integrate(law, k, p)[0]


def _variances(law: Delay, k: _Ks, p: int) -> Floats:
    match law:
        case Constant():
            return np.zeros(k.shape)
        case Exponential() | ShiftedExponential():
            return law.mean**2 * _harmonic(k, p, 2)
        case Uniform():
            relative = k * (p - k + 1) / ((p + 1.0) ** 2 * (p + 2))
            return np.asarray((law.high - law.low) ** 2 * relative, dtype=np.float64)
        case Pareto():
            return _pareto_variances(law, k, p)
        case Bimodal() | Empirical():
            values, probabilities = _steps(law)
            means = _sum_steps(values, probabilities, k, p)
            # Around one value for all k, so that little is lost where the mean is subtracted.
            origin = values - values[0]
            squares = _sum_steps(origin**2, probabilities, k, p)
            return np.asarray(np.maximum(squares - (means - values[0]) ** 2, 0.0))
    return _integrate(law, k, p)[1]


def _harmonic(k: _Ks, p: int, power: int) -> Floats:
    """Sum of 1 / i**power for i = p - k + 1 .. p."""
    terms = 1.0 / np.arange(p, 0, -1.0) ** power
    return np.asarray(np.cumsum(terms)[k - 1], dtype=np.float64)


def _log_pareto_moment(b: float, k: _Ks, p: int) -> Floats:
    """log E[(X_{k:p} / scale)**(b * shape)]; infinite where that is.

    That is the product of i / (i - b) for i = p - k + 1 .. p, or
    Γ(p+1) Γ(p-k+1-b) / (Γ(p-k+1) Γ(p+1-b)).
    """
    i = np.arange(p, 0, -1.0)
    terms = np.full(p, math.inf)
    terms[i > b] = -np.log1p(-b / i[i > b])
    return np.asarray(np.cumsum(terms)[k - 1], dtype=np.float64)


def _pareto_variances(law: Pareto, k: _Ks, p: int) -> Floats:
    b, i = 1.0 / law.shape, np.arange(p, 0, -1.0)
    # log of E[X²] / E[X]²: the product of (i - b)² / (i (i - 2b)), free of cancellation.
    terms = np.full(p, math.inf)
    known = i > 2.0 * b
    terms[known] = np.log1p(b * b / (i[known] * (i[known] - 2.0 * b)))
    logs, found = np.cumsum(terms)[k - 1], np.full(k.shape, math.inf)
    means = law.scale * np.exp(_log_pareto_moment(b, k, p))
    finite = np.isfinite(logs)
    found[finite] = means[finite] ** 2 * np.expm1(logs[finite])
    return found


# ----------------------------------------------------------------- discrete laws


def _steps(law: Bimodal | Empirical) -> tuple[Floats, Floats]:
    """Distinct values, ascending, and P(X <= value) of all but the last."""
    if isinstance(law, Bimodal):
        return np.array([law.fast, law.slow], dtype=np.float64), np.array([1.0 - law.p_slow])
    values, counts = np.unique(np.array(law.seconds), return_counts=True)
    if not values.size:
        law.expectation()  # raises: its values are still in the file
    return values, (np.cumsum(counts) / counts.sum())[:-1]


def _sum_steps(values: Floats, probabilities: Floats, k: _Ks, p: int) -> Floats:
    """E[g(X_{k:p})] for a rising g with these values: the sum of P(X_{k:p} > x) over the steps.

    X_{k:p} > x if fewer than k of p are not: a binomial probability.
    """
    rises = np.diff(values)
    found = np.full(k.shape, values[0])
    if k.size == 1:
        return np.asarray(found + rises @ special.bdtr(float(k[0]) - 1, p, probabilities))
    counts = np.arange(p, dtype=np.float64)  # a count of p is never fewer than k
    log_choose = special.gammaln(p + 1) - special.gammaln(counts + 1)
    log_choose -= special.gammaln(p - counts + 1)
    size = max(1, _CHUNK // p)
    for start in range(0, rises.size, size):
        f = probabilities[start : start + size, None]
        exponents = log_choose + special.xlogy(counts, f) + special.xlog1py(p - counts, -f)
        # The sum over the steps first, then over the counts: both are of positive terms.
        found += np.cumsum(rises[start : start + size] @ np.exp(exponents))[k - 1]
    return found


# ------------------------------------------------------------------- quadrature


def _integrate(law: Delay, k: _Ks, p: int) -> tuple[Floats, Floats]:
    """Mean and variance of X_{k:p} for each k."""
    unit = law.expectation()
    s = _nodes(-(_CUT + math.log(p)), _upper_end(law, p), p)
    log_u, log_rest = -np.logaddexp(0.0, -s), -np.logaddexp(0.0, s)
    below = s <= 0.0
    seconds = np.empty_like(s)
    seconds[below] = law.quantile(np.exp(log_u[below]))
    seconds[~below] = law.upper_quantile(np.exp(log_rest[~below]))
    seconds /= unit  # their squares are then sure to be finite
    # du/dt = u (1 - u) ds/dt
    log_width = -0.5 * np.log1p(p * np.exp(log_u + log_rest))
    means, variances = np.empty(k.shape), np.empty(k.shape)
    size = max(1, _CHUNK // s.size)
    for start in range(0, k.size, size):
        some = k[start : start + size, None]
        exponents = some * log_u + (p - some + 1) * log_rest + log_width
        weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mean = means[start : start + size] = weights @ seconds
        squares = (seconds[None, :] - mean[:, None]) ** 2
        variances[start : start + size] = np.einsum("kn,kn->k", weights, squares)
    with np.errstate(over="ignore"):
        return means * unit, variances * unit * unit


def _upper_end(law: Delay, p: int) -> float:
    """The log-odds beyond which nothing is left of E[X_{p:p}²].

    Raises:
        InvalidSetting: something always is.
    """
    end, typical = _CUT + math.log(p), law.expectation()
    while end <= _FARTHEST and 0.0 < typical < math.inf:
        with np.errstate(over="ignore"):
            far = float(law.upper_quantile(np.array([math.exp(-end)]))[0])
        # What is left is about far² p exp(-end).
        if 2.0 * (math.log(far) - math.log(typical)) + math.log(p) - end < -_CUT:
            return end
        end *= 1.5
    raise InvalidSetting(
        f"delay {DELAYS.format(law)}: its tail is too heavy for order statistics in double "
        "precision; expected a lighter one"
    )


def _nodes(low: float, high: float, p: int) -> Floats:
    """Log-odds between two, equally far apart in t."""
    ends = _to_t(np.array([low, high]), p)
    t = np.arange(ends[0], ends[1], _STEP)
    # t and s differ smoothly: a coarse table, then Newton.
    table = np.linspace(low, high, 4000)
    s = np.interp(t, _to_t(table, p), table)
    for _ in range(20):
        change = (_to_t(s, p) - t) / np.sqrt(1.0 + p / (4.0 * np.cosh(s / 2.0) ** 2))
        s = s - change
        if np.max(np.abs(change)) < 1e-13 * high:
            break
    return np.asarray(s)


def _to_t(s: Floats, p: int) -> Floats:
    """The integral of dt/ds from 0."""
    y = np.sinh(s / 2.0)
    root = math.sqrt(p)
    return np.asarray(
        2.0 * np.arcsinh(2.0 * y / math.sqrt(p + 4.0))
        + root * np.arctan(root * y / np.hypot(math.sqrt(p + 4.0), 2.0 * y))
    )
