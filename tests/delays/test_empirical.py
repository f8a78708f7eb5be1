"""A law made of measured seconds: a step function, its spec, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.delays import DELAYS, Aging, Empirical, keyed_uniforms
from gruppetto.errors import InvalidSetting

seconds = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=40)


@given(seconds, st.floats(0.0001, 0.9999))
@settings(max_examples=150, deadline=None)
def test_a_quantile_is_the_least_value_with_so_many_below(values: list[float], q: float) -> None:
    """The definition of an inverse CDF; one of the values, whatever their order."""
    law = Empirical.of(values)
    (x,) = law.quantile(np.array([q])).tolist()
    assert x in values
    assert law.cdf(np.array([x]))[0] >= q - 1e-12
    below = [v for v in values if v < x]
    assert not below or len(below) / len(values) < q + 1e-12
    assert law.cdf(np.array([x])) + law.sf(np.array([x])) == pytest.approx(1.0)


def test_moments_are_those_of_the_values() -> None:
    """No interpolation: exactly, and so do draws show them."""
    values = np.random.default_rng(0).gamma(2.0, size=333)
    law = Empirical.of(values)
    assert law.expectation() == math.fsum(values) / 333
    assert law.variance() == pytest.approx(float(np.var(values)), rel=1e-12)
    assert law.aging is Aging.UNKNOWN
    drawn = law.quantile(keyed_uniforms(1, 0, 0, 100_000))
    assert set(drawn.tolist()) == set(values.tolist())
    error = 5.0 * math.sqrt(law.variance() / 100_000)
    assert float(drawn.mean()) == pytest.approx(law.expectation(), abs=error)


def test_quantiles_from_above_are_those_from_below() -> None:
    """At every multiple of 1/n and between."""
    law = Empirical.of([1.0, 2.0, 3.0, 4.0])
    assert law.quantile(np.array([0.1, 0.25, 0.3, 0.5, 0.99])).tolist() == [1, 1, 2, 2, 4]
    assert law.upper_quantile(np.array([0.9, 0.75, 0.7, 0.5, 0.01])).tolist() == [1, 1, 2, 2, 4]


@given(st.text("ab/.:= -_é#", min_size=1))
@settings(max_examples=100, deadline=None)
def test_a_file_is_read_back_from_its_spec(name: str) -> None:
    """Equal signs, colons and spaces inside of names included."""
    if name != name.strip():
        with pytest.raises(InvalidSetting, match="no space at its ends"):
            Empirical(name)
        return
    law = Empirical(name)
    assert DELAYS.parse(DELAYS.format(law)) == law
    loaded = law.with_values([2.0, 1.0])
    assert loaded.seconds == (1.0, 2.0)
    assert loaded != law
    assert DELAYS.format(loaded) == DELAYS.format(law)


def test_equal_values_are_equal_laws() -> None:
    """In any order, and hashable."""
    law = Empirical.of([2.0, 1.0])
    assert law == Empirical.of(np.array([1.0, 2.0])) == Empirical.of([1, 2])
    assert hash(law) == hash(Empirical.of([1.0, 2.0]))
    assert law != Empirical.of([1.0, 2.0, 2.0])
    law.quantile(np.array([0.5]))
    assert law == Empirical.of([1.0, 2.0])  # what it keeps for speed does not count


def test_a_law_whose_values_are_still_in_the_file_cannot_be_used() -> None:
    """It says what it waits for."""
    law = DELAYS.parse("empirical:file=times.csv")
    for use in (law.expectation, law.variance, lambda: law.quantile(np.array([0.5]))):
        with pytest.raises(InvalidSetting) as caught:
            use()
        assert str(caught.value) == (
            "delay empirical:file=times.csv: expected its values to be loaded before use, got the "
            "name of their file only"
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "expected at least one value, got none"),
        ([1.0, -1.0], "expected seconds >= 0 and finite, got -1.0"),
        ([1.0, math.nan], "expected seconds >= 0 and finite, got nan"),
        ([1.0, math.inf], "expected seconds >= 0 and finite, got inf"),
        (["soon"], "expected a list of numbers, got something else"),
        ([[1.0], [2.0]], "expected a list of numbers, got something else"),
    ],
)
def test_values_that_are_no_times_are_refused(values: list[float], message: str) -> None:
    """In one sentence."""
    with pytest.raises(InvalidSetting, match=message):
        Empirical.of(values)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("empirical", "delay 'empirical' needs file=; expected empirical:file="),
        ("empirical:file=", "delay empirical: expected file=PATH, got no path"),
        ("empirical:path=x", "delay 'empirical' has no key 'path'; valid: file"),
    ],
)
def test_a_bad_spec_is_refused(spec: str, message: str) -> None:
    """As those of the other laws are."""
    with pytest.raises(InvalidSetting) as caught:
        DELAYS.parse(spec)
    assert str(caught.value) == message


def test_a_name_that_a_spec_cannot_hold_is_refused() -> None:
    """Rather than read back as something else."""
    with pytest.raises(InvalidSetting, match="no comma"):
        Empirical("/data/a,b.csv")
