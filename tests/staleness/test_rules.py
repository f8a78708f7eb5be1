"""Step-size rules: their formulas written out, their bounds, and what they refuse."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.errors import InvalidSetting
from gruppetto.protocols import Async, Coordinator
from gruppetto.protocols.messages import (
    ApplyUpdate,
    Compute,
    GradientPushed,
    LearnerJoined,
)
from gruppetto.staleness import COMPENSATIONS, MODULATIONS, Factors, Situation

#: spec -> factors at staleness 0, 1, 2, 3, 8 of 3 learners at version 25.
FACTORS = {
    "none": [1.0, 1.0, 1.0, 1.0, 1.0],
    "inverse": [1.0, 1.0, 0.5, 1 / 3, 0.125],
    "delay-adaptive": [1.0, 1.0, 1.0, 1.0, 0.375],
    "threshold": [1.0, 1.0, 1.0, 1.0, 0.0],
    "threshold:scale=2.0": [1.0, 1.0, 1.0, 1.0, 0.25],
    "threshold:limit=1,scale=2.5": [1.0, 1.0, 1.0, 2.5 / 3, 0.3125],
    "threshold:limit=0": [1.0, 0.0, 0.0, 0.0, 0.0],
    "inverse-sqrt": [1.0, 0.5**0.5, 3**-0.5, 0.5, 1 / 3],
    "polynomial": [1.0, 0.5**0.5, 3**-0.5, 0.5, 1 / 3],
    "polynomial:a=1.0": [1.0, 0.5, 1 / 3, 0.25, 1 / 9],
    "polynomial:a=0.0": [1.0] * 5,
    "exponential:beta=0.5": [1.0, 0.5, 0.25, 0.125, 2**-8],
    "exponential:beta=1.0": [1.0] * 5,
    "annealed-power:updates=50": [1.0, 1.0, 2**-0.5, 3**-0.5, 8**-0.5],
    "annealed-power:updates=25": [1.0] * 5,
}
BY_NUMBERS = sorted(set(MODULATIONS) - {"distance"})


@pytest.mark.parametrize("spec", FACTORS)
def test_factors_are_the_formula(spec: str) -> None:
    rule = MODULATIONS.parse(spec)
    found = [rule.factor(Situation(s, 1.5, 3, 25)) for s in (0, 1, 2, 3, 8)]
    assert found == pytest.approx(FACTORS[spec], rel=1e-15)


def test_every_rule_is_in_the_table() -> None:
    named = {spec.partition(":")[0] for spec in FACTORS}
    assert named | {"distance", "inverse-mean"} == set(MODULATIONS)


def test_distance_is_dutta_equation_13() -> None:
    """min{C/d², η_max} / η_max, with the paper's own C = 0.005·η_max."""
    rule = MODULATIONS.parse("distance:c=5e-5")
    assert rule.needs_distance
    assert rule.factor(Situation(3)) is None
    for squared in (0.0, 1e-12, 0.004, 0.005, 0.006, 1.0, 1e6):
        expected = min(5e-5 / squared, 0.01) / 0.01 if squared else 1.0
        assert rule.factor_at_distance(squared, 0.01) == pytest.approx(expected, rel=1e-12)
    assert rule.factor_at_distance(4.0, 0.0) == 1.0


@given(
    st.sampled_from(BY_NUMBERS),
    st.integers(0, 10_000),
    st.floats(0, 1e4),
    st.integers(1, 64),
    st.integers(0, 10_000),
)
def test_factors_stay_between_0_and_1_and_fall_with_staleness(
    name: str, staleness: int, mean: float, live: int, version: int
) -> None:
    keys = {"exponential": ":beta=0.9", "annealed-power": ":updates=100"}
    rule = MODULATIONS.parse(name + keys.get(name, ""))
    here, later = (
        rule.factor(Situation(s, mean, live, version)) for s in (staleness, staleness + 1)
    )
    assert here is not None and later is not None
    assert 0.0 <= later <= here <= 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distance:c=0", "distance: expected c > 0 and finite, got c=0.0"),
        ("distance:c=nan", "distance: expected c > 0 and finite, got c=nan"),
        ("threshold:scale=-1", "threshold: expected scale >= 0 and finite, got scale=-1.0"),
        ("threshold:limit=-1", "threshold: expected limit >= 0, got limit=-1"),
        ("polynomial:a=-1", "polynomial: expected a >= 0 and finite, got a=-1.0"),
        ("exponential:beta=0", "exponential: expected 0 < beta <= 1, got beta=0.0"),
        ("exponential:beta=1.5", "exponential: expected 0 < beta <= 1, got beta=1.5"),
        ("annealed-power:updates=0", "annealed-power: expected updates >= 1, got updates=0"),
        ("distance", "modulation 'distance' needs c=; expected distance:c=,apply_to=learning-rate"),
    ],
)
def test_refused_rules(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        MODULATIONS.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dc-asgd:strength=-1", "dc-asgd: expected strength >= 0 and finite, got strength=-1.0"),
        ("dc-asgd-adaptive:decay=1", "dc-asgd-adaptive: expected 0 <= decay < 1, got decay=1.0"),
        ("gap-aware:decay=-0.1", "gap-aware: expected 0 <= decay < 1, got decay=-0.1"),
        ("gap", "unknown compensation 'gap'; valid: none, dc-asgd, dc-asgd-adaptive, gap-aware"),
    ],
)
def test_refused_compensations(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        COMPENSATIONS.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "dc-asgd",
        "dc-asgd:strength=1.0",
        "dc-asgd-adaptive:strength=0.5,decay=0.0",
        "gap-aware:decay=0.9",
    ],
)
def test_compensation_round_trip(text: str) -> None:
    assert COMPENSATIONS.format(COMPENSATIONS.parse(text)) == text


# ------------------------------------------------------------------------- normalising


def test_normalised_factors_written_out() -> None:
    """Each divided by the mean raw factor so far, its own update included."""
    factors = Factors(MODULATIONS.parse("polynomial:a=1.0,normalise=true"))
    updates = [[0], [1, 3], [3]]  # raw 1; 1/2, 1/4; 1/4
    found = [factors.of([Situation(s) for s in update]) for update in updates]
    means = [1.0, 1.75 / 3, 2.0 / 4]
    assert found[0] == [1.0]
    assert found[1] == pytest.approx([0.5 / means[1], 0.25 / means[1]], rel=1e-15)
    assert found[2] == pytest.approx([0.25 / means[2]], rel=1e-15)


@pytest.mark.parametrize("spec", ["inverse", "inverse-sqrt", "polynomial:a=1.0"])
def test_the_mean_step_size_is_kept(spec: str) -> None:
    """Of staleness that has no trend: 1 over a run, and far from it without normalising."""
    draw = random.Random(5)
    updates = [[Situation(draw.randint(0, 30))] * draw.randint(1, 4) for _ in range(2_000)]
    key = "," if ":" in spec else ":"
    found = {}
    for text in (spec, f"{spec}{key}normalise=true"):
        factors = Factors(MODULATIONS.parse(text))
        every = [f for update in updates for f in factors.of(update) if f is not None]
        assert all(math.isfinite(f) and f > 0 for f in every)
        found[text] = sum(every) / len(every)
    plain, normalised = found.values()
    assert plain < 0.5
    assert normalised == pytest.approx(1.0, abs=0.05)


def test_without_normalise_nothing_is_remembered() -> None:
    factors = Factors(MODULATIONS.parse("polynomial:a=1.0"))
    assert [factors.of([Situation(1)]) for _ in range(3)] == [[0.5]] * 3


def test_a_coordinator_tells_the_rules_what_they_ask_for() -> None:
    """Async with two learners: staleness, live learners and version, from events alone."""
    seen: list[Situation] = []

    class Watch(type(MODULATIONS.parse("none"))):  # type: ignore[misc]
        def factor(self, at: Situation) -> float:
            seen.append(at)
            return 0.5

    coordinator = Coordinator(Async(), range(2), 6, modulation=Watch())
    events: list[Any] = [LearnerJoined(0), LearnerJoined(1)]
    leases = {}
    for event in events:
        for command in coordinator.handle(event):
            if isinstance(command, Compute):
                leases[command.learner] = command
    applied = []
    for learner in (0, 0, 1):
        lease = leases[learner]
        for command in coordinator.handle(GradientPushed(lease.lease, lease.version, 1.0, 1)):
            if isinstance(command, Compute):
                leases[command.learner] = command
            elif isinstance(command, ApplyUpdate):
                applied += [c.factor for c in command.contributions]
    assert seen == [Situation(0, 1.0, 2, 0), Situation(0, 1.0, 2, 1), Situation(2, 1.0, 2, 2)]
    assert applied == [0.5] * 3
