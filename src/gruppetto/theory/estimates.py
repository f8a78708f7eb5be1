"""What a short pilot run tells of the constants in the bounds. Arrays in, numbers out.

The paper defines the constants and never estimates them; these are the plain estimators of its
definitions. Each says on which side of the constant it lies: a handful of measurements can refute
an assumption, and never prove it.

Source of the definitions: Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win
the Race", AISTATS 2018, §2.4 and §3.2.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gruppetto.errors import InvalidSetting

__all__ = [
    "estimate_convexity",
    "estimate_gamma",
    "estimate_p0",
    "estimate_smoothness",
    "estimate_staleness_factor",
    "estimate_variance",
    "gamma_from_distances",
]

Floats: TypeAlias = npt.NDArray[np.float64]


def _series(what: str, values: npt.ArrayLike) -> Floats:
    """A non-empty one-dimensional array of finite numbers, none below 0."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.all(np.isfinite(array)) or np.any(array < 0):
        raise InvalidSetting(
            f"estimate: expected {what} to be a list of at least one finite number >= 0"
        )
    return array


def _paired(first: str, a: npt.ArrayLike, second: str, b: npt.ArrayLike) -> tuple[Floats, Floats]:
    x, y = _series(first, a), _series(second, b)
    if x.shape != y.shape:
        raise InvalidSetting(
            f"estimate: expected as many {first} as {second}, got {x.size} and {y.size}"
        )
    return x, y


def _ratio_of_means(first: str, a: npt.ArrayLike, second: str, b: npt.ArrayLike) -> float:
    # Of averages, not an average of ratios: single gradients may be almost 0.
    top, bottom = _paired(first, a, second, b)
    if not bottom.sum() > 0:
        raise InvalidSetting(f"estimate: expected {second} that are not all 0")
    return float(top.sum() / bottom.sum())


def estimate_p0(staleness: npt.ArrayLike) -> float:
    """p̂₀: the fraction of applied gradients that were fresh, of staleness 0.

    p₀ itself bounds the probability from below at every update, whatever came before; the average
    is larger where freshness depends on the past. In k-batch-async with exponential delays the
    first gradient of an update is fresh with probability 1/P and the average is above that, see
    :func:`gruppetto.theory.fresh_fraction`.

    >>> estimate_p0([0, 1, 1, 3])
    0.25
    """
    values = _series("staleness", staleness)
    return float(np.mean(values == 0))


def estimate_gamma(squared_changes: npt.ArrayLike, squared_norms: npt.ArrayLike) -> float:
    """γ̂ = ⟨‖∇F(w_j) − ∇F(w_τ)‖²⟩ / ⟨‖∇F(w_j)‖²⟩, a ratio of averages over applied gradients.

    Both gradients are to be computed on the same large fixed batch, or the noise of mini-batches
    counts as staleness. A result above 1 means that the assumption γ ≤ 1 does not hold here.

    Args:
        squared_changes: ‖∇F(w_j) − ∇F(w_τ)‖² of each applied gradient; 0 for a fresh one.
        squared_norms: ‖∇F(w_j)‖² of the version it was applied to.

    >>> estimate_gamma([0.0, 0.5, 1.0], [4.0, 5.0, 6.0])
    0.1
    """
    return _ratio_of_means("squared changes", squared_changes, "squared norms", squared_norms)


def gamma_from_distances(
    smoothness: float, squared_distances: npt.ArrayLike, squared_norms: npt.ArrayLike
) -> float:
    """γ̂ ≤ L² ⟨‖w_j − w_τ‖²⟩ / ⟨‖∇F(w_j)‖²⟩: an upper bound that needs no second gradient.

    Args:
        smoothness: L.
        squared_distances: ‖w_j − w_τ‖² of each applied gradient, all parameters.
        squared_norms: ‖∇F(w_j)‖² of the version it was applied to.

    >>> gamma_from_distances(2.0, [0.0, 0.25], [4.0, 6.0])
    0.1
    """
    if not (smoothness > 0 and np.isfinite(smoothness)):
        raise InvalidSetting(
            f"estimate: expected smoothness > 0 and finite, got smoothness={smoothness}"
        )
    ratio = _ratio_of_means("squared distances", squared_distances, "squared norms", squared_norms)
    return float(smoothness**2 * ratio)


def estimate_staleness_factor(
    staleness: npt.ArrayLike, squared_changes: npt.ArrayLike, squared_norms: npt.ArrayLike
) -> float:
    """γ̂′ = 1 − γ̂ + p̂₀/2; not above 0 where gradients are too stale for the theory.

    >>> estimate_staleness_factor([0, 1, 1, 1], [0.0, 0.5, 0.5, 0.0], [2.5, 2.5, 2.5, 2.5])
    1.025
    """
    gamma = estimate_gamma(squared_changes, squared_norms)
    return 1.0 - gamma + estimate_p0(staleness) / 2.0


def estimate_smoothness(squared_changes: npt.ArrayLike, squared_distances: npt.ArrayLike) -> float:
    """L̂, the largest ‖∇F(w) − ∇F(v)‖ / ‖w − v‖ seen: at most L, by its definition.

    Args:
        squared_changes: ‖∇F(w) − ∇F(v)‖² of each pair, on one fixed batch.
        squared_distances: ‖w − v‖² of the pair; pairs at distance 0 say nothing and are left out.

    >>> estimate_smoothness([4.0, 9.0, 0.0], [4.0, 1.0, 0.0])
    3.0
    """
    changes, distances = _paired(
        "squared changes", squared_changes, "squared distances", squared_distances
    )
    apart = distances > 0
    if not apart.any():
        raise InvalidSetting("estimate: expected squared distances that are not all 0")
    return float(np.sqrt(np.max(changes[apart] / distances[apart])))


def estimate_convexity(squared_norms: npt.ArrayLike, gaps: npt.ArrayLike) -> float:
    """ĉ, the smallest ‖∇F(w)‖² / (2(F(w) − F*)) seen: at least c, by its definition.

    Args:
        squared_norms: ‖∇F(w)‖² of some versions, on a large batch.
        gaps: F(w) − F* of the same; those at 0 say nothing and are left out.

    >>> estimate_convexity([4.0, 1.0], [1.0, 0.5])
    1.0
    """
    norms, above = _paired("squared norms", squared_norms, "gaps", gaps)
    if not np.any(above > 0):
        raise InvalidSetting("estimate: expected gaps that are not all 0")
    return float(np.min(norms[above > 0] / (2.0 * above[above > 0])))


def estimate_variance(
    squared_noise: npt.ArrayLike, squared_norms: npt.ArrayLike, batch_size: int
) -> tuple[float, float]:
    """(σ̂², M̂_G): least squares of m‖g − ∇F(w)‖² ≈ σ² + M_G‖∇F(w)‖², neither below 0.

    Assumption 4 bounds the mean of ‖g − ∇F‖² by (σ² + M_G‖∇F‖²)/m at every w; this fits it, so
    about half of the noise lies above. With versions all of one gradient norm everything is σ̂².

    Args:
        squared_noise: ‖g − ∇F(w)‖² of mini-batch gradients g, or its mean at each w.
        squared_norms: ‖∇F(w)‖² at the same w, on a large batch.
        batch_size: m, samples behind each g.

    >>> sigma2, growth = estimate_variance([0.75, 1.0, 1.25], [1.0, 2.0, 3.0], batch_size=4)
    >>> round(sigma2, 9), round(growth, 9)
    (2.0, 1.0)
    """
    noise, norms = _paired("squared noise", squared_noise, "squared norms", squared_norms)
    if batch_size < 1:
        raise InvalidSetting(f"estimate: expected batch_size >= 1, got batch_size={batch_size}")
    noise = noise * batch_size
    spread = norms - norms.mean()
    # Norms that differ by rounding only have no slope to tell.
    if not spread @ spread > 1e-18 * (norms @ norms):
        return float(noise.mean()), 0.0
    growth = float(spread @ noise / (spread @ spread))
    sigma2 = float(noise.mean() - growth * norms.mean())
    if growth < 0:
        return float(noise.mean()), 0.0
    if sigma2 < 0:
        return 0.0, float(norms @ noise / (norms @ norms))
    return sigma2, growth
