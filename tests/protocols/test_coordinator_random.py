"""Random orders of events, watched by the oracle: thousands of seeds, and lists that shrink."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from driver import KINDS, Watched, choose_impossible, drive, make_coordinator, play
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import RULES, Settings

from gruppetto.protocols import PROTOCOLS
from gruppetto.protocols.messages import ApplyUpdate, Event, GradientPushed, LearnerJoined

SEEDS_PER_PROTOCOL = 600

#: What every protocol's seeds must reach, or the driver tests less than it says.
CORNERS = (
    "push-newer",
    "fail",
    "not-finite",
    "outdated",
    "impossible",
    "stolen",
    "leased while somebody is expected",
    "lost while expected",
    "after the end",
    "finished: epochs",
    "finished: updates",
    "finished: max-time",
    "finished: diverged",
    "finished: given-up",
    "warm-up over",
    "warm-up's last update cancels",
    "warm-up shortened by what is given up or dropped",
    "lost in the warm-up",
    "stopped in the warm-up",
)


def test_oracle_knows_every_protocol() -> None:
    """A protocol added to the table needs its rule in the oracle."""
    assert {name.partition(":")[0] for name in RULES} == set(PROTOCOLS)


@pytest.mark.parametrize("protocol", sorted(RULES))
def test_random_runs_keep_every_invariant(protocol: str) -> None:
    """The oracle raises inside `drive`; what is left to check is that the corners were reached."""
    seen: Counter[str] = Counter()
    # Its four cells share what adapts K, and all but that with the others.
    num_seeds = SEEDS_PER_PROTOCOL // 2 if protocol.startswith("adasync") else SEEDS_PER_PROTOCOL
    for seed in range(num_seeds):
        seen += drive(seed, protocol=protocol).seen
    corners = list(CORNERS)
    # K = 1 never holds anything between two events.
    if protocol not in ("async", "ringmaster", "ssp"):
        corners.append("lost while its contribution is held")
    # Elsewhere a learner never waits for others while there is anything to do.
    distinct, cancels, _ = RULES[protocol]
    if distinct or cancels:
        corners.append("several reserve at once")
    if protocol.startswith("adasync"):
        corners += ["K grows", "K shrinks", "measured in the warm-up"]
        corners.append("a measurement fires an update")
    missing = [corner for corner in corners if not seen[corner]]
    assert not missing, f"{num_seeds} seeds of {protocol} never reached {missing}"


@pytest.mark.parametrize("protocol", sorted(RULES))
def test_same_events_same_commands(protocol: str) -> None:
    """A log replays anywhere: a second coordinator answers it alike, refused events left out."""
    for seed in range(30):
        watched = drive(seed, protocol=protocol)
        second = make_coordinator(watched.settings)
        assert [second.handle(event) for event, _ in watched.log] == [
            commands for _, commands in watched.log
        ]


@pytest.mark.parametrize("learners", range(1, 7))
def test_hardsync_takes_the_stream_in_order(learners: int) -> None:
    """Update u is of mini-batches u * P to u * P + P - 1, whoever joins, leases or pushes first."""
    for seed in range(60):
        rng = random.Random(f"{learners} {seed}")
        num_mini_batches = rng.randint(1, 5 * learners + 1)
        watched = Watched(Settings("hardsync", learners, num_mini_batches))
        taken: list[list[int]] = []
        while watched.model.finished is None:
            open_leases, expected = watched.model.open, watched.model.expected
            events: list[Event] = [LearnerJoined(learner) for learner in sorted(expected)]
            events += [GradientPushed(c.lease, c.version, 0.5, 4) for c in open_leases.values()]
            for command in watched.send(rng.choice(events)):
                if isinstance(command, ApplyUpdate):
                    given = [watched.model.given[c.lease] for c in command.contributions]
                    taken.append(sorted(compute.mini_batch for compute in given))
        assert taken == [
            list(range(first, min(first + learners, num_mini_batches)))
            for first in range(0, num_mini_batches, learners)
        ], f"{learners} learners, seed {seed}"


SPECS = (
    "k-sync:k=2",
    "k-batch-sync:k=3",
    "k-async:k=2",
    "k-batch-async:k=3",
    "hardsync",
    "softsync:n=2",
    "async",
    "backup:b=1",
    "rennala:k=2",
    "ringmaster:r=2",
    "ssp:s=1",
    "adasync:over=k-sync,k0=1,interval=1",
    "adasync:over=k-batch-sync,k0=2,interval=1",
    "adasync:over=k-async,k0=1,interval=1",
    "adasync:over=k-batch-async,k0=1,interval=1",
)


@settings(
    max_examples=1000,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    configuration=st.builds(
        Settings,
        protocol=st.sampled_from(SPECS),
        learners=st.integers(2, 4),
        mini_batches=st.none() | st.integers(1, 12),
        on_late=st.sampled_from(["requeue", "drop"]),
        modulation=st.sampled_from(["none", "inverse-mean:cap=true"]),
        max_attempts=st.integers(1, 3),
        max_given_up=st.integers(0, 3),
        warmup=st.just(0) | st.integers(1, 14),
    ),
    choices=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40)), max_size=60),
)
def test_any_choices_keep_every_invariant(
    configuration: Settings, choices: list[tuple[str, int]]
) -> None:
    """The same, over lists of choices: a failure shrinks to its shortest story."""
    play(configuration, choices)


def test_every_impossible_event_is_refused_in_every_state() -> None:
    """Not one at random but all of them, at each event of some runs, and nothing changes."""
    for protocol in sorted(RULES):
        watched = drive(1, protocol=protocol)
        again = type(watched)(watched.settings)
        for event, _ in watched.log:
            again.send(event)
            for which in range(15 * 3):
                again.refuse(choose_impossible(again, which))
