"""Fits: families found again, censored times counted, and what is not one law said in words.

All times are made of keyed seeds, so every test gives one answer for good; the shares of false
alarms are counted over seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest

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
    fit,
)
from gruppetto.delays.diagnostics import departures
from gruppetto.delays.families import FAMILIES, log_likelihood
from gruppetto.delays.survival import distance, kaplan_meier, product_limit_quantiles, scores
from gruppetto.errors import InvalidSetting

Floats = npt.NDArray[np.float64]
Times = dict[int, Floats]

LAWS: list[Delay] = [
    Exponential(2.0),
    ShiftedExponential(1.0, 0.5),
    Gamma(2.5, 0.4),
    Gamma(0.4, 1.0),
    Weibull(0.7, 1.0),
    Weibull(3.0, 1.0),
    Lognormal(2.0, 0.7),
    Pareto(1.5, 1.0),
    Uniform(1.0, 4.0),
    Constant(2.0),
    Bimodal(1.0, 10.0, 0.1),
]
#: Those whose likelihood is a density.
SMOOTH = LAWS[:9]
NONE = np.empty(0)


def times_of(law: Delay, seed: int, learners: int = 8, each: int = 500) -> Times:
    rng = np.random.default_rng(seed)
    return {learner: law.quantile(rng.random(each)) for learner in range(learners)}


def k_sync(
    law: Delay, seed: int, learners: int = 8, k: int = 4, rounds: int = 300
) -> tuple[Times, Times]:
    """Rounds of so many, all cancelled when the k-th is there."""
    drawn = law.quantile(np.random.default_rng(seed).random((rounds, learners)))
    ends = np.sort(drawn, axis=1)[:, k - 1]
    is_whole = drawn <= ends[:, None]
    whole = {n: drawn[is_whole[:, n], n] for n in range(learners)}
    return whole, {n: ends[~is_whole[:, n]] for n in range(learners)}


def parameters(law: Delay) -> list[float]:
    return [value for key, value in vars(law).items() if not key.startswith("_")]


# --------------------------------------------------------------- families found again


@pytest.mark.parametrize("law", LAWS, ids=DELAYS.format)
def test_a_family_is_found_again(law: Delay) -> None:
    """8 learners of 500: the family, its parameters within 10 %, nothing to warn of."""
    found = fit(times_of(law, 0))
    assert type(found.law) is type(law)
    assert parameters(found.law) == pytest.approx(parameters(law), rel=0.1)
    assert found.warnings == ()
    assert (found.num_samples, found.num_censored) == (4000, 0)
    assert all(type(value) is float for value in parameters(found.law))
    assert DELAYS.parse(DELAYS.format(found.law)) == found.law


@pytest.mark.parametrize("law", SMOOTH, ids=DELAYS.format)
def test_cancelled_jobs_are_not_forgotten(law: Delay) -> None:
    """K-sync, the slower half of each round cut off: the law is found, and without them it is not.

    What was cut off is fitted within 12 %. Whole times alone have less than 0.75 of the mean.
    """
    whole, cut = k_sync(law, 1)
    found = fit(whole, cut)
    assert type(found.law) is type(law)
    if not isinstance(law, Pareto):
        assert found.law.expectation() == pytest.approx(law.expectation(), rel=0.12)
    assert parameters(found.law) == pytest.approx(parameters(law), rel=0.12)
    assert (found.num_samples, found.num_censored) == (1200, 1200)
    (warning,) = found.warnings
    assert "of mini-batches were always cancelled" in warning
    naive = fit(whole)
    q = np.array([0.75])
    assert naive.law.quantile(q)[0] < 0.85 * law.quantile(q)[0]
    assert found.law.quantile(q)[0] == pytest.approx(law.quantile(q)[0], rel=0.06)


def test_a_slow_value_that_was_cut_off_counts() -> None:
    """Two values; a job cancelled between them was a slow one, one before the first either."""
    times = np.array([1.0] * 60 + [10.0] * 20)
    found = fit(times, np.array([1.5] * 20 + [0.5] * 7))
    assert found.law == Bimodal(1.0, 10.0, 0.4)
    assert found.gof_p is None
    assert found.ranking == ()


def test_rounding_does_not_make_a_constant_anything_else() -> None:
    """Virtual times are differences of clock readings."""
    ends = np.cumsum(np.full(500, 0.1))
    found = fit(np.diff(ends))
    assert isinstance(found.law, Constant)
    assert found.law.value == pytest.approx(0.1, rel=1e-9)
    assert fit(np.zeros(40)).law == Constant(0.0)


@pytest.mark.parametrize("law", SMOOTH, ids=DELAYS.format)
def test_estimates_are_the_likeliest(law: Delay) -> None:
    """No neighbour is likelier, with and without cut-off times."""
    every = law.quantile(np.random.default_rng(2).random(600))
    limits = np.median(every) * np.exp(np.random.default_rng(3).normal(size=600) / 2.0)
    for times, cut in ((every, NONE), (every[every <= limits], limits[every > limits])):
        for kind, family in FAMILIES.items():
            best = family.estimate(times, cut)
            assert best is not None
            likelihood = log_likelihood(best, times, cut)
            values = np.array(parameters(best))
            for change in np.concatenate([np.eye(values.size), -np.eye(values.size)]) * 1e-3:
                neighbour = kind(*(values * (1.0 + change)).tolist())
                assert log_likelihood(neighbour, times, cut) <= likelihood + 1e-5


def test_families_are_ranked_by_bic() -> None:
    """Best first, and the numbers are what they are called."""
    found = fit(times_of(Gamma(2.5, 0.4), 0))
    bics = [candidate.bic for candidate in found.ranking]
    assert bics == sorted(bics)
    assert found.ranking[0].law == found.law
    assert len(found.ranking) == len(FAMILIES)
    for candidate in found.ranking:
        count = len(parameters(candidate.law))
        assert candidate.aic == pytest.approx(2.0 * count - 2.0 * candidate.log_likelihood)
        assert candidate.bic == pytest.approx(
            count * math.log(4000) - 2.0 * candidate.log_likelihood
        )


def test_zeros_leave_the_families_that_allow_them() -> None:
    """A time of 0 has no logarithm."""
    found = fit(np.append(np.random.default_rng(0).exponential(size=300), 0.0))
    kinds = {type(candidate.law) for candidate in found.ranking}
    assert kinds == {Exponential, ShiftedExponential, Uniform}
    assert isinstance(found.law, Exponential)


# --------------------------------------------------------------- goodness of fit


def test_no_family_fits_two_humps() -> None:
    """The measured times themselves are used, and it is said."""
    rng = np.random.default_rng(0)
    slow = rng.random(4000) < 0.3
    times = np.where(slow, rng.normal(5.0, 0.3, 4000), rng.normal(1.0, 0.1, 4000))
    found = fit(times)
    assert found.law == Empirical.of(times)
    assert found.gof_p is not None and found.gof_p < 0.01
    (warning,) = found.warnings
    assert warning.startswith("no family fits: the best one, ")
    assert warning.endswith("the measured times themselves are used instead")


def test_without_a_family_cancelled_jobs_still_count() -> None:
    """Kaplan and Meier's estimate: the mean within 3 %, that of whole times is 26 % too short."""
    rng = np.random.default_rng(0)
    every = np.where(rng.random(6000) < 0.4, rng.normal(5.0, 0.3, 6000), rng.normal(1, 0.1, 6000))
    limits = rng.uniform(0.5, 8.0, 6000)
    whole = every[every <= limits]
    found = fit(whole, limits[every > limits])
    assert isinstance(found.law, Empirical)
    assert found.law.expectation() == pytest.approx(float(every.mean()), rel=0.03)
    assert float(whole.mean()) < 0.85 * float(every.mean())


def test_p_values_are_not_too_small() -> None:
    """Where a family is right: below 0.01 in at most 2 of 40 samples, below 0.25 in a quarter."""
    p = np.array([fit(times_of(Weibull(0.7, 1.0), seed, 2, 200)).gof_p for seed in range(40)])
    assert int(np.sum(p < 0.01)) <= 2
    assert 2 <= int(np.sum(p < 0.25)) <= 20


def test_a_fit_depends_on_its_seed_only() -> None:
    """No hidden state."""
    whole, cut = k_sync(Gamma(2.5, 0.4), 5)
    assert fit(whole, cut, seed=3) == fit(whole, cut, seed=3)
    assert hash(fit(whole, cut).law) == hash(fit(whole, cut, seed=4).law)


@pytest.mark.parametrize(
    "law", [Exponential(2.0), Gamma(2.5, 0.4), Bimodal(1.0, 10.0, 0.1)], ids=str
)
def test_resampling_shows_how_uncertain_the_mean_is(law: Delay) -> None:
    """100 laws of 800 times: as spread as means of 800 are, within a third, and of one family."""
    found = fit(times_of(law, 3, 4, 200))
    rng = np.random.default_rng(0)
    laws = [found.resample(rng) for _ in range(100)]
    assert {type(one) for one in laws} == {type(law)}
    means = [one.expectation() for one in laws]
    assert np.std(means) == pytest.approx(math.sqrt(law.variance() / 800), rel=0.33)
    again = np.random.default_rng(0)
    assert [found.resample(again) for _ in range(3)] == laws[:3]


def test_resampling_keeps_cancelled_jobs_and_measured_times() -> None:
    """The kind of law stays, for what was cut off as well."""
    whole, cut = k_sync(Lognormal(1.0, 1.0), 0, rounds=60)
    rng = np.random.default_rng(0)
    assert isinstance(fit(whole, cut).resample(rng), Lognormal)
    steps = fit(np.random.default_rng(0).choice([1.0, 2.0, 5.0], size=400))
    assert isinstance(steps.law, Empirical)
    assert isinstance(steps.resample(rng), Empirical)
    assert isinstance(fit(np.full(20, 2.0)).resample(rng), Constant)


# ------------------------------------------------------------ what is not one law


def found_in(times: Times, censored: Mapping[int, Floats] | None = None) -> str:
    """The first words of the only warning."""
    (warning,) = fit(times, censored).warnings[:1]
    assert "\n" not in warning
    return warning


def test_learners_that_differ() -> None:
    """One of eight takes half as long again."""
    times = times_of(Gamma(4.0, 0.25), 0)
    times[5] = times[5] * 1.5
    warning = found_in(times)
    assert warning.startswith("learners differ persistently: learner 5 takes 1.35 s in the median")
    assert "Kruskal-Wallis" in warning


def test_learners_that_differ_though_the_slow_ones_are_cancelled() -> None:
    """By scores that know of cut-off times: the slow learner's whole times look like all others."""
    drawn = Exponential(1.0).quantile(np.random.default_rng(0).random((400, 8)))
    drawn[:, 2] *= 3.0
    ends = np.sort(drawn, axis=1)[:, 3]
    is_whole = drawn <= ends[:, None]
    whole = {n: drawn[is_whole[:, n], n] for n in range(8)}
    cut = {n: ends[~is_whole[:, n]] for n in range(8)}
    assert any("learner 2 takes" in warning for warning in departures(whole, cut).sentences)
    assert not any("learners differ" in warning for warning in departures(whole, {}).sentences)


def test_a_learner_that_is_always_cancelled() -> None:
    """It takes longer than anybody can tell."""
    times = times_of(Exponential(1.0), 0, 3, 100)
    (warning,) = departures(times, {3: np.full(100, 2.0)}).sentences
    assert "learner 3 takes inf s on average" in warning


def test_times_that_drift() -> None:
    """A fifth longer at the end than at the start."""
    times = {n: x * np.linspace(1.0, 1.2, x.size) for n, x in times_of(Gamma(9.0, 0.1), 0).items()}
    warning = found_in(times)
    assert warning.startswith("times drift: the median is 0.")
    assert len(departures(times, {}).sentences) == 1  # a drift alone is no dependence


def test_times_that_depend_on_the_last() -> None:
    """The logarithm an autoregression with coefficient 0.5, or with -0.5."""
    for coefficient, consequence in ((0.5, "slow ones come in a row"), (-0.5, "alternate")):
        rng = np.random.default_rng(0)
        times: Times = {}
        for learner in range(8):
            logs = rng.normal(size=500) * 0.3
            for i in range(1, 500):
                logs[i] += coefficient * logs[i - 1]
            times[learner] = np.exp(logs)
        warning = found_in(times)
        assert warning.startswith("a learner's times depend on the ones before: correlation")
        assert consequence in warning
        # Rows of slow ones are no difference, and no drift.
        assert len(departures(times, {}).sentences) == 1


def test_too_few_times() -> None:
    """The number that would do is named."""
    assert found_in(times_of(Exponential(1.0), 0, 4, 5)) == (
        "20 mini-batches are few: families cannot be told apart by fewer than 30"
    )
    assert fit(np.array([1.0, 2.0])).gof_p is None


def test_a_difference_of_no_consequence_is_not_told() -> None:
    """2 % is significant with enough times, and does not matter."""
    times = times_of(Gamma(100.0, 0.01), 0, 4, 4000)
    times[0] = times[0] * 1.02
    times = {n: x * np.linspace(1.0, 1.02, x.size) for n, x in times.items()}
    assert departures(times, {}).sentences == ()


@pytest.mark.parametrize("law", [Exponential(2.0), Pareto(1.5, 1.0)], ids=DELAYS.format)
def test_false_alarms_are_rare(law: Delay) -> None:
    """One law, independent: of 60 runs each, whole and cut off, at most 1 is warned of.

    Found over 400 runs each: 2, 2 and 2.
    """
    alarms: Counter[str] = Counter()
    for seed in range(60):
        alarms["whole"] += bool(departures(times_of(law, seed), {}).sentences)
        alarms["few"] += bool(departures(times_of(law, seed, 16, 20), {}).sentences)
        alarms["k-sync"] += bool(departures(*k_sync(law, seed)).sentences)
    assert max(alarms.values()) <= 1


# --------------------------------------------------------------------- survival


def test_kaplan_and_meiers_estimate_by_hand() -> None:
    """Five jobs; one cut off at a time at which another ended is cut off after it."""
    times, after = kaplan_meier(np.array([2.0, 1.0, 4.0]), np.array([2.0, 3.0]))
    assert times.tolist() == [1.0, 2.0, 4.0]
    assert after == pytest.approx([4 / 5, 4 / 5 * 3 / 4, 0.0])
    q = np.array([0.1, 0.3, 0.5, 0.99])
    found = product_limit_quantiles(np.array([2.0, 1.0]), np.array([2.0, 3.0]), q)
    assert found.tolist() == [1.0, 2.0, 2.0, 3.0]


def test_scores_are_ranks_without_cut_off_times() -> None:
    """Turned round, ties halved, and they sum to nothing."""
    whole, cut = scores(np.array([1.0, 2.0, 2.0, 9.0]), NONE)
    assert whole == pytest.approx([0.75, 0.0, 0.0, -0.75])
    assert cut.size == 0
    whole, cut = scores(np.array([1.0, 5.0]), np.array([0.5, 3.0]))
    assert float(whole.sum() + cut.sum()) == pytest.approx(0.0, abs=1e-12)


def test_the_distance_is_cramer_and_von_mises() -> None:
    """1/(12 n) + Σ ((2i-1)/(2n) - F(x_i))²."""
    law, x = Gamma(2.0, 1.0), np.sort(np.random.default_rng(0).gamma(2.0, size=50))
    i = np.arange(1, 51)
    expected = 1.0 / 600.0 + float(np.sum(((2 * i - 1) / 100.0 - law.cdf(x)) ** 2))
    assert distance(law, x, NONE) == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.array([1.0]), "delay fit: expected at least 2 mini-batches that were not cancelled"),
        ({}, "expected at least 2 mini-batches"),
        ({3: np.array([1.0, -1.0])}, "expected seconds >= 0 and finite for learner 3, got -1.0"),
        ({3: np.array([1.0, math.nan])}, "finite for learner 3, got nan"),
        ({3: np.array([math.inf, 1.0])}, "finite for learner 3, got inf"),
        ({3: np.array(["a"])}, "expected a list of seconds for learner 3, got something else"),
        ({3: np.ones((2, 2))}, "expected a list of seconds for learner 3, got something else"),
    ],
)
def test_what_are_no_times_is_refused(samples: Times, message: str) -> None:
    """In one sentence; censored times as well."""
    with pytest.raises(InvalidSetting) as caught:
        fit(samples)
    assert message in str(caught.value)
    if isinstance(samples, dict) and samples:
        with pytest.raises(InvalidSetting):
            fit(np.array([1.0, 2.0]), samples)
