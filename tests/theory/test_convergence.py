"""Bounds on the error against what is exactly known of a quadratic, and their estimators.

On F(w) = c w²/2 with noise of variance σ²/m everything can be computed: the mean squared weight of
SGD with any stale gradients obeys a linear recursion of second moments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from gruppetto.errors import InvalidSetting
from gruppetto.protocols.adaptive import _adapted
from gruppetto.theory import (
    SYNCHRONOUS,
    Problem,
    adapted_k,
    compensated_error,
    error_after_time,
    error_after_updates,
    error_floor,
    estimate_convexity,
    estimate_gamma,
    estimate_p0,
    estimate_smoothness,
    estimate_staleness_factor,
    estimate_variance,
    gamma_from_distances,
    gradient_after_updates,
    gradient_floor,
    safe_learning_rate,
    staleness_factor,
    time_to_reach,
    updates_to_reach,
)


def problem(**changes: Any) -> Problem:
    """L = 2, c = 0.5, σ² = 4, m = 8, a gap of 1, with changes."""
    values: dict[str, Any] = {
        "smoothness": 2.0,
        "convexity": 0.5,
        "variance": 4.0,
        "batch_size": 8,
        "initial_gap": 1.0,
    }
    return Problem(**(values | changes))


def stale_quadratic(
    eigenvalue: float, rate: float, noise: float, weight: float, updates: int, delay: int
) -> tuple[list[float], list[float], list[float]]:
    """Exact E[F(w_j)], E‖∇F(w_j)‖² and E‖∇F(w_j) − ∇F(w_τ)‖² with τ = j − delay, from w_0.

    Args:
        eigenvalue: F(w) = eigenvalue w²/2.
        rate: η.
        noise: variance of the averaged gradient.
        weight: w_0.
        updates: j = 0 .. updates.
        delay: staleness of every gradient; before that it is of w_0.
    """
    size = delay + 1
    step = np.eye(size, k=-1)
    step[0, 0] = 1.0
    step[0, delay] -= rate * eigenvalue
    moments = np.full((size, size), weight**2)
    shock = np.zeros((size, size))
    shock[0, 0] = rate**2 * noise
    errors, norms, changes = [], [], []
    for _ in range(updates + 1):
        now, then, both = moments[0, 0], moments[delay, delay], moments[0, delay]
        errors.append(eigenvalue * now / 2.0)
        norms.append(eigenvalue**2 * now)
        changes.append(eigenvalue**2 * (now - 2.0 * both + then))
        moments = step @ moments @ step.T + shock
    return errors, norms, changes


# ------------------------------------------------------------ formulas by hand


def test_the_synchronous_bound_by_hand() -> None:
    p, eta, k = problem(), 0.1, 4
    floor = eta * 2.0 * 4.0 / (2 * 0.5 * k * 8)
    assert error_floor(p, k, eta) == pytest.approx(floor)
    for j in (0, 1, 7, 100):
        expected = floor + (1 - eta * 0.5) ** j * (1.0 - floor)
        assert float(error_after_updates(p, k, eta, j)) == pytest.approx(expected)


def test_staleness_divides_the_floor_and_multiplies_the_decay() -> None:
    p, factor = problem(), staleness_factor(gamma=0.2, p0=0.05)
    assert factor == pytest.approx(0.825)
    floor = error_floor(p, 4, 0.1, gamma_prime=factor)
    assert floor == pytest.approx(error_floor(p, 4, 0.1) / factor)
    after = float(error_after_updates(p, 4, 0.1, 10, gamma_prime=factor))
    assert after == pytest.approx(floor + (1 - 0.05 * factor) ** 10 * (1 - floor))
    assert gradient_floor(p, 4, 0.1, gamma_prime=factor) == pytest.approx(
        gradient_floor(p, 4, 0.1) / factor
    )
    by_hand = 2 * 1.0 / (10 * 0.1 * factor) + 2.0 * 0.1 * 4.0 / (4 * 8 * factor)
    assert float(gradient_after_updates(p, 4, 0.1, 9, gamma_prime=factor)) == pytest.approx(by_hand)


def test_reaching_an_error_is_the_inverse_of_the_bound() -> None:
    p = problem()
    for error in (0.9, 0.5, 0.1, 0.0251):
        j = updates_to_reach(p, 4, 0.1, error)
        assert j is not None
        at, before = error_after_updates(p, 4, 0.1, [j, j - 1])
        assert at <= error * (1 + 1e-9) and before > error
        assert time_to_reach(p, 4, 0.1, error, update_time=3.0) == 3.0 * j
    assert updates_to_reach(p, 4, 0.1, 1.0) == 0
    assert updates_to_reach(p, 4, 0.1, 0.025) is None
    assert time_to_reach(p, 4, 0.1, 0.02, update_time=3.0) is None
    exact = float(error_after_updates(p, 4, 0.1, 30))
    assert updates_to_reach(p, 4, 0.1, exact) == 30


def test_against_the_clock_cheaper_updates_win_first_and_lose_last() -> None:
    """§4: async falls faster per second and ends higher than sync, at the same rate."""
    p, factor = problem(), staleness_factor(gamma=0.2, p0=0.05)
    at = [0.0, 20.0, 5_000.0]
    sync = error_after_time(p, 8, 0.1, at, update_time=2.7)
    fast = error_after_time(p, 1, 0.1, at, update_time=0.125, gamma_prime=factor)
    assert sync[0] == fast[0] == 1.0
    assert fast[1] < sync[1] and fast[2] > sync[2]
    # 0.3 / 0.1 is 2.9999999999999996 in doubles, and three updates.
    third = error_after_time(p, 1, 0.1, 0.3, update_time=0.1)
    assert float(third) == float(error_after_updates(p, 1, 0.1, 3))


# ------------------------------------------------------------ corrections


def test_printed_rates_of_theorem_3_diverge_and_ours_does_not() -> None:
    """k-async with K = P = 10 is gradient descent; M_G = σ² = 0; η = 1/(2L/K) is 5/L."""
    p, k = problem(smoothness=1.0, convexity=1.0, variance=0.0), 10
    printed = 1.0 / (2.0 * p.smoothness * (p.variance_growth / (k * p.batch_size) + 1.0 / k))
    assert printed == pytest.approx(5.0)
    errors, _, _ = stale_quadratic(1.0, printed, 0.0, math.sqrt(2.0), 5, delay=0)
    assert errors[0] == pytest.approx(1.0) and errors[-1] > 1e5
    with pytest.raises(InvalidSetting, match=r"at most 0\.5 = 1/\(2L.* got learning_rate=5"):
        error_after_updates(p, k, printed, 5, gamma_prime=1.5)
    safe = safe_learning_rate(p, k)
    errors, _, _ = stale_quadratic(1.0, safe, 0.0, math.sqrt(2.0), 5, delay=0)
    # Ours is attained here, to the last update.
    bound = error_after_updates(p, k, safe, np.arange(6), gamma_prime=1.5)
    assert errors == pytest.approx(bound.tolist())


def test_the_safe_rate_needs_no_second_condition() -> None:
    """The paper's "max{1/c, 1/(2L(...))}" must be min, which the second always is."""
    for growth in (0.0, 5.0):
        for c in (0.01, 2.0):
            p = problem(convexity=c, variance_growth=growth)
            assert safe_learning_rate(p, 4) <= 1.0 / (2.0 * p.convexity)
    assert safe_learning_rate(problem(variance_growth=32.0), 1) == pytest.approx(1 / (4 * 5))


def test_the_synchronous_bound_is_not_the_tightest() -> None:
    """With γ = 0 and p₀ = 1 Theorem 3 gives 1.5 to what Lemma 2 gives 1; both hold."""
    factor = staleness_factor(0.0, 1.0)
    assert (SYNCHRONOUS, factor) == (1.0, 1.5)
    for c in (0.05, 0.5, 2.0):
        p = problem(convexity=c)
        eta = safe_learning_rate(p, 4)
        noise = p.variance / (4 * p.batch_size)
        errors, _, _ = stale_quadratic(c, eta, noise, math.sqrt(2.0 / c), 200, delay=0)
        loose = error_after_updates(p, 4, eta, np.arange(201))
        tight = error_after_updates(p, 4, eta, np.arange(201), gamma_prime=factor)
        assert np.all(errors <= tight * (1 + 1e-12)) and np.all(tight <= loose * (1 + 1e-12))


@pytest.mark.parametrize("delay", [1, 2, 5])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_bound_holds_with_stale_gradients_of_a_quadratic(delay: int, share: float) -> None:
    p = problem()
    eta = share * safe_learning_rate(p, 4) / delay
    errors, norms, changes = stale_quadratic(
        p.convexity, eta, p.variance / 32, math.sqrt(2.0 / p.convexity), 400, delay
    )
    gamma = max(c / n for c, n in zip(changes, norms, strict=True))
    assert gamma < 1
    factor = staleness_factor(gamma, p0=0.0)
    bound = error_after_updates(p, 4, eta, np.arange(401), gamma_prime=factor)
    assert np.all(errors <= bound * (1 + 1e-12))
    means = np.cumsum(norms) / np.arange(1, 402)
    assert np.all(means <= gradient_after_updates(p, 4, eta, np.arange(401), gamma_prime=factor))
    # The estimator of the ratio of averages is between what single updates show.
    assert 0 < estimate_gamma(changes, norms) <= gamma


def test_the_compensated_bound_holds_and_ends_at_its_floor() -> None:
    p, eta, delay = problem(), 0.02, 3
    errors, _, changes = stale_quadratic(
        p.convexity, eta, p.variance / 8, math.sqrt(2.0 / p.convexity), 600, delay
    )
    c = eta * max(changes) / p.convexity**2  # ∇F(w) = c w here
    for j in (1, 10, 600):
        assert errors[j] <= compensated_error(p, [eta] * j, c)
    # Theorem 4 at a constant rate: the floor of async, and C L² / (2 η c (1 + p₀/2)).
    floor = compensated_error(p, [eta] * 20_000, c, p0=0.1)
    rho = eta * p.convexity * 1.05
    noise = eta**2 * p.smoothness * p.variance / (2 * p.batch_size)
    added = c * p.smoothness**2 / (2 * eta * p.convexity * 1.05)
    assert floor == pytest.approx(noise / rho + added)
    # Two updates by hand: the printed sum has a third term.
    one, two = 0.1, 0.05
    deltas = [r**2 * 2 * 4 / 16 + 0.001 * 4 / 2 for r in (one, two)]
    by_hand = (1 - two * 0.5) * ((1 - one * 0.5) * 1.0 + deltas[0]) + deltas[1]
    assert compensated_error(p, [one, two], 0.001) == pytest.approx(by_hand)
    assert compensated_error(p, [], 0.001) == 1.0


# ------------------------------------------------------------ where theory says which way


@given(
    k=st.integers(1, 20),
    share=st.floats(0.01, 1.0),
    factor=st.floats(0.1, 1.4),
    updates=st.integers(0, 1000),
    variance=st.floats(0, 100),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_bounds_move_as_theory_says(
    k: int, share: float, factor: float, updates: int, variance: float
) -> None:
    p = problem(variance=variance, variance_growth=3.0)
    eta = share * safe_learning_rate(p, 1)

    def bound(j: int, k: int, factor: float, p: Problem = p) -> float:
        return float(error_after_updates(p, k, eta, j, gamma_prime=factor))

    here, floor = bound(updates, k, factor), error_floor(p, k, eta, gamma_prime=factor)
    slack = 1e-12 + 1e-9 * here
    assert min(floor, 1.0) - slack <= here <= max(floor, 1.0) + slack
    assert bound(updates, k + 1, factor) <= here + slack  # more gradients, less noise
    assert bound(updates, k, factor + 0.1) <= here + slack  # fresher gradients
    if floor <= 1.0:
        assert bound(updates + 1, k, factor) <= here + slack
    assert safe_learning_rate(p, k) <= safe_learning_rate(p, k + 1)
    mean = gradient_after_updates(p, k, eta, [updates, updates + 1], gamma_prime=factor)
    assert mean[1] <= mean[0]
    noisier = problem(variance=variance + 1, variance_growth=3.0)
    assert bound(updates, k, factor, noisier) >= here - slack


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"smoothness": 0.0}, "expected smoothness > 0"),
        ({"smoothness": math.nan}, "expected smoothness > 0"),
        ({"convexity": -1.0}, "convexity c from 0 to the smoothness L = 2"),
        ({"convexity": 3.0}, "convexity c from 0 to the smoothness L = 2"),
        ({"variance": -1.0}, "expected variance >= 0"),
        ({"batch_size": 0}, "expected batch_size to be a whole number >= 1"),
        ({"initial_gap": math.inf}, "expected initial_gap >= 0"),
        ({"variance_growth": -0.1}, "expected variance_growth >= 0"),
    ],
)
def test_impossible_problems_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        problem(**changes)


def test_impossible_questions_are_refused() -> None:
    p = problem()
    for message, ask in {
        "gamma from 0 to 1, got gamma=1.2": lambda: staleness_factor(1.2, 0.0),
        "p0 from 0 to 1": lambda: staleness_factor(0.5, 2.0),
        "k to be a whole number >= 1, got k=0": lambda: safe_learning_rate(p, 0),
        "learning_rate > 0": lambda: error_floor(p, 1, 0.0),
        "gamma_prime above 0": lambda: error_floor(p, 1, 0.1, gamma_prime=0.0),
        "updates >= 0, got -1": lambda: error_after_updates(p, 1, 0.1, [-1, 2]),
        "updates >= 0": lambda: gradient_after_updates(p, 1, 0.1, -1),
        "error > 0": lambda: updates_to_reach(p, 1, 0.1, 0.0),
        "update_time > 0": lambda: error_after_time(p, 1, 0.1, 1.0, update_time=0.0),
        "convexity c > 0": lambda: error_floor(problem(convexity=0.0), 1, 0.1),
        "distance_bound >= 0": lambda: compensated_error(p, [0.1], -1.0),
        "at most 0.25": lambda: compensated_error(p, [0.1, 0.3], 0.1),
        "loss > 0": lambda: adapted_k(1, 2.0, 0.0, 8, time_grows="log"),
        "k0 below the number of learners": lambda: adapted_k(8, 2.0, 1.0, 8, time_grows="log"),
        "linear or log": lambda: adapted_k(1, 2.0, 1.0, 8, time_grows="cubic"),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(InvalidSetting, match=message):
            ask()


# ------------------------------------------------------------ the K of an interval


def test_adapted_k_is_where_the_bound_of_the_interval_is_least() -> None:
    """P = 8, K₀ = 1: losses 4.6 times smaller give 1.99 and 2.14, 46 times 4.67 and 6.78."""
    for ratio, log, root in ((4.6, 1.99, 2.14), (46.0, 4.67, 6.78)):
        assert _adapted(1, ratio, 1.0, 8, "log") == pytest.approx(log, abs=0.005)
        assert _adapted(1, ratio, 1.0, 8, "linear") == pytest.approx(root, abs=0.005)
    # The formula as usually written, where it loses no digits.
    r = 9 / 5 * 3.0
    by_hand = (-r + math.sqrt(r**2 + 4 * r * 8)) / 2
    assert _adapted(3, 3.0, 1.0, 8, "log") == pytest.approx(by_hand)
    # u(K) = a F τ(K) + b/K with b chosen so that K₀ is best at the start.
    k = np.linspace(0.5, 7.9, 20_000)
    for grows, tau, b in (("linear", k, 4.0), ("log", np.log(8 / (8 - k)), 4 / 6)):
        best = k[np.argmin(0.2 * tau + b / k)]
        assert _adapted(2, 1.0, 0.2, 8, grows) == pytest.approx(best, rel=1e-3)
    assert adapted_k(3, 1.0, 1.0, 8, time_grows="log") == 3
    assert adapted_k(4, 1.0, 1e-9, 8, time_grows="linear") == 8
    assert adapted_k(4, 1.0, 1e-9, 8, time_grows="log") == 8
    assert adapted_k(1, 1.0, 100.0, 8, time_grows="linear") == 1


# ------------------------------------------------------------ estimators


def test_estimators_find_the_constants_of_a_quadratic() -> None:
    """F(w) = ½ wᵀ diag(0.5, 1, 2) w: L = 2, c = 0.5."""
    rng = np.random.default_rng(11)
    diagonal = np.array([0.5, 1.0, 2.0])
    w, v = rng.normal(size=(2, 4000, 3))

    def squares(x: Any) -> Any:
        return (x**2).sum(axis=1)

    smoothness = estimate_smoothness(squares((w - v) * diagonal), squares(w - v))
    assert 1.99 < smoothness <= 2.0
    convexity = estimate_convexity(squares(w * diagonal), (diagonal * w**2).sum(axis=1) / 2)
    assert 0.5 <= convexity < 0.505
    gamma = estimate_gamma(squares((w - v) * diagonal), squares(w * diagonal))
    assert gamma == pytest.approx(2.0, rel=0.05)  # independent versions
    assert gamma <= gamma_from_distances(2.0, squares(w - v), squares(w * diagonal))
    # With one eigenvalue, 3, the bound is the thing itself.
    same = estimate_gamma(squares(3 * (w - v)), squares(3 * w))
    assert gamma_from_distances(3.0, squares(w - v), squares(3 * w)) == pytest.approx(same)


def test_the_staleness_factor_of_a_pilot() -> None:
    staleness, changes, norms = [0, 1, 2, 1], [0.0, 0.1, 0.4, 0.1], [1.0, 2.0, 2.0, 1.0]
    assert estimate_p0(staleness) == 0.25 and estimate_gamma(changes, norms) == pytest.approx(0.1)
    factor = estimate_staleness_factor(staleness, changes, norms)
    assert factor == pytest.approx(staleness_factor(0.1, 0.25)) == pytest.approx(1.025)
    assert estimate_staleness_factor([1], [3.0], [1.0]) == -2.0  # too stale for the theory


@given(
    pairs=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=12),
    batch_size=st.integers(1, 64),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_the_variance_is_fitted_as_well_as_least_squares_can(
    pairs: list[tuple[float, float]], batch_size: int
) -> None:
    noise, norms = np.array(pairs).T
    sigma2, growth = estimate_variance(noise, norms, batch_size)
    assert sigma2 >= 0 and growth >= 0
    design = np.stack([np.ones_like(norms), norms], axis=1)
    _, best = optimize.nnls(design, noise * batch_size)
    ours = float(np.linalg.norm(design @ [sigma2, growth] - noise * batch_size))
    assert ours <= best + 1e-6 * (1 + best)


def test_variance_of_drawn_gradients() -> None:
    rng = np.random.default_rng(12)
    norms = rng.uniform(0, 10, 20_000)
    noise = (3.0 + 0.5 * norms) / 16 * rng.chisquare(1, norms.size)
    sigma2, growth = estimate_variance(noise, norms, batch_size=16)
    assert (sigma2, growth) == (pytest.approx(3.0, abs=0.3), pytest.approx(0.5, abs=0.06))


@pytest.mark.parametrize(
    ("message", "estimate", "arguments"),
    [
        ("staleness to be a list of at least one finite number", estimate_p0, ([],)),
        ("staleness to be a list", estimate_p0, ([-1, 0],)),
        ("staleness to be a list", estimate_p0, ([[0, 1]],)),
        ("squared changes to be a list", estimate_gamma, ([math.nan], [1.0])),
        ("as many squared changes as squared norms, got 1 and 2", estimate_gamma, ([1.0], [1, 2])),
        ("squared norms that are not all 0", estimate_gamma, ([1.0], [0.0])),
        ("smoothness > 0", gamma_from_distances, (0.0, [1.0], [1.0])),
        ("distances that are not all 0", estimate_smoothness, ([1.0], [0.0])),
        ("gaps that are not all 0", estimate_convexity, ([1.0], [0.0])),
        ("batch_size >= 1, got batch_size=0", estimate_variance, ([1.0], [1.0], 0)),
    ],
)
def test_estimators_refuse_what_tells_nothing(
    message: str, estimate: Any, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        estimate(*arguments)
