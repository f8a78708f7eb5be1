"""The families that are fitted to measured times, each by maximum likelihood.

A time that was cut off (a cancelled job) is *right-censored*: all that is known is that the job
would have taken longer. It contributes P(X > c) to the likelihood, a whole time its density.

Lawless, "Statistical Models and Methods for Lifetime Data", 2nd ed., 2003, chapters 4 and 5, has
the likelihood equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from scipy import optimize, special

from gruppetto.delays.distributions import (
    Bimodal,
    Constant,
    Exponential,
    Gamma,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Weibull,
)
from gruppetto.delays.law import Floats, ScipyDelay

__all__ = ["FAMILIES", "SAME", "Family", "estimate_discrete", "log_likelihood"]

#: Times that differ by less, as a fraction of the longest, are the same up to rounding.
SAME: Final = 1e-9
#: Shapes beyond are those of a constant, and the functions at hand lose their digits.
_MAX_SHAPE: Final = 1e8

#: Whole times and censored ones, both in seconds -> the likeliest law; None where there is none.
Estimator: TypeAlias = Callable[[Floats, Floats], ScipyDelay | None]


@dataclass(frozen=True)
class Family:
    """A family and how its likeliest member is found."""

    num_parameters: int
    estimate: Estimator


def log_likelihood(law: ScipyDelay, times: Floats, censored: Floats) -> float:
    """Sum of log densities (per second) and of log P(X > c)."""
    family, parameters = law._law()
    with np.errstate(divide="ignore"):
        return float(
            np.sum(family.logpdf(times, **parameters))
            + (np.sum(family.logsf(censored, **parameters)) if censored.size else 0.0)
        )


# --------------------------------------------------------- likelihoods with an edge


def _exponential(times: Floats, censored: Floats) -> ScipyDelay | None:
    mean = float(np.sum(times) + np.sum(censored)) / times.size
    return Exponential(mean) if mean > 0.0 else None


def _shifted_exponential(times: Floats, censored: Floats) -> ScipyDelay | None:
    shift = float(np.min(times))
    rest = np.sum(times - shift) + np.sum(np.maximum(censored - shift, 0.0))
    mean = float(rest) / times.size
    return ShiftedExponential(shift, mean) if mean > 0.0 else None


def _pareto(times: Floats, censored: Floats) -> ScipyDelay | None:
    scale = float(np.min(times))
    if scale <= 0.0:
        return None
    rest = np.sum(np.log(times / scale)) + np.sum(np.log(np.maximum(censored / scale, 1.0)))
    return Pareto(times.size / float(rest), scale) if rest > 0.0 else None


def _uniform(times: Floats, censored: Floats) -> ScipyDelay | None:
    low, high = float(np.min(times)), float(np.max(times))
    if high <= low:
        return None
    inside = censored[censored > low] - low
    if inside.size:
        # The likelihood of the width w is w**-(n + m) times the product of w - c.
        width, total = high - low, times.size + inside.size
        least = max(width, float(np.max(inside)) * (1.0 + 1e-12))

        def slope(w: float) -> float:
            return float(np.sum(w / (w - inside))) - total

        if np.max(inside) >= width or slope(least) > 0.0:
            most = least * (1.0 + total / times.size)
            width = float(optimize.brentq(slope, least, most))
        high = low + width
    return Uniform(low, high)


# ------------------------------------------------------------- two smooth parameters


def _lognormal(times: Floats, censored: Floats) -> ScipyDelay | None:
    if np.min(times) <= 0.0:
        return None
    logs, cut = np.log(times), np.log(censored)
    every = np.concatenate([logs, cut])
    start = np.array([np.mean(every), np.std(every)])
    if start[1] <= SAME:
        return None
    if not cut.size:
        return Lognormal(math.exp(start[0]), float(start[1]))

    def loss(at: Floats) -> tuple[float, Floats]:
        sigma = math.exp(at[1])
        z, y = (logs - at[0]) / sigma, (cut - at[0]) / sigma
        log_tail = special.log_ndtr(-y)
        hazard = np.exp(-0.5 * y * y - log_tail) / math.sqrt(2.0 * math.pi)
        value = np.sum(-at[1] - 0.5 * z * z) + np.sum(log_tail)
        slopes = (np.sum(z) + np.sum(hazard)) / sigma, np.sum(z * z - 1.0) + np.sum(hazard * y)
        return -float(value) / every.size, -np.array(slopes) / every.size

    mu, log_sigma = _minimise(loss, np.array([start[0], math.log(start[1])]))
    return Lognormal(math.exp(mu), math.exp(log_sigma))


def _weibull(times: Floats, censored: Floats) -> ScipyDelay | None:
    if np.min(times) <= 0.0:
        return None
    logs = np.log(np.concatenate([times, censored]))
    longest = float(np.max(logs))
    logs -= longest  # so that no power overflows
    mean, spread = float(np.mean(logs[: times.size])), float(np.std(logs))
    if spread <= SAME:
        return None
    shape = 1.28 / spread  # exact for a whole sample: a log Weibull deviates by π / (√6 shape)
    for _ in range(100):
        powers = np.exp(shape * logs)
        powers /= np.sum(powers)
        weighted = float(powers @ logs)
        slope = -1.0 / shape**2 - float(powers @ (logs - weighted) ** 2)
        new = shape - (1.0 / shape + mean - weighted) / slope
        new = min(max(new, shape / 3.0), shape * 3.0)
        done = abs(new - shape) <= 1e-10 * shape
        shape = new
        if done:
            break
    if shape > _MAX_SHAPE:
        return None
    log_mean_power = math.log(float(np.sum(np.exp(shape * logs))) / times.size)
    return Weibull(shape, math.exp(longest + log_mean_power / shape))


def _gamma(times: Floats, censored: Floats) -> ScipyDelay | None:
    if np.min(times) <= 0.0:
        return None
    every = np.concatenate([times, censored])
    mean = float(np.mean(every))
    shape = _gamma_shape(math.log(mean) - float(np.mean(np.log(every))))
    if shape is None:
        return None
    if censored.size:
        sum_logs, sum_times, n = float(np.sum(np.log(times))), float(np.sum(times)), times.size

        def loss(at: Floats) -> tuple[float, Floats]:
            a, scale = math.exp(at[0]), math.exp(at[1] - at[0])
            y = censored / scale
            step = 1e-5 * a  # squared, it is as good as nothing
            less, more = (
                np.log(np.maximum(special.gammaincc(b, y), 1e-300)) for b in (a - step, a + step)
            )
            tail = 0.5 * (less + more)
            by_scale = np.exp(a * np.log(y) - y - special.gammaln(a) - tail)
            value = (a - 1.0) * sum_logs - sum_times / scale
            value += -n * (a * math.log(scale) + special.gammaln(a)) + np.sum(tail)
            d_scale = sum_times / scale - n * a + np.sum(by_scale)
            d_shape = sum_logs - n * (math.log(scale) + special.digamma(a))
            d_shape += np.sum(more - less) / (2.0 * step)
            slopes = np.array([a * d_shape - d_scale, d_scale])
            return -float(value) / every.size, -slopes / every.size

        log_shape, log_mean = _minimise(loss, np.array([math.log(shape), math.log(mean)]))
        shape, mean = math.exp(log_shape), math.exp(log_mean)
    return Gamma(shape, mean / shape) if shape <= _MAX_SHAPE else None


def _gamma_shape(s: float) -> float | None:
    """The shape a with log a - ψ(a) = s: log of the mean minus mean of the logs."""
    if s <= 0.5 / _MAX_SHAPE:
        return None
    shape = (3.0 - s + math.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    for _ in range(20):  # Newton for 1 / a: Minka, "Estimating a Gamma distribution", 2002
        change = math.log(shape) - float(special.digamma(shape)) - s
        slope = shape - shape**2 * float(special.polygamma(1, shape))
        new = 1.0 / (1.0 / shape + change / slope)
        done = abs(new - shape) <= 1e-12 * shape
        shape = new
        if done:
            break
    return shape


def _minimise(loss: Callable[[Floats], tuple[float, Floats]], start: Floats) -> list[float]:
    """Newton's method for two parameters, the second derivatives by differences of the first."""
    at, step = start, 1e-4
    value, slope = loss(at)
    for _ in range(50):
        rows = [(loss(at + step * unit)[1] - slope) / step for unit in np.eye(2)]
        (a, b), (c, d) = rows[0].tolist(), rows[1].tolist()
        b = c = (b + c) / 2.0
        determinant = a * d - b * c
        if a > 0.0 and determinant > 0.0:
            g, h = slope.tolist()
            change = np.array([b * h - d * g, c * g - a * h]) / determinant
        else:  # not a bowl here: downhill
            change = -slope
        change /= max(1.0, float(np.max(np.abs(change))))
        new = value
        for _ in range(30):
            new, new_slope = loss(at + change)
            if new <= value:
                at, value, slope = at + change, new, new_slope
                break
            change /= 2.0
        if new > value or float(np.max(np.abs(change))) < 1e-7:
            break
    return [float(parameter) for parameter in at]


FAMILIES: Final[Mapping[type[ScipyDelay], Family]] = {
    Exponential: Family(1, _exponential),
    ShiftedExponential: Family(2, _shifted_exponential),
    Gamma: Family(2, _gamma),
    Weibull: Family(2, _weibull),
    Lognormal: Family(2, _lognormal),
    Pareto: Family(2, _pareto),
    Uniform: Family(2, _uniform),
}


# ---------------------------------------------------------------- one or two values


def estimate_discrete(times: Floats, censored: Floats) -> Constant | Bimodal | None:
    """The law of times of which there are one or two only, up to rounding; None for others.

    Args:
        times: seconds, at least two.
        censored: seconds. One between both values was a slow one; one after the last contradicts.
    """
    ordered = np.sort(times)
    longest = float(ordered[-1])
    jumps = np.flatnonzero(np.diff(ordered) > SAME * longest)
    just_more = 1.0 + SAME
    if jumps.size > 1 or times.size < jumps.size + 2 or np.any(censored > longest * just_more):
        return None
    if not jumps.size:
        return Constant(float(np.median(ordered)))
    fasts, slows = ordered[: jumps[0] + 1], ordered[jumps[0] + 1 :]
    fast, slow = float(np.median(fasts)), float(np.median(slows))
    num_slow = slows.size + int(np.sum((censored > fast * just_more) & (censored < slow)))
    return Bimodal(fast, slow, num_slow / (fasts.size + num_slow))
