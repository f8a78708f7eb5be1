"""Scripts of runs that begin with hardsync: where the warm-up ends, and that it ends cleanly.

Everybody starts as in test_coordinator_scripts.py: learner i leases mini-batch i as lease i.
"""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

import pytest
from driver import Watched, drive, make_coordinator
from oracle import RULES, Settings
from test_coordinator_scripts import Start, everybody, failed, lost, of, push

from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS, WARMUPS, HardsyncWarmup
from gruppetto.protocols.messages import ApplyUpdate, Cancel, Compute, Finish, StopRequested


@pytest.fixture
def start() -> Start:
    """Begin a run: `start(protocol, learners=3, mini_batches=12, warmup=0, ...)`."""

    def begin(protocol: str, **settings: Any) -> Watched:
        return Watched(Settings(protocol, **settings))

    return begin


def test_the_protocol_takes_over_after_the_update_that_reaches_the_number(start: Start) -> None:
    """4 of 3 at a time: the second update reaches it, and overshoots as hardsync does."""
    run = everybody(start("async", warmup=4))
    assert run.send(push(0)) == []
    assert run.send(push(1)) == []
    assert run.send(push(2)) == [
        ApplyUpdate(1, (of(0), of(1), of(2))),
        Compute(3, 0, 4, 1, 6),
        Compute(4, 1, 5, 1, 7),
        Compute(5, 2, 3, 1, 8),
    ]
    assert run.send(push(5, 1)) == []
    assert run.send(push(3, 1)) == []
    assert run.send(push(4, 1)) == [
        ApplyUpdate(2, (of(5, 1), of(3, 1), of(4, 1))),
        Compute(6, 0, 6, 2, 9),
        Compute(7, 1, 7, 2, 10),
        Compute(8, 2, 8, 2, 11),
    ]
    assert run.send(push(7, 2)) == [ApplyUpdate(3, (of(7, 2),)), Compute(9, 1, 10, 3, None)]
    assert run.send(push(6, 2)) == [ApplyUpdate(4, (of(6, 2, 1),)), Compute(10, 0, 9, 4, None)]


@pytest.mark.parametrize(("warmup", "updates"), [(1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_how_many_updates_hardsync_takes(warmup: int, updates: int) -> None:
    run = everybody(Watched(Settings("async", warmup=warmup)))
    while run.coordinator.is_warming_up:
        lease = next(iter(run.model.open.values()))
        run.send(push(lease.lease, lease.version))
    assert run.coordinator.version == updates


def test_everybody_who_waited_gets_work_and_may_finish_alone(start: Start) -> None:
    """K = 1 of distinct learners: after the warm-up the first finisher fires by itself."""
    run = everybody(start("k-async:k=1", warmup=1))
    run.send(push(1))
    run.send(push(2))
    commands = run.send(push(0))
    assert [c.learner for c in commands if isinstance(c, Compute)] == [0, 1, 2]
    assert run.send(push(4, 1)) == [ApplyUpdate(2, (of(4, 1),)), Compute(6, 1, 7, 2, 9)]


def test_what_the_protocol_waits_for_and_expects_begins_after_the_warmup(start: Start) -> None:
    run = everybody(start("async", warmup=3))
    coordinator = run.coordinator
    assert coordinator.is_warming_up
    assert (coordinator.num_to_wait(), coordinator.expected_mean_staleness()) == (3, 0.0)
    for lease in range(3):
        run.send(push(lease))
    assert not coordinator.is_warming_up
    assert coordinator.current_protocol is coordinator.protocol
    assert (coordinator.num_to_wait(), coordinator.expected_mean_staleness()) == (1, 2.0)


def test_gradients_of_the_warmup_count_fully(start: Start) -> None:
    """`inverse-mean` is of the rules that hold: 1 under hardsync, 1/3 under async of three."""
    run = everybody(start("async", warmup=3, modulation="inverse-mean"))
    run.send(push(0))
    run.send(push(1))
    assert run.send(push(2))[0] == ApplyUpdate(1, (of(0), of(1), of(2)))
    assert run.send(push(3, 1))[0] == ApplyUpdate(2, (of(3, 1, factor=1 / 3),))


def test_what_is_given_up_counts(start: Start) -> None:
    """2 applied and 1 given up are 3; nobody has to replace what cannot be applied."""
    run = everybody(start("async", learners=2, warmup=3, max_attempts=1, max_given_up=9))
    assert run.send(failed(0)) == [Compute(2, 0, 3, 0, 4)]
    assert run.send(push(1)) == []
    assert run.send(push(2))[0] == ApplyUpdate(1, (of(1), of(2)))
    assert not run.coordinator.is_warming_up


def test_only_an_update_ends_the_warmup(start: Start) -> None:
    """The number is reached by giving up; what is held then still waits for everybody."""
    run = everybody(start("async", learners=2, warmup=1, max_attempts=1, max_given_up=9))
    assert run.send(push(1)) == []
    assert run.send(failed(0)) == [Compute(2, 0, 3, 0, 4)]
    assert run.coordinator.is_warming_up
    assert run.send(push(2))[0] == ApplyUpdate(1, (of(1), of(2)))
    assert not run.coordinator.is_warming_up


def test_what_the_last_update_cancels_and_drops_counts(start: Start) -> None:
    """A dead learner's contribution makes 2 of 2, so hardsync cancels; the third is dropped."""
    run = everybody(start("async", warmup=3, on_late="drop"))
    assert run.send(push(0)) == []
    assert run.send(lost(0)) == []
    assert run.send(push(1)) == [
        ApplyUpdate(1, (of(0), of(1))),
        Cancel(2),
        Compute(3, 1, 4, 1, 5),
        Compute(4, 2, 3, 1, 6),
    ]
    assert run.coordinator.ledger.num_dropped == 1
    assert run.send(push(4, 1))[0] == ApplyUpdate(2, (of(4, 1),))


def test_the_last_update_cancels_what_the_protocol_would_keep(start: Start) -> None:
    """Nothing of the warm-up arrives late: lease 2 is closed as hardsync closes it."""
    run = everybody(start("async", warmup=2))
    assert run.send(push(0)) == []
    assert run.send(lost(0)) == []
    assert run.send(push(1)) == [
        ApplyUpdate(1, (of(0), of(1))),
        Cancel(2),
        Compute(3, 1, 2, 1, 4),
        Compute(4, 2, 3, 1, 5),
    ]
    assert not run.coordinator.is_warming_up


def test_a_run_shorter_than_its_warmup_ends(start: Start) -> None:
    run = everybody(start("async", mini_batches=4, warmup=100))
    for lease in range(3):
        run.send(push(lease))
    assert run.send(push(3, 1)) == [ApplyUpdate(2, (of(3, 1),)), Finish("epochs")]
    assert run.coordinator.is_warming_up


def test_stop_in_the_warmup_returns_what_is_held(start: Start) -> None:
    run = everybody(start("async", warmup=6))
    assert run.send(push(1)) == []
    assert run.send(StopRequested("max-time")) == [Cancel(0), Cancel(2), Finish("max-time")]
    assert run.coordinator.ledger.num_left == 12


@pytest.mark.parametrize("protocol", sorted(set(RULES) - {"hardsync"}))
def test_a_warmup_longer_than_the_run_is_hardsync(protocol: str) -> None:
    """Whatever happens in it: the same events are answered by the same commands."""
    for seed in range(40):
        watched = drive(seed, protocol="hardsync")
        settings = watched.settings
        keys = PROTOCOLS.keys_of(protocol.partition(":")[0]).values()
        needed = [key.name for key in keys if key.default is MISSING and key.name != "over"]
        spec = ",".join([*protocol.split(":")[1:], *(f"{key}=1" for key in needed)])
        spec = protocol.partition(":")[0] + (f":{spec}" if spec else "")
        longer = Settings(
            spec,
            settings.learners,
            settings.mini_batches,
            settings.on_late,
            settings.modulation,
            settings.max_attempts,
            settings.max_given_up,
            warmup=10**9,
        )
        warm = make_coordinator(longer)
        assert [warm.handle(event) for event, _ in watched.log] == [
            commands for _, commands in watched.log
        ]


# ------------------------------------------------------------------------------ specs


def test_a_warmup_is_read_and_written() -> None:
    warmup = WARMUPS.parse("hardsync:epochs=0.5")
    assert warmup == HardsyncWarmup(epochs=0.5)
    assert WARMUPS.format(warmup) == "hardsync:epochs=0.5"


@pytest.mark.parametrize("epochs", ["0", "-1", "nan", "inf"])
def test_refused_epochs(epochs: str) -> None:
    with pytest.raises(InvalidSetting, match="warmup hardsync: expected epochs > 0 and finite"):
        WARMUPS.parse(f"hardsync:epochs={epochs}")
