"""How large a learning rate may be where gradients are late and the optimizer has momentum.

On a quadratic of curvature λ, gradients d updates late and momentum m (torch's SGD, the heavy ball)
give w_{t+1} = w_t + m (w_t − w_{t−1}) − ηλ w_{t−d}. Its characteristic equation is

    z^(d−1) (z − 1) (z − m) + ηλ = 0,

and the first root reaches the unit circle, at e^(iθ), where (d − 1/2) θ + arg(e^(iθ) − m) = π/2.
Derived here; with m = 0 it gives the known 2 sin(π/(4d + 2)) (Arjevani, Shamir, Srebro, "A Tight
Convergence Analysis for Stochastic Gradient Descent with Delayed Updates", ALT 2020), with d = 0
the known 2 (1 + m).
"""

from __future__ import annotations

import cmath
import math

from scipy.optimize import brentq

from gruppetto.errors import InvalidSetting

__all__ = ["largest_stable_rate"]


def largest_stable_rate(staleness: int, momentum: float = 0.0, curvature: float = 1.0) -> float:
    """The learning rate above which delayed SGD diverges along a direction of this curvature.

    Without noise, staleness and curvature being constant; see the equations of this module. In the
    long run momentum goes η/(1 − m) per update: fresh gradients allow 19 times as much of that with
    m = 0.9 as without, gradients one update late no more than without.

    Args:
        staleness: of every gradient, d ≥ 0 updates.
        momentum: m in [0, 1).
        curvature: λ > 0, the largest eigenvalue of the Hessian for the whole of a network.

    Returns:
        η, in units of one over the curvature's.

    Raises:
        InvalidSetting: an argument is out of range.

    >>> round(largest_stable_rate(0, momentum=0.9), 6), round(largest_stable_rate(1, 0.9), 6)
    (3.8, 0.1)
    >>> round(largest_stable_rate(1), 6), round(largest_stable_rate(29, 0.9), 6)
    (1.0, 0.004433)
    """
    if staleness < 0:
        raise InvalidSetting(f"stable rate: expected staleness >= 0, got staleness={staleness}")
    if not 0.0 <= momentum < 1.0:
        raise InvalidSetting(f"stable rate: expected momentum in [0, 1), got momentum={momentum}")
    if not (curvature > 0.0 and math.isfinite(curvature)):
        raise InvalidSetting(
            f"stable rate: expected curvature > 0 and finite, got curvature={curvature}"
        )
    if staleness == 0:
        return 2.0 * (1.0 + momentum) / curvature

    def missing(angle: float) -> float:
        # Grows with the angle, from −π/2: there is one root.
        turned = cmath.phase(cmath.exp(1j * angle) - momentum)
        return (staleness - 0.5) * angle + turned - 0.5 * math.pi

    angle = brentq(missing, 0.0, math.pi, xtol=1e-15)
    z = cmath.exp(1j * angle)
    return abs(z - 1.0) * abs(z - momentum) / curvature
