"""A law that changes as a run goes on: whose jobs are slow when, and what theory still knows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gruppetto.delays import DELAYS, Constant, Exponential, KeyedDelays, Regimes, keyed_uniforms
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS
from gruppetto.theory import async_speedup, update_time, update_time_bounds
from gruppetto.theory.timing import simulate

LAW = Regimes(fast=1.0, slow=9.0, jobs=100, of=4)
P = 4


def test_learners_take_turns() -> None:
    """In its slow stretch a job takes nine times as long as the same draw in a fast one."""
    delays = KeyedDelays(7, LAW, {}, P)
    for slot in range(P):
        drawn = np.array([delays.draw(slot, n) for n in range(800)])
        ratio = drawn / Exponential(mean=1.0).quantile(keyed_uniforms(7, slot, 0, 800))
        slow = [(n // 100 + slot) % 4 == 0 for n in range(800)]
        assert ratio == pytest.approx(np.where(slow, 9.0, 1.0), rel=1e-12)


def test_draws_in_any_order_are_the_same() -> None:
    one, other = KeyedDelays(3, LAW, {}, P), KeyedDelays(3, LAW, {}, P)
    late_first = [other.draw(2, n) for n in (900, 5, 300)]
    assert late_first == [one.draw(2, n) for n in (900, 5, 300)]


def test_moments_are_those_of_whole_cycles() -> None:
    delays = KeyedDelays(1, LAW, {}, 1)
    drawn = np.array([delays.draw(0, n) for n in range(100_000)])
    assert drawn.mean() == pytest.approx(LAW.expectation(), rel=0.02)
    assert drawn.var() == pytest.approx(LAW.variance(), rel=0.05)
    below = float(LAW.quantile(np.array([0.9]))[0])
    assert (drawn <= below).mean() == pytest.approx(0.9, abs=0.005)


def test_equal_regimes_are_exponential() -> None:
    law, q = Regimes(fast=2.0, slow=2.0, jobs=5), np.array([0.1, 0.5, 0.999])
    assert law.quantile(q) == pytest.approx(Exponential(mean=2.0).quantile(q), rel=1e-12)
    assert law.variance() == pytest.approx(4.0)


@pytest.mark.parametrize("spec", ["hardsync", "k-sync:k=2", "k-batch-sync:k=3", "k-async:k=2"])
def test_theory_does_not_claim_what_rests_on_independence(spec: str) -> None:
    predicted = update_time(PROTOCOLS.parse(spec), LAW, P)
    assert (predicted.kind, predicted.seconds) == ("unknown", None)
    assert "depend on each other" in predicted.why
    low, high = update_time_bounds(PROTOCOLS.parse(spec), LAW, P)
    delays = KeyedDelays(0, LAW, {}, P)
    simulated = simulate(PROTOCOLS.parse(spec), delays, P, 4_000).mean_update_time
    assert low * 0.9 <= simulated <= high == math.inf


def test_where_nobody_waits_the_mean_is_enough() -> None:
    """Lemma 4 is a renewal argument: it holds for cycles of jobs as well."""
    protocol = PROTOCOLS.parse("k-batch-async:k=2")
    predicted = update_time(protocol, LAW, P)
    assert predicted.kind == "exact"
    simulated = simulate(protocol, KeyedDelays(0, LAW, {}, P), P, 8_000).mean_update_time
    assert simulated == pytest.approx(predicted.seconds, rel=0.05)


def test_the_speedup_of_theorem_1_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="independent delays"):
        async_speedup(LAW, P)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("regimes:fast=0,slow=1,jobs=5", "fast > 0"),
        ("regimes:fast=1,slow=2,jobs=0", "jobs >= 1"),
        ("regimes:fast=1,slow=2,jobs=5,of=1", "of >= 2"),
        ("regimes:fast=1,slow=2,jobs=1.5", "whole number"),
    ],
)
def test_bad_values(spec: str, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        DELAYS.parse(spec)


def test_one_law_of_several_may_change() -> None:
    delays = KeyedDelays(0, Constant(value=1.0), {1: LAW}, 2)
    assert not delays.are_independent
    assert KeyedDelays(0, Constant(value=1.0), {}, 2).are_independent
