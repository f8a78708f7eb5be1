"""The four cells for 20 learners alike, in numpy, knowing nothing of this library."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

P = 20

Draw = Callable[..., npt.NDArray[np.float64]]


def drawing(spec: str, seed: int) -> Draw:
    """Draws of a law by numpy's own generators, not by this library's quantiles."""
    rng = np.random.default_rng(seed)
    name, _, keys = spec.partition(":")
    a = [float(part.split("=")[1]) for part in keys.split(",")]
    return {
        "exponential": lambda *n: rng.exponential(a[0], n),
        "shifted-exponential": lambda *n: a[0] + rng.exponential(a[1], n),
        "pareto": lambda *n: a[1] * (1.0 + rng.pareto(a[0], n)),
        "weibull": lambda *n: a[1] * rng.weibull(a[0], n),
        "uniform": lambda *n: rng.uniform(a[0], a[1], n),
        "gamma": lambda *n: rng.gamma(a[0], a[1], n),
        "lognormal": lambda *n: a[0] * rng.lognormal(0.0, a[1], n),
        "constant": lambda *n: np.full(n, a[0]),
    }[name]


def simulate_k_sync(draw: Draw, updates: int) -> npt.NDArray[np.float64]:
    """Seconds of each update, for K = 1 .. P. Shape [updates, P]."""
    return np.sort(draw(updates, P), axis=1)


def simulate_k_batch_sync(draw: Draw, updates: int) -> npt.NDArray[np.float64]:
    """Seconds of each update, for K = 1 .. P. Shape [updates, P]."""
    pushes = draw(updates, P, P).cumsum(axis=2).reshape(updates, P * P)
    return np.sort(pushes, axis=1)[:, :P]


def mean_and_error(seconds: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The mean and four standard errors of it."""
    return float(seconds.mean()), float(4.0 * seconds.std() / math.sqrt(seconds.size))


def simulate_k_batch_async(draw: Draw, jobs: int) -> float:
    """Seconds per push of all learners together, long after the start."""
    pushes = draw(P, jobs).cumsum(axis=1)
    end = pushes[:, -1].min()
    counted = (pushes > end / 4) & (pushes <= end)
    return float(0.75 * end / counted.sum())


def simulate_k_async(draw: Draw, k: int, updates: int, runs: int) -> tuple[float, float, float]:
    """(seconds per update, mean staleness, fraction fresh); the first third is left out."""
    ends = draw(runs, P)
    versions = np.zeros((runs, P), dtype=int)
    rows = np.arange(runs)[:, None]
    times, staleness = [], []
    for version in range(updates):
        first = np.argpartition(ends, k - 1, axis=1)[:, :k]
        now = ends[rows, first].max(axis=1)
        times.append(now)
        staleness.append(version - versions[rows, first])
        ends[rows, first] = now[:, None] + draw(runs, k)
        versions[rows, first] = version + 1
    burn = updates // 3
    seconds = (times[-1] - times[burn]).mean() / (updates - 1 - burn)
    kept = np.asarray(staleness[burn:])
    return float(seconds), float(kept.mean()), float((kept == 0).mean())
