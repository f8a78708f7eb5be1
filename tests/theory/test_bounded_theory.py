"""Protocols with a bound: simulated as the coordinator makes them, and unknown to closed forms."""

from __future__ import annotations

import math

import pytest
from test_timing import reference, sequence

from gruppetto.delays import DELAYS, KeyedDelays
from gruppetto.protocols import PROTOCOLS
from gruppetto.theory import epoch_time, fresh_fraction, mean_staleness, update_time
from gruppetto.theory.runtime import update_time_bounds
from gruppetto.theory.timing import simulate, simulate_counting

SPECS = (
    "async:max_staleness=4,on_stale=discard",
    "k-async:k=2,max_staleness=1,on_stale=discard",
    "softsync:n=2,max_staleness=1",
    "k-async:k=3,max_staleness=0",
    "async:max_staleness=4,on_stale=wait",
    "k-async:k=2,max_staleness=3,on_stale=wait",
    "ringmaster:r=3",
    "ssp:s=0",
    "ssp:s=2",
)


@pytest.mark.parametrize("spec", SPECS)
def test_long_runs_are_the_coordinators_own(spec: str) -> None:
    """With a learner ten times as slow, over several refills of the draws."""
    protocol = PROTOCOLS.parse(spec)
    delays = KeyedDelays(7, DELAYS.parse("exponential:mean=1"),
                         {2: DELAYS.parse("uniform:low=5,high=15")}, 5)  # fmt: skip
    updates = 800
    expected = reference(protocol, delays, 5, updates)
    assert sequence(protocol, delays, 5, updates, False) == (expected.times, expected.staleness)
    timing = simulate(protocol, delays, 5, updates)
    assert timing.mini_batches_cancelled == expected.num_cancelled
    assert timing.mini_batches_discarded == expected.num_discarded
    assert timing.idle_fraction == pytest.approx(expected.idle_fraction, abs=1e-9)
    lost = timing.mini_batches_cancelled + timing.mini_batches_discarded
    assert bool(lost) == (timing.lost_time > 0)
    if protocol.staleness_limit is not None:
        assert timing.max_staleness == protocol.staleness_limit


def test_what_is_held_back_is_counted_once() -> None:
    """Updates of more than K: all contributions are in the histogram, and no more."""
    protocol = PROTOCOLS.parse("async:max_staleness=4,on_stale=wait")
    delays = KeyedDelays(0, DELAYS.parse("exponential:mean=1"), {}, 5)
    timing, counts = simulate_counting(protocol, delays, 5, 1000)
    assert timing.updates == 1000
    assert int(counts.sum()) == timing.mini_batches_applied > 1000
    assert len(counts) == 5
    assert timing.mean_staleness == pytest.approx(
        sum(value * int(count) for value, count in enumerate(counts)) / counts.sum()
    )


@pytest.mark.parametrize("spec", SPECS)
def test_theory_does_not_know_them(spec: str) -> None:
    protocol, law = PROTOCOLS.parse(spec), DELAYS.parse("exponential:mean=1")
    for said in (
        update_time(protocol, law, 5),
        epoch_time(protocol, law, 5, 100),
        mean_staleness(protocol, law, 5),
        fresh_fraction(protocol, law, 5),
    ):
        assert said.kind == "unknown"
        assert "rules beyond its cell's" in said.why
    assert update_time_bounds(protocol, law, 5) == (0.0, math.inf)
