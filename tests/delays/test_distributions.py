"""The laws of delay: their numbers against textbook formulas, and what they refuse.

Expected values are written out with ``math`` alone, so that a wrong parametrisation (a rate for a
mean, a variance for a deviation) cannot agree with itself.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from gruppetto.delays import DELAYS, Bimodal, Constant, Delay, keyed_uniforms
from gruppetto.errors import InvalidSetting

#: spec -> E[X] and the standard deviation, by hand; None where it is infinite.
MOMENTS: dict[str, tuple[float, float | None]] = {
    "constant:value=2.5": (2.5, 0.0),
    "exponential:mean=2.0": (2.0, 2.0),
    "shifted-exponential:shift=1.0,mean=0.5": (1.5, 0.5),
    "pareto:shape=3.0,scale=2.0": (3.0, math.sqrt(3.0)),
    "pareto:shape=1.5,scale=1.0": (3.0, None),
    "uniform:low=1.0,high=4.0": (2.5, 3.0 / math.sqrt(12.0)),
    "lognormal:median=2.0,sigma=0.5": (
        2.0 * math.exp(0.125),
        2.0 * math.exp(0.125) * math.sqrt(math.exp(0.25) - 1.0),
    ),
    "gamma:shape=4.0,scale=0.5": (2.0, 1.0),
    "gamma:shape=0.5,scale=2.0": (1.0, math.sqrt(2.0)),
    "weibull:shape=2.0,scale=1.0": (math.sqrt(math.pi) / 2.0, math.sqrt(1.0 - math.pi / 4.0)),
    "weibull:shape=1.0,scale=3.0": (3.0, 3.0),
    "bimodal:fast=1.0,slow=10.0,p_slow=0.1": (1.9, 2.7),
    # Over a whole cycle of 4 x 100 jobs: E[X²] is twice 0.75 + 0.25 · 81.
    "regimes:fast=1.0,slow=9.0,jobs=100": (3.0, math.sqrt(2.0 * (0.75 + 0.25 * 81.0) - 9.0)),
}

_NORMAL = NormalDist()


def _q(law: Delay, *probabilities: float) -> list[float]:
    return [float(x) for x in law.quantile(np.array(probabilities))]


@pytest.mark.parametrize("spec", MOMENTS)
def test_the_expectation_is_the_textbooks(spec: str) -> None:
    """In closed form, to the last digits."""
    assert DELAYS.parse(spec).expectation() == pytest.approx(MOMENTS[spec][0], rel=1e-12)


@pytest.mark.parametrize("spec", MOMENTS)
def test_the_variance_is_the_textbooks(spec: str) -> None:
    """In closed form as well, and infinite where the tail is too heavy for one."""
    deviation = MOMENTS[spec][1]
    expected = math.inf if deviation is None else deviation**2
    assert DELAYS.parse(spec).variance() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("spec", MOMENTS)
def test_the_mean_of_many_draws_is_the_expectation(spec: str) -> None:
    """100,000 keyed draws: within five standard errors, and the deviation too where it is one."""
    mean, deviation = MOMENTS[spec]
    drawn = DELAYS.parse(spec).quantile(keyed_uniforms(7, 0, 0, 100_000))
    if deviation is None:
        assert float(drawn.mean()) == pytest.approx(mean, rel=0.1)
        return
    error = 5.0 * deviation / math.sqrt(len(drawn))
    assert float(drawn.mean()) == pytest.approx(mean, abs=max(error, 1e-12))
    if "pareto" not in spec:  # its fourth moment is infinite, so its deviation is not measurable
        assert float(drawn.std()) == pytest.approx(deviation, rel=0.03, abs=1e-12)


@pytest.mark.parametrize("spec", MOMENTS)
def test_quantiles_rise_and_are_never_negative(spec: str) -> None:
    """From one end of (0, 1) to the other, up to the most extreme uniforms there are."""
    law = DELAYS.parse(spec)
    q = np.concatenate([[2.0**-54], np.linspace(0.001, 0.999, 999), [1.0 - 2.0**-53]])
    values = law.quantile(q)
    assert values.shape == q.shape
    assert values.dtype == np.float64
    assert np.isfinite(values).all()
    assert (values >= 0.0).all()
    assert (np.diff(values) >= 0.0).all()
    if not isinstance(law, Constant | Bimodal):
        assert (np.diff(values) > 0.0).all()


@pytest.mark.parametrize("spec", MOMENTS)
def test_quantiles_keep_their_shape(spec: str) -> None:
    """Elementwise over arrays of any shape, the empty one too."""
    law = DELAYS.parse(spec)
    assert law.quantile(np.full((2, 3), 0.5)).shape == (2, 3)
    assert law.quantile(np.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("constant:value=2.5", {0.01: 2.5, 0.99: 2.5}),
        ("exponential:mean=2.0", {0.5: 2.0 * math.log(2.0), 0.9: 2.0 * math.log(10.0)}),
        ("shifted-exponential:shift=1.0,mean=0.5", {0.5: 1.0 + 0.5 * math.log(2.0)}),
        ("pareto:shape=3.0,scale=2.0", {0.5: 2.0 * 2.0 ** (1 / 3), 0.999: 20.0}),
        ("uniform:low=1.0,high=4.0", {0.25: 1.75, 0.5: 2.5}),
        (
            "lognormal:median=2.0,sigma=0.5",
            {0.5: 2.0, 0.9: 2.0 * math.exp(0.5 * _NORMAL.inv_cdf(0.9))},
        ),
        ("gamma:shape=1.0,scale=2.0", {0.5: 2.0 * math.log(2.0)}),
        ("weibull:shape=2.0,scale=3.0", {0.5: 3.0 * math.sqrt(math.log(2.0))}),
        ("bimodal:fast=1.0,slow=10.0,p_slow=0.1", {0.05: 1.0, 0.89: 1.0, 0.91: 10.0}),
    ],
)
def test_quantiles_are_the_textbooks(spec: str, expected: dict[float, float]) -> None:
    """Inverse CDFs by hand."""
    law = DELAYS.parse(spec)
    assert _q(law, *expected) == pytest.approx(list(expected.values()), rel=1e-12)


def test_a_gamma_of_whole_shape_is_a_sum_of_exponentials() -> None:
    """P(X <= q) of two stages is 1 - (1 + q/s)·exp(-q/s), turned round."""
    (median,) = _q(DELAYS.parse("gamma:shape=2.0,scale=3.0"), 0.5)
    assert 1.0 - (1.0 + median / 3.0) * math.exp(-median / 3.0) == pytest.approx(0.5, rel=1e-12)


def test_a_heavy_tail_has_no_mean() -> None:
    """And says so: infinite, not a large number and not an error."""
    assert DELAYS.parse("pareto:shape=1.0,scale=1.0").expectation() == math.inf
    assert DELAYS.parse("pareto:shape=0.5,scale=1.0").expectation() == math.inf


def test_the_share_of_slow_draws_is_exact_at_both_ends() -> None:
    """p_slow of 0 is never slow, of 1 is always slow."""
    q = keyed_uniforms(3, 0, 0, 2000)
    assert set(Bimodal(1.0, 10.0, 0.0).quantile(q)) == {1.0}
    assert set(Bimodal(1.0, 10.0, 1.0).quantile(q)) == {10.0}


# ---------------------------------------------------------------------- specs


@pytest.mark.parametrize("spec", [*MOMENTS, "constant:value=0.0", "uniform:low=0.0,high=0.1"])
def test_a_spec_is_read_back_as_it_was_written(spec: str) -> None:
    """Text to law to text to law."""
    law = DELAYS.parse(spec)
    assert DELAYS.format(law) == spec
    assert DELAYS.parse(DELAYS.format(law)) == law
    assert hash(law) == hash(DELAYS.parse(spec))


def test_every_law_is_tested_here() -> None:
    """A new one needs its row in the table above; the one made of samples has its own file."""
    assert {spec.partition(":")[0] for spec in MOMENTS} == set(DELAYS) - {"empirical"}


BAD: list[tuple[str, str]] = [
    ("constant:value=-1", "delay constant: expected value >= 0 and finite, got value=-1.0"),
    ("constant:value=nan", "delay constant: expected value >= 0 and finite, got value=nan"),
    ("constant:value=inf", "delay constant: expected value >= 0 and finite, got value=inf"),
    ("exponential:mean=0", "delay exponential: expected mean > 0, got mean=0.0"),
    ("exponential:mean=-2", "expected mean >= 0 and finite, got mean=-2.0"),
    ("shifted-exponential:shift=-1,mean=1", "expected shift >= 0 and finite, got shift=-1.0"),
    ("shifted-exponential:shift=1,mean=0", "expected mean > 0, got mean=0.0"),
    ("pareto:shape=0,scale=1", "delay pareto: expected shape > 0, got shape=0.0"),
    ("pareto:shape=1,scale=0", "delay pareto: expected scale > 0, got scale=0.0"),
    ("uniform:low=2,high=2", "expected low < high, got low=2.0 and high=2.0"),
    ("uniform:low=3,high=2", "expected low < high, got low=3.0 and high=2.0"),
    ("lognormal:median=0,sigma=1", "delay lognormal: expected median > 0, got median=0.0"),
    ("lognormal:median=1,sigma=0", "delay lognormal: expected sigma > 0, got sigma=0.0"),
    ("gamma:shape=0,scale=1", "delay gamma: expected shape > 0, got shape=0.0"),
    ("gamma:shape=1,scale=0", "delay gamma: expected scale > 0, got scale=0.0"),
    ("weibull:shape=0,scale=1", "delay weibull: expected shape > 0, got shape=0.0"),
    ("weibull:shape=1,scale=0", "delay weibull: expected scale > 0, got scale=0.0"),
    ("bimodal:fast=1,slow=2,p_slow=1.5", "delay bimodal: expected p_slow <= 1, got 1.5"),
    ("bimodal:fast=1,slow=2,p_slow=-0.5", "expected p_slow >= 0 and finite, got p_slow=-0.5"),
    ("bimodal:fast=3,slow=2,p_slow=0.5", "expected fast <= slow, got fast=3.0 and slow=2.0"),
    ("exponential:mean=soon", "delay exponential:mean: expected a number, got 'soon'"),
    ("exponential", "delay 'exponential' needs mean=; expected exponential:mean="),
    ("exponential:rate=1", "delay 'exponential' has no key 'rate'; valid: mean"),
    ("exponentail:mean=1", "did you mean 'exponential'?"),
    ("exponential:", "ends in a colon"),
    ("", "name:key=value, got ''"),
]


@pytest.mark.parametrize(("spec", "message"), BAD)
def test_a_bad_parameter_is_refused_in_a_sentence(spec: str, message: str) -> None:
    """Which law, what was expected, what came; one line."""
    with pytest.raises(InvalidSetting) as caught:
        DELAYS.parse(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_parameter_of_every_law_is_checked() -> None:
    """No field lets a negative number, infinity or not-a-number through."""
    for spec in MOMENTS:
        name, _, given = spec.partition(":")
        keys = dict(part.split("=") for part in given.split(","))
        for key in keys:
            for bad in ("-1.0", "inf", "nan"):
                changed = ",".join(f"{k}={bad if k == key else v}" for k, v in keys.items())
                with pytest.raises(
                    InvalidSetting, match=f"expected {key} >= 0 and finite|whole number"
                ):
                    DELAYS.parse(f"{name}:{changed}")
