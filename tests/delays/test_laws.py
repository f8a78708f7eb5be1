"""What laws answer besides quantiles: probabilities, moments that do not exist, and aging."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.delays import (
    DELAYS,
    Aging,
    Bimodal,
    Constant,
    Delay,
    Exponential,
    Gamma,
    Lognormal,
    Pareto,
    Regimes,
    ShiftedExponential,
    Uniform,
    Weibull,
    keyed_uniforms,
)
from gruppetto.errors import InvalidSetting

CONTINUOUS: list[Delay] = [
    Exponential(2.0),
    ShiftedExponential(1.0, 0.5),
    Pareto(1.5, 1.0),
    Uniform(1.0, 4.0),
    Lognormal(2.0, 0.5),
    Gamma(4.0, 0.5),
    Gamma(0.5, 2.0),
    Weibull(2.0, 1.0),
    Weibull(0.5, 3.0),
    Regimes(fast=1.0, slow=6.0, jobs=10),
]
DISCRETE: list[Delay] = [Constant(2.5), Bimodal(1.0, 10.0, 0.1)]

positive = st.floats(1e-3, 1e3)
laws = st.one_of(
    st.builds(Constant, positive),
    st.builds(Exponential, positive),
    st.builds(ShiftedExponential, st.floats(0.0, 1e3), positive),
    st.builds(Pareto, st.floats(0.2, 50.0), positive),
    st.tuples(positive, positive).map(lambda t: Uniform(t[0], t[0] + t[1])),
    st.builds(Lognormal, positive, st.floats(0.01, 3.0)),
    st.builds(Gamma, st.floats(0.05, 200.0), positive),
    st.builds(Weibull, st.floats(0.2, 50.0), positive),
    st.tuples(positive, positive, st.floats(0.0, 1.0)).map(
        lambda t: Bimodal(t[0], t[0] + t[1], t[2])
    ),
    st.builds(Regimes, positive, positive, st.integers(1, 99), st.integers(2, 9)),
)


@given(laws)
@settings(max_examples=100, deadline=None)
def test_every_law_is_read_back_from_its_spec(law: Delay) -> None:
    """Whatever the digits."""
    assert DELAYS.parse(DELAYS.format(law)) == law


@given(laws, st.lists(st.floats(0.001, 0.999), min_size=2, max_size=20))
@settings(max_examples=100, deadline=None)
def test_probabilities_and_quantiles_rise_and_agree(law: Delay, q: list[float]) -> None:
    """F(Q(q)) >= q, F + S = 1, both monotone, and quantiles from above are those from below."""
    probabilities = np.sort(np.array(q))
    x = law.quantile(probabilities)
    assert (np.diff(x) >= 0.0).all()
    assert (np.diff(law.cdf(x)) >= 0.0).all()
    assert (np.diff(law.sf(x)) <= 0.0).all()
    assert law.cdf(x) + law.sf(x) == pytest.approx(1.0, abs=1e-12)
    # Seconds themselves are rounded, which a narrow law far from 0 feels most.
    assert (law.cdf(x * (1.0 + 1e-14)) >= probabilities * (1.0 - 1e-9)).all()
    if not isinstance(law, Bimodal):  # where it jumps, 1 - q may round across
        assert law.upper_quantile(1.0 - probabilities) == pytest.approx(x, rel=1e-9)


@pytest.mark.parametrize("law", CONTINUOUS, ids=DELAYS.format)
def test_upper_quantiles_reach_where_doubles_near_one_end(law: Delay) -> None:
    """P(X > x) is what was asked for, down to 1e-200."""
    q = np.array([0.9, 0.3, 1e-3, 1e-20, 1e-200])
    if isinstance(law, Uniform):
        q = q[:3]
    assert law.sf(law.upper_quantile(q)) == pytest.approx(q, rel=1e-9)


@pytest.mark.parametrize("law", CONTINUOUS, ids=DELAYS.format)
def test_probabilities_are_the_shares_of_draws(law: Delay) -> None:
    """100,000 keyed draws: within five standard errors of F at nine points."""
    drawn = law.quantile(keyed_uniforms(4, 0, 0, 100_000))
    x = law.quantile(np.linspace(0.1, 0.9, 9))
    shares = np.mean(drawn[:, None] <= x, axis=0)
    assert shares == pytest.approx(law.cdf(x), abs=5.0 * 0.5 / math.sqrt(100_000))


def test_discrete_laws_jump_at_their_values() -> None:
    """P(X <= value) includes the value."""
    law = Bimodal(1.0, 10.0, 0.25)
    x = np.array([0.5, 1.0, 9.9, 10.0])
    assert law.cdf(x).tolist() == [0.0, 0.75, 0.75, 1.0]
    assert law.sf(x).tolist() == [1.0, 0.25, 0.25, 0.0]
    assert law.upper_quantile(np.array([0.2, 0.3])).tolist() == [10.0, 1.0]
    assert Constant(2.0).cdf(np.array([1.9, 2.0])).tolist() == [0.0, 1.0]
    assert Constant(2.0).sf(np.array([1.9, 2.0])).tolist() == [1.0, 0.0]


def test_moments_that_do_not_exist_are_infinite() -> None:
    """The variance goes at shape 2, the mean at shape 1."""
    assert Pareto(2.0, 1.0).variance() == math.inf
    assert Pareto(1.0, 1.0).variance() == math.inf
    assert Pareto(0.5, 1.0).variance() == math.inf
    assert Pareto(2.1, 1.0).variance() < math.inf
    assert Lognormal(1.0, 30.0).variance() == math.inf  # larger than any double


def test_a_finite_mean_is_asked_for_in_a_sentence() -> None:
    """Where nothing makes sense without one."""
    assert Pareto(2.0, 1.0).finite_expectation("a plan") == 2.0
    with pytest.raises(InvalidSetting) as caught:
        Pareto(1.0, 1.0).finite_expectation("a plan")
    assert str(caught.value) == (
        "delay pareto:shape=1.0,scale=1.0 has an infinite mean; expected a finite one for a plan"
    )


# ----------------------------------------------------------------------- aging

AGING: list[tuple[Delay, Aging]] = [
    (Constant(2.0), Aging.NEW_LONGER_THAN_USED),
    (Exponential(2.0), Aging.MEMORYLESS),
    (ShiftedExponential(0.0, 1.0), Aging.MEMORYLESS),
    (ShiftedExponential(0.5, 1.0), Aging.NEW_LONGER_THAN_USED),
    (Pareto(2.0, 1.0), Aging.NEITHER),
    (Pareto(0.5, 1.0), Aging.NEITHER),
    (Uniform(0.0, 1.0), Aging.NEW_LONGER_THAN_USED),
    (Uniform(1.0, 9.0), Aging.NEW_LONGER_THAN_USED),
    (Lognormal(1.0, 0.3), Aging.NEITHER),
    (Lognormal(1.0, 2.0), Aging.NEITHER),
    (Gamma(2.0, 1.0), Aging.NEW_LONGER_THAN_USED),
    (Gamma(1.0, 1.0), Aging.MEMORYLESS),
    (Gamma(0.5, 1.0), Aging.NEW_SHORTER_THAN_USED),
    (Weibull(2.0, 1.0), Aging.NEW_LONGER_THAN_USED),
    (Weibull(1.0, 1.0), Aging.MEMORYLESS),
    (Weibull(0.5, 1.0), Aging.NEW_SHORTER_THAN_USED),
    (Bimodal(1.0, 1.9, 0.3), Aging.NEW_LONGER_THAN_USED),
    (Bimodal(1.0, 2.0, 0.3), Aging.NEW_LONGER_THAN_USED),
    (Bimodal(1.0, 2.1, 0.3), Aging.NEITHER),
    (Bimodal(0.0, 1.0, 0.3), Aging.NEITHER),
    (Bimodal(1.0, 5.0, 0.0), Aging.NEW_LONGER_THAN_USED),
    (Bimodal(1.0, 5.0, 1.0), Aging.NEW_LONGER_THAN_USED),
    (Bimodal(3.0, 3.0, 0.5), Aging.NEW_LONGER_THAN_USED),
]


@pytest.mark.parametrize(("law", "expected"), AGING, ids=lambda v: str(v))
def test_aging_is_what_its_definition_says(law: Delay, expected: Aging) -> None:
    """P(X > x + t) against P(X > x) P(X > t), at a grid of times as far as tails are doubles."""
    assert law.aging is expected
    q = np.concatenate([np.geomspace(1e-12, 0.5, 150), [0.7, 0.9, 0.99, 0.999, 1 - 1e-6]])
    times = np.unique(np.concatenate([[0.0], law.upper_quantile(q), law.upper_quantile(q) / 2.0]))
    both, product = law.sf(times[:, None] + times), np.outer(law.sf(times), law.sf(times))
    tolerance = 1e-9 * product
    new_longer = bool((both <= product + tolerance).all())
    new_shorter = bool((both >= product - tolerance).all())
    assert (new_longer, new_shorter) == {
        Aging.NEW_LONGER_THAN_USED: (True, False),
        Aging.NEW_SHORTER_THAN_USED: (False, True),
        Aging.MEMORYLESS: (True, True),
        Aging.NEITHER: (False, False),
    }[expected]
