"""Several gradients -> one: the weighted sum of an update."""

from __future__ import annotations

from collections.abc import Sequence

from gruppetto.staleness.modulation import ApplyTo
from gruppetto.training.parameters import Flat

__all__ = ["combine"]


def combine(
    gradients: Sequence[Flat],
    num_samples: Sequence[int],
    factors: Sequence[float],
    apply_to: ApplyTo = "learning-rate",
) -> tuple[Flat, float]:
    """Ordered left fold of weighted gradients.

    ``learning-rate``: g = Σ n_i s_i g_i / Σ n_i s_i and the rate s̄ = Σ n_i s_i / Σ n_i.
    ``gradient``: g = Σ n_i s_i g_i / Σ n_i and the rate 1.

    Factors of 0 leave their gradients out; where all are 0, so are the combined gradient and, in
    the first form, the rate.

    Returns:
        The combined gradient (a new one, or the only one) and the factor on the learning rate.
    """
    samples = sum(num_samples)
    total = sum(n * s for n, s in zip(num_samples, factors, strict=True))
    rate = total / samples
    divisor = total if apply_to == "learning-rate" and total > 0 else samples
    # Weights first, in float64: (13 * g) / 13 is not g for many float32 values.
    shares = [n * s / divisor for n, s in zip(num_samples, factors, strict=True)]
    combined = gradients[0] if shares[0] == 1.0 else gradients[0].scaled(shares[0])
    if len(gradients) > 1:
        combined = combined.clone() if combined is gradients[0] else combined
        for gradient, share in zip(gradients[1:], shares[1:], strict=True):
            combined.add_(gradient, share)
    return combined, rate if apply_to == "learning-rate" else 1.0
