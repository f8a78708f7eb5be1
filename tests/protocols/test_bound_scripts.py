"""Scripts of bounds: what is discarded, restarted or waited for, and the exact commands.

Everybody starts as in test_coordinator_scripts.py: learner i leases mini-batch i as lease i.
"""

from __future__ import annotations

from typing import Any

import pytest
from driver import Watched
from oracle import Settings
from test_coordinator_scripts import Start, discard, everybody, failed, lost, of, push

from gruppetto.protocols.messages import (
    TOO_STALE,
    ApplyUpdate,
    Cancel,
    Compute,
    Discard,
    Finish,
    LearnerJoined,
    StopRequested,
)


@pytest.fixture
def start() -> Start:
    """Begin a run: `start(protocol, learners=3, mini_batches=12, ...)`."""

    def begin(protocol: str, **settings: Any) -> Watched:
        return Watched(Settings(protocol, **settings))

    return begin


def stale(lease: int) -> Discard:
    return Discard(lease, TOO_STALE)


# ---------------------------------------------------------------------------- discard


def test_what_arrives_too_stale_goes_back_and_its_learner_goes_on(start: Start) -> None:
    """Its mini-batch, 0, is not reserved for the learner that was too slow for it."""
    run = everybody(start("async:max_staleness=1,on_stale=discard"))
    assert run.send(push(1)) == [ApplyUpdate(1, (of(1),)), Compute(3, 1, 4, 1, 5)]
    assert run.send(push(2)) == [ApplyUpdate(2, (of(2, 0, 1),)), Compute(4, 2, 3, 2, 6)]
    assert run.send(push(0)) == [stale(0), Compute(5, 0, 7, 2, 8)]
    assert run.coordinator.num_discarded == 1
    assert run.send(push(4, 2)) == [ApplyUpdate(3, (of(4, 2),)), Compute(6, 2, 6, 3, 0)]


def test_staleness_at_the_bound_is_applied(start: Start) -> None:
    run = everybody(start("async:max_staleness=2,on_stale=discard"))
    run.send(push(1))
    run.send(push(2))
    assert run.send(push(0))[0] == ApplyUpdate(3, (of(0, 0, 2),))


def test_the_version_in_the_push_decides(start: Start) -> None:
    """Leased at 0 and computed on newer weights: not too stale."""
    run = everybody(start("async:max_staleness=0,on_stale=discard"))
    run.send(push(1))
    assert run.send(push(0, version=1))[0] == ApplyUpdate(2, (of(0, 1),))
    assert run.send(push(2, version=1))[0] == stale(2)


def test_what_is_held_does_not_grow_older(start: Start) -> None:
    """Of staleness 1 when it arrives, and still when the update fires much later."""
    run = everybody(start("k-batch-async:k=2,max_staleness=1,on_stale=discard"))
    run.send(push(1))
    assert run.send(push(3))[0] == ApplyUpdate(1, (of(1), of(3)))
    assert run.send(push(0)) == [Compute(5, 0, 7, 1, 8)]
    assert run.send(push(4, 1))[0] == ApplyUpdate(2, (of(0, 0, 1), of(4, 1)))
    assert run.send(push(2))[0] == stale(2)


def test_a_refused_learner_has_not_contributed(start: Start) -> None:
    """k-async: it goes on at once, while those that have contributed wait."""
    run = everybody(start("k-async:k=2,max_staleness=0,on_stale=discard"))
    run.send(push(1))
    run.send(push(2))
    assert run.send(push(0)) == [stale(0), Compute(5, 0, 7, 1, 8)]
    assert run.send(push(5, 1)) == []
    assert run.send(push(3, 1))[0] == ApplyUpdate(2, (of(5, 1), of(3, 1)))


def test_dropped_when_late_mini_batches_are(start: Start) -> None:
    run = everybody(start("async:max_staleness=0,on_stale=discard", on_late="drop"))
    run.send(push(1))
    assert run.send(push(0)) == [stale(0), Compute(4, 0, 6, 1, 7)]
    assert run.coordinator.ledger.num_dropped == 1


def test_at_the_tail_others_get_what_was_refused(start: Start) -> None:
    """Learner 0 is too slow; an idle one takes its last mini-batch, and it gets nothing."""
    run = everybody(start("async:max_staleness=0,on_stale=discard", learners=2, mini_batches=2))
    assert run.send(push(1)) == [ApplyUpdate(1, (of(1),))]
    assert run.send(push(0)) == [stale(0), Compute(2, 1, 0, 1, None)]
    assert run.send(push(2, 1)) == [ApplyUpdate(2, (of(2, 1),)), Finish("epochs")]


def test_a_drop_may_let_an_update_fire(start: Start) -> None:
    """With lease 1 refused and dropped, nothing but what is held can still arrive."""
    spec = "k-batch-async:k=2,max_staleness=0,on_stale=discard"
    run = everybody(start(spec, learners=3, mini_batches=4, on_late="drop"))
    run.send(push(0))
    assert run.send(push(2)) == [ApplyUpdate(1, (of(0), of(2)))]
    assert run.send(push(3, 1)) == []
    assert run.send(push(1)) == [stale(1), ApplyUpdate(2, (of(3, 1),)), Finish("epochs")]


# ---------------------------------------------------------------------------- restart


def test_what_becomes_too_stale_is_cancelled_by_the_update_and_leased_anew(start: Start) -> None:
    run = everybody(start("async:max_staleness=1"))
    assert run.send(push(1)) == [ApplyUpdate(1, (of(1),)), Compute(3, 1, 4, 1, 5)]
    assert run.send(push(2)) == [
        ApplyUpdate(2, (of(2, 0, 1),)),
        Cancel(0),
        Compute(4, 2, 3, 2, 6),
        Compute(5, 0, 0, 2, 7),
    ]
    assert run.send(push(0)) == [discard(0)]
    assert run.coordinator.num_cancelled == 1


def test_ringmaster_restarts_what_is_r_updates_old(start: Start) -> None:
    """r = 2 is max_staleness = 1; the same events, the same commands."""
    events = [push(1), push(2), push(0), push(3, 1), push(4, 2)]
    ringmaster = everybody(start("ringmaster:r=2"))
    bounded = everybody(start("async:max_staleness=1,on_stale=restart"))
    assert [ringmaster.send(e) for e in events] == [bounded.send(e) for e in events]


def test_ringmaster_of_one_cancels_like_k_batch_sync(start: Start) -> None:
    """And who contributed takes the lowest mini-batch, so that an epoch cannot trail."""
    run = everybody(start("ringmaster:r=1"))
    assert run.send(push(1)) == [
        ApplyUpdate(1, (of(1),)),
        Cancel(0),
        Cancel(2),
        Compute(3, 1, 0, 1, 4),
        Compute(4, 0, 2, 1, 5),
        Compute(5, 2, 3, 1, 6),
    ]


def test_a_restart_leaves_those_that_wait_and_those_in_time(start: Start) -> None:
    """k-async of four: lease 0 is 2 old, lease 4 is 1 old."""
    run = everybody(start("k-async:k=1,max_staleness=1,on_stale=restart", learners=4))
    run.send(push(1))
    assert [type(c) for c in run.send(push(2))] == [ApplyUpdate, Cancel, Cancel, *[Compute] * 3]
    assert set(run.coordinator.ledger.leased) == {4, 5, 6, 7}


# ------------------------------------------------------------------------------- wait


def test_an_update_is_held_back_for_what_would_become_too_stale(start: Start) -> None:
    """Two learners, s = 1: lease 0 must be in the update of version 1 or before."""
    run = everybody(start("async:max_staleness=1,on_stale=wait", learners=2))
    assert run.send(push(1)) == [ApplyUpdate(1, (of(1),)), Compute(2, 1, 2, 1, 3)]
    # Another gradient may be under way, and then no more: two updates, one each.
    assert run.send(push(2, 1)) == []
    assert run.send(push(0)) == [
        ApplyUpdate(2, (of(2, 1), of(0, 0, 1))),
        Compute(3, 0, 4, 2, 5),
        Compute(4, 1, 3, 2, 6),
    ]


def test_who_may_start_beside_what_is_held_back(start: Start) -> None:
    """Three of six places are taken; learner 1 fills another three, then it has to wait."""
    run = everybody(start("k-batch-async:k=3,max_staleness=1,on_stale=wait"))
    run.send(push(1))
    run.send(push(3))
    assert run.send(push(4))[0] == ApplyUpdate(1, (of(1), of(3), of(4)))
    for lease in (5, 6, 7, 8):
        commands = run.send(push(lease, 1))
        assert len(commands) == (lease < 8), f"{commands} after lease {lease}"
    assert run.coordinator.num_held == 4
    assert run.send(push(0)) == []
    update = run.send(push(2))[0]
    assert isinstance(update, ApplyUpdate)
    assert [c.staleness for c in update.contributions] == [0, 0, 0, 0, 1, 1]


def test_a_death_frees_what_was_waiting_for_it(start: Start) -> None:
    run = everybody(start("async:max_staleness=1,on_stale=wait", learners=2))
    run.send(push(1))
    assert run.send(push(2, 1)) == []
    assert run.send(lost(0)) == [ApplyUpdate(2, (of(2, 1),)), Compute(3, 1, 3, 2, 0)]


def test_a_failure_frees_what_was_waiting_for_it(start: Start) -> None:
    run = everybody(start("async:max_staleness=1,on_stale=wait", learners=2))
    run.send(push(1))
    assert run.send(push(2, 1)) == []
    assert run.send(failed(0))[0] == ApplyUpdate(2, (of(2, 1),))


def test_the_tail_of_a_run_that_waits(start: Start) -> None:
    """Nothing is left to lease, and the last update takes what is held."""
    run = everybody(start("async:max_staleness=1,on_stale=wait", learners=2, mini_batches=3))
    run.send(push(1))
    assert run.send(push(2, 1)) == []
    assert run.send(push(0)) == [ApplyUpdate(2, (of(2, 1), of(0, 0, 1))), Finish("epochs")]


def test_a_stop_returns_what_is_held_back(start: Start) -> None:
    run = everybody(start("async:max_staleness=1,on_stale=wait", learners=2))
    run.send(push(1))
    run.send(push(2, 1))
    assert run.send(StopRequested("max-time")) == [Cancel(0), Finish("max-time")]
    assert run.coordinator.ledger.num_left == 11


# -------------------------------------------------------------------------------- ssp


def test_who_is_too_far_ahead_is_kept_idle(start: Start) -> None:
    """s = 1: learner 1 does two more than learner 0 has, and not a third."""
    run = everybody(start("ssp:s=1"))
    assert run.send(push(1)) == [ApplyUpdate(1, (of(1),)), Compute(3, 1, 4, 1, 5)]
    assert run.send(push(3, 1)) == [ApplyUpdate(2, (of(3, 1),))]
    assert run.send(push(2)) == [ApplyUpdate(3, (of(2, 0, 2),)), Compute(4, 2, 3, 3, 6)]
    assert run.send(push(0)) == [
        ApplyUpdate(4, (of(0, 0, 3),)),
        Compute(5, 0, 7, 4, 8),
        Compute(6, 1, 5, 4, 9),
    ]


def test_ssp_of_zero_is_in_lockstep(start: Start) -> None:
    """Everybody once, and then everybody on the same version, whoever comes first."""
    run = everybody(start("ssp:s=0", mini_batches=None))
    for turn, order in enumerate([(2, 0, 1), (0, 1, 2), (1, 2, 0)]):
        leases = {compute.learner: compute for compute in run.model.open.values()}
        assert {compute.version for compute in leases.values()} == {3 * turn}
        for place, learner in enumerate(order):
            commands = run.send(push(leases[learner].lease, 3 * turn))
            assert len(commands) == (1 if place < 2 else 4)


def test_the_dead_and_the_failing_hold_nobody_and_everybody(start: Start) -> None:
    """A failure is no progress; a death makes the next slowest the slowest."""
    run = everybody(start("ssp:s=0"))
    run.send(push(1))
    run.send(push(2))
    assert run.send(failed(0)) == [Compute(3, 0, 4, 2, 5)]
    assert run.send(lost(0)) == [Compute(4, 1, 0, 2, 4), Compute(5, 2, 3, 2, 5)]


def test_a_joiner_starts_at_the_slowest_clock(start: Start) -> None:
    """It is neither ahead of anybody nor does it hold those that were there up for long."""
    run = everybody(start("ssp:s=0", learners=2, mini_batches=None))
    for first in (0, 2):
        run.send(push(first, first))
        run.send(push(first + 1, first))
    run.send(push(4, 4))
    assert [c.learner for c in run.send(LearnerJoined(2)) if isinstance(c, Compute)] == [2]
    assert run.send(push(6, 5)) == [ApplyUpdate(6, (of(6, 5),))]
    commands = run.send(push(5, 4))
    assert [c.learner for c in commands if isinstance(c, Compute)] == [1, 0, 2]


def test_who_is_expected_is_waited_for(start: Start) -> None:
    """As everywhere: the first joiner does not train alone."""
    run = start("ssp:s=1", learners=2)
    run.send(LearnerJoined(0))
    assert len(run.send(push(0))) == 2
    assert len(run.send(push(1, 1))) == 1
    assert [type(c) for c in run.send(lost(1))] == [Compute]


def test_who_is_kept_idle_does_not_keep_others_from_work(start: Start) -> None:
    """Learner 0 is ahead; its neighbour, which fails, still gets work."""
    run = everybody(start("ssp:s=0"))
    run.send(push(0))
    assert [c.learner for c in run.send(failed(1)) if isinstance(c, Compute)] == [1]


# ----------------------------------------------------------------------- the warm-up


@pytest.mark.parametrize(
    "spec",
    [
        "async:max_staleness=0,on_stale=discard",
        "async:max_staleness=0,on_stale=restart",
        "async:max_staleness=2,on_stale=wait",
        "ssp:s=0",
    ],
)
def test_a_bound_holds_after_the_warmup_only(spec: str) -> None:
    """Hardsync's learners wait for all; a bound of 0 neither refuses nor restarts them."""
    run = everybody(Watched(Settings(spec, warmup=3)))
    assert run.send(push(0)) == []
    assert run.send(push(1)) == []
    assert [type(c) for c in run.send(push(2))] == [ApplyUpdate, *[Compute] * 3]
    assert not run.coordinator.is_warming_up
    run.send(push(4, 1))
    kind = spec.rpartition("=")[2]
    late = {"discard": stale(3), "restart": discard(3)}
    assert run.send(push(3, 1))[0] == late.get(kind, ApplyUpdate(3, (of(3, 1, 1),)))


def test_the_warmup_is_not_held_back(start: Start) -> None:
    """Hardsync's update cancels lease 2 instead of waiting for it."""
    run = everybody(start("k-batch-async:k=3,max_staleness=0,on_stale=wait", warmup=9))
    run.send(push(0))
    run.send(lost(0))
    assert [type(c) for c in run.send(push(1))] == [ApplyUpdate, Cancel, Compute, Compute]


def test_clocks_run_in_the_warmup_and_hold_nobody(start: Start) -> None:
    """Learner 1 is one ahead of learner 2, whose work was cancelled, and starts all the same."""
    run = everybody(start("ssp:s=0", warmup=9))
    run.send(push(0))
    run.send(lost(0))
    assert [type(c) for c in run.send(push(1))] == [ApplyUpdate, Cancel, Compute, Compute]
