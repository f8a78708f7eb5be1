"""E[X_{k:p}]: closed forms, quadrature against them and against draws, extremes, speed."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from gruppetto.delays import (
    DELAYS,
    Bimodal,
    Constant,
    Delay,
    Empirical,
    Exponential,
    Gamma,
    Lognormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Weibull,
    expected_order_statistic,
    expected_order_statistics,
    order_statistic_variance,
    order_statistic_variances,
)
from gruppetto.delays.order_statistics import _integrate
from gruppetto.errors import InvalidSetting

CLOSED: list[Delay] = [
    Exponential(2.0),
    ShiftedExponential(1.0, 0.5),
    Uniform(1.0, 4.0),
    Pareto(3.0, 2.0),
]
SMOOTH: list[Delay] = [
    Gamma(0.1, 1.0),
    Gamma(4.0, 0.5),
    Lognormal(1.0, 0.5),
    Lognormal(2.0, 2.0),
    Weibull(0.5, 1.0),
    Weibull(3.0, 2.0),
]
STEPS: list[Delay] = [
    Bimodal(1.0, 10.0, 0.1),
    Bimodal(1.0, 10.0, 0.0),
    Bimodal(1.0, 10.0, 1.0),
    Empirical.of(np.random.default_rng(3).exponential(size=300).round(2)),
]


# ----------------------------------------------------------------- closed forms


def test_textbook_values() -> None:
    """By hand: harmonic numbers, thirds, and Fig. 5 of the paper (speed-ups 46.0 and 79.8)."""
    h20 = sum(1.0 / i for i in range(1, 21))
    assert expected_order_statistic(Exponential(1.0), 20, 20) == pytest.approx(h20, rel=1e-14)
    assert expected_order_statistic(Exponential(1.0), 10, 20) == pytest.approx(0.668771, abs=1e-6)
    slowest = expected_order_statistic(ShiftedExponential(1.0, 1.0), 20, 20)
    assert 20.0 * slowest / 2.0 == pytest.approx(46.0, abs=0.05)
    slowest = expected_order_statistic(Pareto(2.0, 1.0), 20, 20)
    assert 20.0 * slowest / 2.0 == pytest.approx(79.8, abs=0.05)
    assert expected_order_statistics(Uniform(0.0, 4.0), 3).tolist() == [1.0, 2.0, 3.0]
    assert expected_order_statistics(Constant(2.0), 3).tolist() == [2.0, 2.0, 2.0]
    assert expected_order_statistic(Bimodal(1.0, 3.0, 0.5), 2, 2) == pytest.approx(2.5)


def test_paretos_moments_by_gammas() -> None:
    """x Γ(P+1) Γ(P-K+1-1/α) / (Γ(P-K+1) Γ(P+1-1/α)), for every K of 50."""
    k, alpha = np.arange(1, 51), 1.3
    logs = special.gammaln(51) + special.gammaln(51 - k - 1 / alpha)
    logs -= special.gammaln(51 - k) + special.gammaln(51 - 1 / alpha)
    means = expected_order_statistics(Pareto(alpha, 2.0), 50)
    assert means == pytest.approx(2.0 * np.exp(logs), rel=1e-11)


@pytest.mark.parametrize("p", [1, 2, 20, 1000, 10_000])
@pytest.mark.parametrize("law", CLOSED, ids=DELAYS.format)
def test_quadrature_agrees_with_closed_forms(law: Delay, p: int) -> None:
    """Mean and variance at both ends and between; stated: 1e-6, found: 1e-12."""
    ks = sorted({1, 2, 3, p // 4, p // 2, p - 1, p} & set(range(1, p + 1)))
    means, variances = _integrate(law, np.array(ks), p)
    for k, mean, variance in zip(ks, means, variances, strict=True):
        assert mean == pytest.approx(expected_order_statistic(law, k, p), rel=1e-11)
        assert variance == pytest.approx(order_statistic_variance(law, k, p), rel=1e-9)


@pytest.mark.parametrize("p", [1, 5, 10_000])
def test_quadrature_of_the_fastest_weibull(p: int) -> None:
    """The fastest of p is Weibull again, its scale p**(-1/shape) times as long."""
    for shape in (0.3, 1.0, 5.0):
        expected = 2.0 * p ** (-1.0 / shape) * math.gamma(1.0 + 1.0 / shape)
        found = expected_order_statistic(Weibull(shape, 2.0), 1, p)
        assert found == pytest.approx(expected, rel=1e-11)


def test_quadrature_of_two_lognormals() -> None:
    """The mean of the slower of two is 2 E[X] Φ(σ/√2)."""
    for sigma in (0.1, 1.0, 4.0):
        expected = 2.0 * math.exp(sigma**2 / 2.0) * special.ndtr(sigma / math.sqrt(2.0))
        found = expected_order_statistic(Lognormal(1.0, sigma), 2, 2)
        assert found == pytest.approx(expected, rel=1e-11)


# ----------------------------------------------------------- what holds for all laws


@pytest.mark.parametrize("law", [*CLOSED, *SMOOTH, *STEPS], ids=lambda law: str(law)[:40])
@pytest.mark.parametrize("p", [1, 2, 7, 300])
def test_they_rise_and_their_mean_is_the_laws(law: Delay, p: int) -> None:
    """Every job is one of them; and one k alone gives what all of them give."""
    means = expected_order_statistics(law, p)
    assert means.shape == (p,)
    assert (np.diff(means) >= 0.0).all()
    assert float(means.mean()) == pytest.approx(law.expectation(), rel=1e-11)
    assert expected_order_statistic(law, 1, p) == pytest.approx(float(means[0]), rel=1e-9)
    assert expected_order_statistic(law, p, p) == pytest.approx(float(means[-1]), rel=1e-9)
    variances = order_statistic_variances(law, p)
    second = float(np.mean(variances + means**2))
    assert second == pytest.approx(law.variance() + law.expectation() ** 2, rel=1e-9)


@pytest.mark.parametrize("law", [Gamma(0.3, 1.0), Lognormal(1.0, 1.0), *STEPS], ids=str)
def test_they_are_the_means_of_draws(law: Delay) -> None:
    """20,000 rounds of eight: within five standard errors, by the variances computed as well."""
    drawn = np.sort(law.quantile(np.random.default_rng(5).random((20_000, 8))), axis=1)
    errors = 5.0 * np.sqrt(order_statistic_variances(law, 8) / 20_000) + 1e-12
    difference = np.abs(drawn.mean(axis=0) - expected_order_statistics(law, 8))
    assert (difference <= errors).all()


@given(st.floats(0.05, 100.0), st.integers(1, 60), st.data())
@settings(max_examples=40, deadline=None)
def test_more_learners_finish_k_sooner(shape: float, p: int, data: st.DataObject) -> None:
    """X_{k:p+1} <= X_{k:p} <= X_{k+1:p+1}."""
    k = data.draw(st.integers(1, p))
    law = Gamma(shape, 1.0)
    value = expected_order_statistic(law, k, p)
    assert expected_order_statistic(law, k, p + 1) <= value * (1.0 + 1e-12)
    assert value <= expected_order_statistic(law, k + 1, p + 1) * (1.0 + 1e-12)


def test_a_discrete_law_by_every_outcome() -> None:
    """The step sum against all 4**5 outcomes of five draws from four values with a tie."""
    values = [1.0, 2.0, 2.0, 7.0]
    grid = np.stack(np.meshgrid(*[values] * 5), axis=-1).reshape(-1, 5)
    ordered = np.sort(grid, axis=1)
    law = Empirical.of(values)
    assert expected_order_statistics(law, 5) == pytest.approx(ordered.mean(axis=0), rel=1e-13)
    assert order_statistic_variances(law, 5) == pytest.approx(ordered.var(axis=0), rel=1e-12)


# ------------------------------------------------------------------- the extremes


def test_what_does_not_exist_is_infinite() -> None:
    """With shape a, X_{k:p} has a mean if p - k + 1 > 1/a, and a variance if that is > 2/a."""
    means = expected_order_statistics(Pareto(0.4, 1.0), 5)
    assert np.isfinite(means).tolist() == [True, True, True, False, False]
    assert expected_order_statistic(Pareto(1.0, 1.0), 5, 5) == math.inf
    assert expected_order_statistic(Pareto(1.0, 1.0), 4, 5) == pytest.approx(5.0)
    variances = order_statistic_variances(Pareto(1.5, 1.0), 3)
    assert np.isfinite(variances).tolist() == [True, True, False]


def test_a_tail_beyond_doubles_is_refused() -> None:
    """Rather than cut."""
    with pytest.raises(InvalidSetting) as caught:
        expected_order_statistic(Lognormal(1.0, 40.0), 2, 3)
    assert "its tail is too heavy for order statistics in double precision" in str(caught.value)
    assert expected_order_statistic(Weibull(0.05, 1.0), 1, 1) == pytest.approx(
        math.gamma(21.0), rel=1e-11
    )


@pytest.mark.parametrize(("k", "p"), [(0, 3), (4, 3), (-1, 3), (1, 0)])
def test_impossible_ranks_are_refused(k: int, p: int) -> None:
    """In one sentence."""
    for function in (expected_order_statistic, order_statistic_variance):
        with pytest.raises(InvalidSetting, match="order statistics: expected"):
            function(Exponential(1.0), k, p)


def test_a_law_without_its_values_is_refused() -> None:
    """As everywhere."""
    with pytest.raises(InvalidSetting, match="expected its values to be loaded"):
        expected_order_statistic(Empirical("times.csv"), 1, 2)


@pytest.mark.parametrize("law", [Gamma(2.0, 1.0), Lognormal(1.0, 1.0)], ids=DELAYS.format)
def test_all_of_a_thousand_take_less_than_a_second(law: Delay) -> None:
    """Of this process: the machine may be busy."""
    start = time.process_time()
    means = expected_order_statistics(law, 1000)
    assert time.process_time() - start < 1.0
    assert float(means.mean()) == pytest.approx(law.expectation(), rel=1e-12)


@pytest.mark.parametrize("law", [*SMOOTH, Bimodal(1.0, 10.0, 0.01)], ids=DELAYS.format)
def test_ten_thousand_learners(law: Delay) -> None:
    """Single ranks between their neighbours' quantiles, and near the quantile of k / p."""
    for k in (1, 100, 5000, 9900, 10_000):
        value = expected_order_statistic(law, k, 10_000)
        spread = 6.0 * math.sqrt(k * (10_001 - k) / 10_000.0) + 8.0
        u = np.clip(np.array([k - spread, k + spread]) / 10_001.0, 1e-9, 1.0 - 1e-12)
        low, high = law.quantile(u)
        assert low * (1.0 - 1e-9) <= value <= high
