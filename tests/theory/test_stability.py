"""The largest stable rate: the recursion itself shrinks below it and grows above it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.errors import InvalidSetting
from gruppetto.theory import largest_stable_rate


def growth(staleness: int, momentum: float, step: float) -> float:
    """Largest of the recursion's roots in size; ``step`` is rate times curvature."""
    size = max(staleness, 1) + 1
    equation = np.zeros(size + 1)
    equation[:3] = 1.0, -(1.0 + momentum), momentum
    equation[staleness + 1] += step
    return float(np.abs(np.roots(equation)).max())


@given(
    staleness=st.integers(0, 12),
    momentum=st.floats(0.0, 0.98),
    curvature=st.floats(1e-3, 1e3),
)
def test_it_is_where_the_recursion_stops_shrinking(
    staleness: int, momentum: float, curvature: float
) -> None:
    rate = largest_stable_rate(staleness, momentum, curvature)
    assert growth(staleness, momentum, 0.99 * rate * curvature) < 1.0
    assert growth(staleness, momentum, 1.01 * rate * curvature) > 1.0
    assert largest_stable_rate(staleness + 1, momentum, curvature) < rate


def test_known_cases() -> None:
    for staleness in range(40):
        known = 2.0 * math.sin(math.pi / (4 * staleness + 2))
        assert largest_stable_rate(staleness) == pytest.approx(known, rel=1e-12)
    assert largest_stable_rate(0, momentum=0.9, curvature=2.0) == pytest.approx(1.9)
    # Late by one: w(t+1) = (1 + m) w(t) - (m + step) w(t-1), whose roots have the product m + step.
    assert largest_stable_rate(1, momentum=0.9) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((-1,), "expected staleness >= 0, got staleness=-1"),
        ((1, 1.0), "expected momentum in [0, 1), got momentum=1.0"),
        ((1, math.nan), "got momentum=nan"),
        ((1, 0.9, 0.0), "expected curvature > 0 and finite, got curvature=0.0"),
    ],
)
def test_what_is_out_of_range_is_refused(values: tuple[float, ...], said: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        largest_stable_rate(*values)  # type: ignore[arg-type]
    assert said in str(caught.value)
