"""Bounds under random events, who contributed nothing, and what is refused with which sentence."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from typing import Any

import pytest
from bound_oracle import BOUNDABLE, CORNERS
from driver import KINDS, Watched, drive, play
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Settings
from test_coordinator_scripts import everybody, failed, lost, push

from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS, Coordinator, Protocol, with_bound
from gruppetto.protocols.account import Account
from gruppetto.protocols.bounded import UNBOUNDED, RestartBound, in_time
from gruppetto.protocols.contributions import describe, without_contribution
from gruppetto.protocols.messages import (
    ApplyUpdate,
    Compute,
    GradientPushed,
    LearnerJoined,
    StopRequested,
)

SEEDS = 100


# ------------------------------------------------------------------------ at random


@pytest.mark.parametrize("protocol", BOUNDABLE)
@pytest.mark.parametrize("bound", ["discard", "restart", "wait"])
def test_random_runs_keep_within_every_bound(protocol: str, bound: str) -> None:
    """With deaths, joins, failures, warm-ups and late pushes; and every one comes to its end."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += drive(seed, protocol=protocol, bound=bound).seen
    missing = [corner for corner in CORNERS[bound] if not seen[corner]]
    assert not missing, f"{SEEDS} seeds of {protocol}, {bound} never reached {missing}"


def test_random_runs_of_clocks() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += drive(seed, protocol="ssp").seen
    assert all(seen[corner] for corner in CORNERS["clocks"])


SPECS = (
    *("async:max_staleness=0,on_stale=discard", "k-async:k=2,max_staleness=1,on_stale=discard"),
    *("k-batch-async:k=2,max_staleness=0", "k-async:k=2,max_staleness=0", "ringmaster:r=2"),
    *("async:max_staleness=3,on_stale=wait", "k-async:k=2,max_staleness=1,on_stale=wait"),
    *("softsync:n=2,max_staleness=3,on_stale=wait", "ssp:s=0", "ssp:s=2"),
)


@settings(
    max_examples=200,
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
        max_given_up=st.integers(0, 3),
        warmup=st.just(0) | st.integers(1, 8),
    ),
    choices=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 40)), max_size=60),
)
def test_any_choices_keep_within_every_bound(
    configuration: Settings, choices: list[tuple[str, int]]
) -> None:
    """The same over lists that shrink: no deadlock, accounts add up, the bound holds."""
    play(configuration, choices)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(
    versions=st.lists(st.integers(0, 6), max_size=7),
    first=st.integers(0, 6),
    k=st.integers(1, 3),
    s=st.integers(0, 4),
)
def test_in_time_is_what_some_order_achieves(
    versions: list[int], first: int, k: int, s: int
) -> None:
    """Earliest deadline first is beside all orders there are: updates of up to k, one by one."""

    def possible(left: tuple[int, ...], version: int) -> bool:
        if not left:
            return True
        if any(v + s < version for v in left):
            return False
        sizes = min(k, len(left))
        rest = {tuple(sorted(r)) for r in _without(left, sizes)}
        return any(possible(r, version + 1) for r in rest)

    assert in_time(versions, first, k, s) == possible(tuple(sorted(versions)), first)


def _without(values: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [values]
    return [
        rest
        for i in range(len(values))
        for rest in _without(values[:i] + values[i + 1 :], count - 1)
    ]


# -------------------------------------------------------------- known in virtual time


def simulate(spec: str, num_learners: int, slow: float, num_updates: int) -> Coordinator:
    """The least engine; learner 0 is slower by a factor."""
    rng = random.Random(f"{spec} {num_learners} {slow}")
    run = Coordinator(PROTOCOLS.parse(spec), range(num_learners), None)
    arrivals: list[tuple[float, int, int]] = []
    commands = [c for learner in range(num_learners) for c in run.handle(LearnerJoined(learner))]
    now = 0.0
    while run.version < num_updates:
        for command in commands:
            if isinstance(command, Compute):
                scale = slow if command.learner == 0 else 1.0
                arrival = now + scale * rng.expovariate(1.0)
                heapq.heappush(arrivals, (arrival, command.lease, command.version))
        now, lease, version = heapq.heappop(arrivals)
        commands = run.handle(GradientPushed(lease, version, 0.5, 4))
    return run


@pytest.mark.parametrize("s", [0, 1, 3])
def test_staleness_under_ssp_has_a_limit(s: int) -> None:
    """While a learner is at it every other one applies at most 2 s + 1: (P - 1)(2 s + 1)."""
    run = simulate(f"ssp:s={s}", 5, 9.0, 2000)
    assert 0 < run.staleness.max <= 4 * (2 * s + 1)
    clocks = run.clocks.of.values()
    assert max(clocks) - min(clocks) <= s + 1


def test_ssp_with_much_room_is_async() -> None:
    """Same events, same commands."""
    one, other = (Coordinator(PROTOCOLS.parse(s), range(3), None) for s in ("ssp:s=99", "async"))
    events: list[Any] = [LearnerJoined(0), LearnerJoined(1), LearnerJoined(2)]
    events += [push(2), push(3, 1), push(4, 2), push(0), lost(1), failed(5), push(6, 4)]
    assert [one.handle(e) for e in events] == [other.handle(e) for e in events]


@pytest.mark.parametrize("on_stale", ["discard", "restart", "wait"])
@pytest.mark.parametrize("protocol", ["k-async:k=2", "k-batch-async:k=3", "async", "softsync:n=2"])
def test_a_bound_that_is_never_reached_changes_nothing(protocol: str, on_stale: str) -> None:
    key = "," if ":" in protocol else ":"
    plain = Coordinator(PROTOCOLS.parse(protocol), range(4), 40)
    bounded = Coordinator(
        PROTOCOLS.parse(f"{protocol}{key}max_staleness=50,on_stale={on_stale}"), range(4), 40
    )
    rng = random.Random(protocol)
    commands = [plain.handle(LearnerJoined(n)) for n in range(4)]
    assert commands == [bounded.handle(LearnerJoined(n)) for n in range(4)]
    while plain.finished is None:
        lease = rng.choice(list(plain.ledger.leased.values()))
        event = GradientPushed(lease.number, lease.version, 0.5, 4)
        assert plain.handle(event) == bounded.handle(event)


def test_updates_that_were_held_back_are_larger() -> None:
    """And none is of fewer than K, while anything is left."""
    run = Watched(Settings("k-batch-async:k=2,max_staleness=1,on_stale=wait", mini_batches=None))
    everybody(run)
    rng = random.Random(3)
    sizes: Counter[int] = Counter()
    while run.model.version < 200:
        # Learner 0 pushes seldom.
        ready = [c for c in run.model.open.values() if c.learner or rng.random() < 0.1]
        if ready:
            lease = rng.choice(ready)
            commands = run.send(push(lease.lease, lease.version))
            sizes.update(len(c.contributions) for c in commands if isinstance(c, ApplyUpdate))
    assert min(sizes) == 2 and max(sizes) == 4


# ---------------------------------------------------------- who contributed nothing


def told(run: Watched) -> str | None:
    """What is said of those that contributed nothing, of a run and its events."""
    account = Account()
    for event, commands in run.log:
        account.count(event, commands)
    live, restarts = run.coordinator.clocks.of, run.coordinator.protocol.bound.restarts
    named = without_contribution(account, live)
    words = describe(account, live, restarts)
    assert bool(named) == (words is not None)
    assert all(f"learner {learner} contributed nothing: " in str(words) for learner in named)
    return words


def lease_of(run: Watched, learner: int) -> Compute:
    return next(c for c in run.model.open.values() if c.learner == learner)


def test_a_learner_whose_work_is_always_restarted_is_named() -> None:
    run = everybody(Watched(Settings("ringmaster:r=1", learners=2, mini_batches=None)))
    for _ in range(30):
        work = lease_of(run, 1)
        run.send(push(work.lease, work.version))
    run.send(StopRequested("updates"))
    assert told(run) == (
        "learner 0 contributed nothing: of its 31 mini-batches 30 were restarted as too stale and "
        "1 was unfinished at the end; a larger bound, or on_stale=wait, would let it contribute"
    )


def test_all_that_keeps_a_learner_from_contributing_is_told() -> None:
    """By updates, by itself, by the end."""
    run = everybody(Watched(Settings("k-sync:k=1", learners=2, max_given_up=9)))
    for _ in range(2):
        work = lease_of(run, 1)
        run.send(push(work.lease, work.version))
    run.send(failed(lease_of(run, 0).lease))
    run.send(StopRequested("max-time"))
    assert told(run) == (
        "learner 0 contributed nothing: of its 4 mini-batches 2 were cancelled by updates that did "
        "not wait for them, 1 failed and 1 was unfinished at the end; an asynchronous protocol "
        "would use such work"
    )


LARGER = "; a larger bound, or on_stale=wait, would let it contribute"


@pytest.mark.parametrize(
    ("spec", "pushed", "words"),
    [
        (
            "async:max_staleness=0,on_stale=discard",
            [1, 0],
            f"its only mini-batch was discarded as too stale{LARGER}",
        ),
        ("async:max_staleness=0", [1], f"its only mini-batch was restarted as too stale{LARGER}"),
        (
            "k-sync:k=1",
            [1],
            "its only mini-batch was cancelled by an update that did not wait for it; an "
            "asynchronous protocol would use such work",
        ),
        ("async", [1], "its only mini-batch was unfinished at the end"),
        ("async", [1, 0], None),
    ],
)
def test_one_mini_batch_in_words(spec: str, pushed: list[int], words: str | None) -> None:
    run = everybody(Watched(Settings(spec, learners=2, mini_batches=2, on_late="drop")))
    for lease in pushed:
        run.send(push(lease))
    assert told(run) == (words and f"learner 0 contributed nothing: {words}")


def test_all_of_several_in_words() -> None:
    spec = "async:max_staleness=0,on_stale=discard"
    run = everybody(Watched(Settings(spec, learners=2, mini_batches=5, on_late="drop")))
    run.send(push(1))
    run.send(push(0))
    run.send(push(2, 1))
    run.send(push(3, 1))
    assert run.model.finished is None
    run.send(push(4, 2))
    assert told(run) == (
        "learner 0 contributed nothing: all of its 2 mini-batches were discarded as too stale"
        + LARGER
    )


def test_the_dead_and_those_without_work_are_not_named() -> None:
    run = everybody(Watched(Settings("async", learners=3, mini_batches=2)))
    run.send(lost(1))
    run.send(push(0))
    assert told(run) is not None and "learner 1" not in str(told(run))
    run.send(StopRequested("signal"))
    assert str(told(run)).startswith("learner 2 contributed nothing: ")


# ------------------------------------------------------------------------------ specs


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("k-async:k=4,max_staleness=8,on_stale=restart", 8),
        ("k-batch-async:k=4,max_staleness=0,on_stale=discard", 0),
        ("softsync:n=2,max_staleness=3,on_stale=wait", 3),
        ("async:max_staleness=3", 3),
        ("ringmaster:r=4", 3),
        ("ssp:s=4", None),
        ("async", None),
        ("hardsync", 0),
    ],
)
def test_specs_read_back_and_say_what_they_promise(text: str, limit: int | None) -> None:
    protocol = PROTOCOLS.parse(text)
    assert PROTOCOLS.format(protocol) == text
    assert protocol.staleness_limit == limit
    bounded = protocol.bound is not UNBOUNDED
    assert bounded == (text not in ("async", "hardsync"))
    assert (protocol.expected_mean_staleness(8) is None) == bounded


def test_restart_unless_told_otherwise() -> None:
    assert PROTOCOLS.parse("async:max_staleness=3").bound == RestartBound(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("async:max_staleness=-1", "async: expected max_staleness >= 0, got max_staleness=-1"),
        (
            "softsync:n=2,on_stale=wait",
            "softsync: on_stale says what becomes of gradients beyond max_staleness; expected "
            "both, got on_stale=wait alone",
        ),
        (
            "async:max_staleness=1,on_stale=drop",
            "protocol async:on_stale: expected one of discard, restart, wait, got 'drop'",
        ),
        ("k-sync:k=2,max_staleness=1", "protocol 'k-sync' has no key 'max_staleness'; valid: k"),
        ("ringmaster:r=0", "ringmaster: expected r >= 1, got r=0"),
        ("ssp:s=-1", "ssp: expected s >= 0, got s=-1"),
    ],
)
def test_refused_specs(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        PROTOCOLS.parse(text)
    assert str(caught.value) == message


def test_a_wrong_on_stale_of_an_object_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="expected on_stale to be one of discard, restart"):
        with_bound(PROTOCOLS.parse("async"), 1, "drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "learners", "need"),
    [("async:max_staleness=2,on_stale=wait", 4, 3),
     ("k-async:k=3,max_staleness=1,on_stale=wait", 7, 2),
     ("k-batch-async:k=2,max_staleness=0,on_stale=wait", 3, 1)],
)  # fmt: skip
def test_waiting_needs_room_for_everybody(text: str, learners: int, need: int) -> None:
    protocol = PROTOCOLS.parse(text)
    with pytest.raises(InvalidSetting, match=f"there are {learners} learners; expected max_stal"):
        protocol.check(learners)
    protocol.check(learners - 1)
    with_bound(_unbounded(protocol), need, "wait").check(learners)


def _unbounded(protocol: Protocol) -> Protocol:
    return PROTOCOLS.parse(PROTOCOLS.format(protocol).replace(":max", ",max").split(",max")[0])


@pytest.mark.parametrize(
    ("text", "s", "on_stale", "expected"),
    [
        ("async", 3, None, "async:max_staleness=3"),
        ("k-async:k=2", 3, "wait", "k-async:k=2,max_staleness=3,on_stale=wait"),
        ("k-async:k=2,max_staleness=3", None, "wait", "k-async:k=2,max_staleness=3,on_stale=wait"),
        ("async:max_staleness=3", 3, None, "async:max_staleness=3"),
        ("hardsync", None, None, "hardsync"),
    ],
)
def test_a_bound_given_apart(text: str, s: int | None, on_stale: Any, expected: str) -> None:
    assert PROTOCOLS.format(with_bound(PROTOCOLS.parse(text), s, on_stale)) == expected


@pytest.mark.parametrize(
    ("text", "s", "on_stale", "message"),
    [
        ("async:max_staleness=2", 3, None, "max staleness: async:max_staleness=2 says 2 and 3 is"),
        ("async:max_staleness=2,on_stale=wait", None, "discard", "on stale: async.* says wait and"),
        ("k-sync:k=2", 3, None, "max staleness: k-sync:k=2 cancels what would be late"),
        ("hardsync", 3, "wait", "max staleness and on stale: hardsync cancels"),
        ("ssp:s=2", 3, None, "max staleness: ssp:s=2 takes no bound beside its own rules"),
        ("ringmaster:r=2", 1, None, "ringmaster:r=2 takes no bound beside its own rules"),
        ("async", None, "wait", "got on_stale=wait alone"),
    ],
)
def test_a_bound_given_apart_is_refused(
    text: str, s: int | None, on_stale: Any, message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        with_bound(PROTOCOLS.parse(text), s, on_stale)


def test_what_may_be_held_counts_what_waits() -> None:
    """For memory: K, or all that can be under way."""
    assert PROTOCOLS.parse("k-async:k=3").most_held(6) == 3
    assert PROTOCOLS.parse("k-async:k=3,max_staleness=4").most_held(6) == 3
    assert PROTOCOLS.parse("k-async:k=3,max_staleness=4,on_stale=wait").most_held(6) == 15
    assert PROTOCOLS.parse("softsync:n=2,max_staleness=1,on_stale=wait").most_held(6) == 6
