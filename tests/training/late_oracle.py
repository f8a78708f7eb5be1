"""Late gradients in plain numpy, written from the papers: what the server is compared with.

One vector of weights, float64, in parts that stand for parameter groups. The gradient at weights w
is H·(w − target) + noise, with another noise for each gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
#: (staleness, ‖w − w_past‖², rate, version) -> factor.
Rule = Callable[[int, float, float, int], float]

#: Of each update: (version a gradient is computed on, its samples), in summation order.
UPDATES = [
    [(0, 4)],
    [(0, 4), (1, 2)],
    [(0, 3)],
    [(1, 4), (3, 1)],
    [(4, 4)],
    [(2, 4), (5, 4)],
    [(1, 2)],
    [(7, 4), (4, 4)],
]
#: Two groups: the first three weights, and the last two with half the rate.
GROUPS = (slice(0, 3), slice(3, 5))
RATES = (0.2, 0.1)
#: The rates fall by this with every update.
FALL = 0.9
START = np.array([1.0, -2.0, 0.5, 3.0, -1.0])
TARGET = np.array([0.2, 0.1, -0.4, 1.0, 0.3])
CURVATURE = np.array([1.0, 0.5, 2.0, 0.3, 0.8])


def gradient_at(weights: Vector, number: int) -> Vector:
    """Of the ``number``-th contribution."""
    noise = 0.1 * np.sin(np.arange(5) + 3.0 * number)
    found: Vector = CURVATURE * (weights - TARGET) + noise
    return found


@dataclass
class Oracle:
    """A server of one vector.

    Args:
        rule: gives factors.
        compensation: ``none``, ``dc-asgd``, ``dc-asgd-adaptive`` or ``gap-aware``.
        momentum: of SGD; None for Adam.
        apply_to: what factors scale.
    """

    rule: Rule
    compensation: str = "none"
    momentum: float | None = 0.9
    apply_to: str = "learning-rate"
    weights: Vector = field(default_factory=START.copy)
    versions: list[Vector] = field(default_factory=list)
    factors: list[list[float]] = field(default_factory=list)
    _momentum: Vector | None = None
    _second: Vector = field(default_factory=lambda: np.zeros(5))
    _steps: int = 0
    _mean_square: Vector = field(default_factory=lambda: np.zeros(5))
    _squared_steps: Vector = field(default_factory=lambda: np.zeros(5))

    def run(self) -> None:
        """Take all of :data:`UPDATES`."""
        number = 0
        for version, update in enumerate(UPDATES):
            self.versions.append(self.weights.copy())
            rates = np.empty(5)
            for part, rate in zip(GROUPS, RATES, strict=True):
                rates[part] = rate * FALL**version
            numerator, weighted, samples, factors = np.zeros(5), 0.0, 0, []
            for past_version, n in update:
                past, staleness = self.versions[past_version], version - past_version
                moved = self.weights - past
                factors.append(self.rule(staleness, float(moved @ moved), float(rates[0]), version))
                g = self.compensate(gradient_at(past, number), moved)
                numerator += n * factors[-1] * g
                weighted += n * factors[-1]
                samples += n
                number += 1
            self.factors.append(factors)
            if self.apply_to == "gradient":
                self.step(numerator / samples, rates, 1.0)
            elif weighted > 0:
                self.step(numerator / weighted, rates, weighted / samples)

    def compensate(self, g: Vector, moved: Vector) -> Vector:
        if self.compensation == "dc-asgd":
            return g + 0.3 * g * g * moved
        if self.compensation == "dc-asgd-adaptive":
            self._mean_square = 0.9 * self._mean_square + 0.1 * g**2
            return g + 0.3 / np.sqrt(self._mean_square + 1e-7) * g * g * moved
        if self.compensation == "gap-aware" and self._steps:
            highest = np.empty(5)
            for part, rate in zip(GROUPS, RATES, strict=True):
                highest[part] = rate
            mean = self._squared_steps / (1 - 0.8**self._steps)
            return g / (1 + np.abs(moved) / (highest * (np.sqrt(mean) + 1e-8)))
        return g

    def step(self, g: Vector, rates: Vector, factor: float) -> None:
        self._steps += 1
        if self.momentum is None:
            first = np.zeros(5) if self._momentum is None else self._momentum
            self._momentum = 0.9 * first + 0.1 * g
            self._second = 0.999 * self._second + 0.001 * g**2
            mean = self._momentum / (1 - 0.9**self._steps)
            direction = mean / (np.sqrt(self._second / (1 - 0.999**self._steps)) + 1e-8)
        else:
            old = self._momentum
            self._momentum = g if old is None else self.momentum * old + g
            direction = self._momentum
        self.weights = self.weights - rates * factor * direction
        self._squared_steps = 0.8 * self._squared_steps + 0.2 * direction**2
