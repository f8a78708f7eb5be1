"""Scripts of events and the exact commands they yield, one for each rule worth reading.

Everybody in a script starts alike: learner i of P joins in turn and leases mini-batch i as lease i.
Only the last one reserves, number P: before it somebody is still expected. The oracle watches
along. Tests whose only argument is `start` also judge the mutants (mutants.py).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import pytest
from driver import Watched
from oracle import Settings

from gruppetto.protocols import PROTOCOLS, Coordinator
from gruppetto.protocols.messages import (
    NOT_FINITE,
    ApplyUpdate,
    Cancel,
    Compute,
    Contribution,
    Discard,
    Finish,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
    LearnerLost,
    StopRequested,
)

Start = Callable[..., Watched]


@pytest.fixture
def start() -> Start:
    """Begin a run: `start(protocol, learners=3, mini_batches=12, ...)`."""

    def begin(protocol: str, **settings: Any) -> Watched:
        return Watched(Settings(protocol, **settings))

    return begin


def everybody(run: Watched) -> Watched:
    """All expected learners join, in order."""
    for learner in range(run.settings.learners):
        run.send(LearnerJoined(learner))
    return run


def push(lease: int, version: int = 0) -> GradientPushed:
    return GradientPushed(lease, version, 0.5, 4)


def failed(lease: int) -> GradientFailed:
    return GradientFailed(lease, "FileNotFoundError: 17.png")


def not_finite(lease: int) -> GradientFailed:
    return GradientFailed(lease, NOT_FINITE)


def lost(learner: int) -> LearnerLost:
    return LearnerLost(learner, "killed")


def of(lease: int, version: int = 0, staleness: int = 0, factor: float = 1.0) -> Contribution:
    return Contribution(lease, version, staleness, 4, factor)


def discard(lease: int) -> Discard:
    return Discard(lease, "the lease is closed")


# -------------------------------------------------------------------- the four cells


def test_joining_leases_and_the_last_one_reserves(start: Start) -> None:
    run = start("k-async:k=2", learners=2)
    assert run.send(LearnerJoined(0)) == [Compute(0, 0, 0, 0, next_mini_batch=None)]
    assert run.send(LearnerJoined(1)) == [Compute(1, 1, 1, 0, next_mini_batch=2)]


def test_k_sync_cancels_the_rest_and_leases_again(start: Start) -> None:
    """A cancelled mini-batch (2) is free at once, for the first learner without a reservation."""
    run = everybody(start("k-sync:k=2"))
    assert run.send(push(1)) == []
    assert run.send(push(0)) == [
        ApplyUpdate(1, (of(1), of(0))),
        Cancel(2),
        Compute(3, 0, 2, 1, 5),
        Compute(4, 1, 4, 1, 6),
        Compute(5, 2, 3, 1, 7),
    ]


def test_k_batch_sync_lets_a_finisher_start_another_at_the_same_version(start: Start) -> None:
    run = everybody(start("k-batch-sync:k=3", learners=2))
    assert run.send(push(0)) == [Compute(2, 0, 3, 0, 4)]
    assert run.send(push(2)) == [Compute(3, 0, 4, 0, 5)]
    assert run.send(push(1)) == [
        ApplyUpdate(1, (of(0), of(2), of(1))),
        Cancel(3),
        Compute(4, 0, 5, 1, 4),
        Compute(5, 1, 2, 1, 6),
    ]


def test_k_async_makes_a_finisher_wait_and_keeps_the_rest(start: Start) -> None:
    run = everybody(start("k-async:k=2"))
    assert run.send(push(1)) == []
    assert run.send(push(0)) == [
        ApplyUpdate(1, (of(1), of(0))),
        Compute(3, 0, 4, 1, 6),
        Compute(4, 1, 5, 1, 7),
    ]
    assert run.send(push(2)) == []
    assert run.send(push(3, version=1)) == [
        ApplyUpdate(2, (of(2, 0, staleness=1), of(3, 1))),
        Compute(5, 0, 6, 2, 8),
        Compute(6, 2, 3, 2, 9),
    ]


def test_k_batch_async_goes_on(start: Start) -> None:
    """And the K-th push updates first: its learner starts again at the new version."""
    run = everybody(start("k-batch-async:k=2", learners=2))
    assert run.send(push(0)) == [Compute(2, 0, 3, 0, 4)]
    assert run.send(push(2)) == [ApplyUpdate(1, (of(0), of(2))), Compute(3, 0, 4, 1, 5)]
    assert run.send(push(1)) == [Compute(4, 1, 2, 1, 6)]
    assert run.send(push(3, version=1)) == [
        ApplyUpdate(2, (of(1, 0, staleness=1), of(3, 1))),
        Compute(5, 0, 5, 2, 7),
    ]


def test_async_with_one_learner_is_never_stale(start: Start) -> None:
    run = everybody(start("async", learners=1))
    assert run.send(push(0)) == [ApplyUpdate(1, (of(0),)), Compute(1, 0, 1, 1, 2)]
    assert run.send(push(1, 1)) == [ApplyUpdate(2, (of(1, 1),)), Compute(2, 0, 2, 2, 3)]


def test_the_version_in_the_push_is_the_truth(start: Start) -> None:
    """A learner may have read newer weights than its lease says."""
    run = everybody(start("async", learners=2))
    run.send(push(0))
    assert run.send(push(1, version=1)) == [
        ApplyUpdate(2, (of(1, 1, staleness=0),)),
        Compute(3, 1, 2, 2, 5),
    ]


# ------------------------------------------------------------- what can still arrive


def test_tail_is_clamped_in_the_distinct_cells(start: Start) -> None:
    """4 mini-batches among 3 learners: the second update waits for the one that is left."""
    run = start("hardsync", mini_batches=4)
    assert run.send(LearnerJoined(0)) == [Compute(0, 0, 0, 0, None)]
    assert run.send(LearnerJoined(1)) == [Compute(1, 1, 1, 0, None)]
    assert run.send(LearnerJoined(2)) == [Compute(2, 2, 2, 0, 3)]
    assert run.send(push(0)) == []
    assert run.send(push(1)) == []
    assert run.send(push(2)) == [
        ApplyUpdate(1, (of(0), of(1), of(2))),
        Compute(3, 0, 3, 1, None),
    ]
    assert run.send(push(3, 1)) == [ApplyUpdate(2, (of(3, 1),)), Finish("epochs")]


def test_tail_is_clamped_in_the_batch_cells(start: Start) -> None:
    """K = 4 of 3 mini-batches; the second push waits for what was reserved and is leased now."""
    run = start("k-batch-async:k=4", learners=2, mini_batches=3)
    assert run.send(LearnerJoined(0)) == [Compute(0, 0, 0, 0, None)]
    assert run.send(LearnerJoined(1)) == [Compute(1, 1, 1, 0, 2)]
    assert run.send(push(0)) == [Compute(2, 0, 2, 0, None)]
    assert run.send(push(1)) == []
    assert run.send(push(2)) == [ApplyUpdate(1, (of(0), of(1), of(2))), Finish("epochs")]


def test_what_is_reserved_can_still_arrive(start: Start) -> None:
    """K = 4 of 2 mini-batches: none is leased at the first push, which waits all the same."""
    run = start("k-batch-async:k=4", learners=1, mini_batches=2)
    assert run.send(LearnerJoined(0)) == [Compute(0, 0, 0, 0, 1)]
    assert run.send(push(0)) == [Compute(1, 0, 1, 0, None)]
    assert run.send(push(1)) == [ApplyUpdate(1, (of(0), of(1))), Finish("epochs")]


def test_first_joiner_does_not_train_alone(start: Start) -> None:
    run = start("hardsync", learners=2)
    assert run.send(LearnerJoined(0)) == [Compute(0, 0, 0, 0, None)]
    assert run.send(push(0)) == []
    assert run.send(LearnerJoined(1)) == [Compute(1, 1, 1, 0, 2)]
    assert run.send(push(1)) == [
        ApplyUpdate(1, (of(0), of(1))),
        Compute(2, 0, 3, 1, 4),
        Compute(3, 1, 2, 1, 5),
    ]


def test_expected_learner_reported_lost_is_not_waited_for(start: Start) -> None:
    run = start("hardsync", learners=2)
    assert run.send(LearnerJoined(0)) == [Compute(0, 0, 0, 0, None)]
    assert run.send(push(0)) == []
    assert run.send(lost(1)) == [ApplyUpdate(1, (of(0),)), Compute(1, 0, 1, 1, 2)]
    run.refuse(LearnerJoined(1))
    run.refuse(lost(1))


def test_death_shrinks_the_wait(start: Start) -> None:
    """The dead learner's mini-batch (2) and its reservation (3) go to the living."""
    run = everybody(start("hardsync"))
    assert run.send(push(0)) == []
    assert run.send(push(1)) == []
    assert run.send(lost(2)) == [
        ApplyUpdate(1, (of(0), of(1))),
        Compute(3, 0, 2, 1, 4),
        Compute(4, 1, 3, 1, 5),
    ]


def test_held_contribution_survives_its_learner(start: Start) -> None:
    """Its reservation (2) does not, it goes to the living."""
    run = everybody(start("k-sync:k=2", learners=2))
    assert run.send(push(1)) == []
    assert run.send(lost(1)) == []
    assert run.send(push(0)) == [ApplyUpdate(1, (of(1), of(0))), Compute(2, 0, 2, 1, 3)]


def test_hardsync_follows_members(start: Start) -> None:
    run = everybody(start("hardsync", learners=2))
    assert run.send(LearnerJoined(2)) == [Compute(2, 2, 3, 0, 4)]
    assert run.send(push(0)) == []
    assert run.send(push(1)) == []
    assert run.send(push(2))[0] == ApplyUpdate(1, (of(0), of(1), of(2)))


def test_softsync_follows_members(start: Start) -> None:
    """n = 2: K = 2 of 4 learners, 1 of 3."""
    run = everybody(start("softsync:n=2", learners=4))
    assert run.send(push(0)) == [Compute(4, 0, 5, 0, 6)]
    assert run.send(lost(3)) == [ApplyUpdate(1, (of(0),))]


def test_backup_follows_members(start: Start) -> None:
    """b = 1: K = 2 of 3 learners, 1 of 2."""
    run = everybody(start("backup:b=1"))
    assert run.send(push(0)) == []
    assert run.send(lost(1)) == [
        ApplyUpdate(1, (of(0),)),
        Cancel(2),
        Compute(3, 0, 1, 1, 2),
        Compute(4, 2, 3, 1, 4),
    ]


# ---------------------------------------------------------------------- late and lost


def test_late_push_after_cancel_is_discarded_and_starts_nothing(start: Start) -> None:
    run = everybody(start("k-sync:k=2"))
    run.send(push(1))
    run.send(push(0))
    assert run.send(push(2)) == [discard(2)]
    assert run.send(push(0)) == [discard(0)], "a duplicate"
    assert run.send(not_finite(2)) == [discard(2)], "a late failure is nobody's attempt"


def test_requeue_returns_what_was_cancelled(start: Start) -> None:
    run = everybody(start("k-sync:k=1", learners=2, mini_batches=6))
    assert run.send(push(0)) == [
        ApplyUpdate(1, (of(0),)),
        Cancel(1),
        Compute(2, 0, 1, 1, 3),
        Compute(3, 1, 2, 1, 4),
    ]


def test_drop_counts_what_was_cancelled(start: Start) -> None:
    """Of 6 mini-batches 3 are applied and 3 dropped; the three numbers add up."""
    run = everybody(start("k-sync:k=1", learners=2, mini_batches=6, on_late="drop"))
    assert run.send(push(0)) == [
        ApplyUpdate(1, (of(0),)),
        Cancel(1),
        Compute(2, 0, 3, 1, 4),
        Compute(3, 1, 2, 1, 5),
    ]
    assert run.send(push(2, 1)) == [
        ApplyUpdate(2, (of(2, 1),)),
        Cancel(3),
        Compute(4, 0, 4, 2, None),
        Compute(5, 1, 5, 2, None),
    ]
    assert run.send(push(5, 2)) == [
        ApplyUpdate(3, (of(5, 2),)),
        Cancel(4),
        Finish("epochs"),
    ]
    ledger = run.coordinator.ledger
    assert (ledger.num_applied, ledger.num_dropped, ledger.num_given_up) == (3, 3, 0)


def test_drop_counts_the_killed_but_not_their_reservation(start: Start) -> None:
    """Mini-batch 1 is dropped, 2 goes to the living."""
    run = everybody(start("async", learners=2, on_late="drop"))
    assert run.send(lost(1)) == []
    assert run.send(push(0)) == [ApplyUpdate(1, (of(0),)), Compute(2, 0, 2, 1, 3)]
    assert run.coordinator.ledger.num_dropped == 1


def test_drop_retries_what_failed(start: Start) -> None:
    """A failure is not late: it has its own limit, `max_attempts`."""
    run = everybody(start("async", learners=1, mini_batches=1, on_late="drop"))
    assert run.send(failed(0)) == [Compute(1, 0, 0, 0, None)]


# ----------------------------------------------------------------------- reservations


def test_a_learner_takes_its_reserved_mini_batch_before_a_lower_one(start: Start) -> None:
    """A dead learner returns its mini-batch (1) and its reservation (2); the other has 4."""
    run = everybody(start("async", learners=2))
    assert run.send(push(0)) == [ApplyUpdate(1, (of(0),)), Compute(2, 0, 3, 1, 4)]
    assert run.send(lost(1)) == []
    assert run.send(push(2, 1)) == [ApplyUpdate(2, (of(2, 1),)), Compute(3, 0, 4, 2, 1)]
    assert run.send(push(3, 2)) == [ApplyUpdate(3, (of(3, 2),)), Compute(4, 0, 1, 3, 2)]


def test_the_lowest_reserved_mini_batch_is_taken_when_nothing_else_is_left(start: Start) -> None:
    """Learner 1 takes learner 2's, learner 2 then takes learner 0's, and learner 0 has none."""
    run = everybody(start("async", mini_batches=6))
    assert run.send(push(0)) == [ApplyUpdate(1, (of(0),)), Compute(3, 0, 4, 1, 5)]
    assert run.send(push(1)) == [ApplyUpdate(2, (of(1, 0, 1),)), Compute(4, 1, 3, 2, None)]
    assert run.send(push(2)) == [ApplyUpdate(3, (of(2, 0, 2),)), Compute(5, 2, 5, 3, None)]
    assert run.send(push(3, 1)) == [ApplyUpdate(4, (of(3, 1, 2),))]
    assert run.send(lost(1)) == [Compute(6, 0, 3, 4, None)]


def test_hardsync_takes_the_stream_as_many_at_a_time_as_there_are_learners(start: Start) -> None:
    """{0, 1, 2}, {3, 4, 5}, {6, 7, 8}: nobody reserves what another one has yet to lease."""
    run = everybody(start("hardsync", mini_batches=9))
    assert run.send(push(2)) == []
    assert run.send(push(0)) == []
    assert run.send(push(1)) == [
        ApplyUpdate(1, (of(2), of(0), of(1))),
        Compute(3, 0, 4, 1, 6),
        Compute(4, 1, 5, 1, 7),
        Compute(5, 2, 3, 1, 8),
    ]
    assert run.send(push(4, 1)) == []
    assert run.send(push(5, 1)) == []
    assert run.send(push(3, 1)) == [
        ApplyUpdate(2, (of(4, 1), of(5, 1), of(3, 1))),
        Compute(6, 0, 6, 2, None),
        Compute(7, 1, 7, 2, None),
        Compute(8, 2, 8, 2, None),
    ]
    assert run.send(push(8, 2)) == []
    assert run.send(push(7, 2)) == []
    assert run.send(push(6, 2)) == [
        ApplyUpdate(3, (of(8, 2), of(7, 2), of(6, 2))),
        Finish("epochs"),
    ]


def test_nothing_is_reserved_while_somebody_is_expected(start: Start) -> None:
    """Not by a pusher, and not by one whose gradient failed; until learner 2 is reported lost."""
    run = start("async")
    assert run.send(LearnerJoined(0)) == [Compute(0, 0, 0, 0, None)]
    assert run.send(LearnerJoined(1)) == [Compute(1, 1, 1, 0, None)]
    assert run.send(push(0)) == [ApplyUpdate(1, (of(0),)), Compute(2, 0, 2, 1, None)]
    assert run.send(failed(1)) == [Compute(3, 1, 3, 1, None)]
    assert run.send(lost(2)) == [], "who is at work reserves with its next lease"
    assert run.send(push(2, 1)) == [ApplyUpdate(2, (of(2, 1),)), Compute(4, 0, 1, 2, 4)]
    assert run.send(push(3, 1)) == [ApplyUpdate(3, (of(3, 1, 1),)), Compute(5, 1, 5, 3, 6)]


def test_reservations_start_with_the_loss_of_the_last_expected_learner(start: Start) -> None:
    """Of two expected learners the first one's loss changes nothing, the second one's fires."""
    run = start("hardsync", learners=4)
    assert run.send(LearnerJoined(2)) == [Compute(0, 2, 0, 0, None)]
    assert run.send(LearnerJoined(0)) == [Compute(1, 0, 1, 0, None)]
    assert run.send(push(0)) == []
    assert run.send(push(1)) == []
    assert run.send(lost(3)) == []
    assert run.send(lost(1)) == [
        ApplyUpdate(1, (of(0), of(1))),
        Compute(2, 0, 2, 1, 4),
        Compute(3, 2, 3, 1, 5),
    ]


def test_only_those_the_run_starts_with_are_expected(start: Start) -> None:
    """Learner 7 reserves nothing either while 0 and 1 are; nobody has waited for learner 8."""
    run = start("async", learners=2)
    assert run.send(LearnerJoined(7)) == [Compute(0, 7, 0, 0, None)]
    assert run.send(LearnerJoined(0)) == [Compute(1, 0, 1, 0, None)]
    assert run.send(LearnerJoined(1)) == [Compute(2, 1, 2, 0, 3)]
    assert run.send(LearnerJoined(8)) == [Compute(3, 8, 4, 0, 5)]


def test_contributors_lease_first_and_reserve_first(start: Start) -> None:
    """Learner 1 contributed and 0 was cancelled, so 1 goes before 0, twice."""
    run = everybody(start("k-sync:k=1", learners=2))
    assert run.send(push(1)) == [
        ApplyUpdate(1, (of(1),)),
        Cancel(0),
        Compute(2, 1, 2, 1, 3),
        Compute(3, 0, 0, 1, 4),
    ]


# --------------------------------------------------------------------------- failures


def test_a_failed_gradient_leaves_its_learner_at_work(start: Start) -> None:
    run = everybody(start("k-sync:k=2", learners=2))
    assert run.send(failed(0)) == [Compute(2, 0, 3, 0, 4)], "mini-batch 0 is tried another time"


def test_given_up_after_max_attempts_fails_the_run(start: Start) -> None:
    run = everybody(start("async", learners=1, mini_batches=1))
    assert run.send(failed(0)) == [Compute(1, 0, 0, 0, None)]
    assert run.send(not_finite(1)) == [Compute(2, 0, 0, 0, None)]
    assert run.send(failed(2)) == [Finish("given-up")]


def test_a_mini_batch_its_learners_died_on_is_given_up(start: Start) -> None:
    run = everybody(start("async", learners=1, mini_batches=1, max_attempts=2))
    assert run.send(lost(0)) == []
    assert run.send(LearnerJoined(1)) == [Compute(1, 1, 0, 0, None)]
    assert run.send(lost(1)) == [Finish("given-up")]


def test_max_given_up_allows_some(start: Start) -> None:
    run = everybody(start("async", learners=1, mini_batches=2, max_attempts=1, max_given_up=1))
    assert run.send(failed(0)) == [Compute(1, 0, 1, 0, None)]
    assert run.send(push(1)) == [ApplyUpdate(1, (of(1),)), Finish("epochs")]
    assert run.coordinator.ledger.num_given_up == 1


def test_a_cancelled_mini_batch_is_not_a_failed_one(start: Start) -> None:
    run = everybody(start("k-sync:k=1", learners=2, max_attempts=1))
    assert run.send(push(0))[1] == Cancel(1)
    assert run.coordinator.ledger.num_given_up == 0


def test_three_different_non_finite_mini_batches_are_divergence(start: Start) -> None:
    run = everybody(start("async"))
    assert run.send(not_finite(0)) == [Compute(3, 0, 4, 0, 5)]
    assert run.send(not_finite(1)) == [Compute(4, 1, 0, 0, 6)], "0 by another learner, and not 1"
    assert run.send(not_finite(2)) == [Cancel(3), Cancel(4), Finish("diverged")]


def test_a_finite_gradient_between_is_no_divergence(start: Start) -> None:
    run = everybody(start("async"))
    run.send(not_finite(0))
    run.send(not_finite(1))
    run.send(push(3))
    assert run.send(not_finite(2)) == [Compute(6, 2, 3, 1, 7)]


def test_divergence_shows_with_a_single_learner_too(start: Start) -> None:
    run = everybody(start("async", learners=1))
    assert run.send(not_finite(0)) == [Compute(1, 0, 1, 0, 2)], "not 0 again at once"
    assert run.send(not_finite(1)) == [Compute(2, 0, 2, 0, 0)]
    assert run.send(not_finite(2)) == [Finish("diverged")]


def test_an_epoch_does_not_trail_behind_a_learner_that_is_always_cancelled(start: Start) -> None:
    run = everybody(start("k-sync:k=1", learners=2))
    order = []
    while run.coordinator.finished is None:
        fast = next(c for c in run.model.open.values() if c.learner == 1)
        order.append(fast.mini_batch)
        run.send(push(fast.lease, fast.version))
    assert all(abs(place - number) <= 3 for place, number in enumerate(order)), order


def test_one_non_finite_mini_batch_is_no_divergence_however_often(start: Start) -> None:
    run = everybody(start("async", learners=1, mini_batches=1, max_attempts=9))
    for lease in range(5):
        assert run.send(not_finite(lease)) == [Compute(lease + 1, 0, 0, 0, None)]


# ------------------------------------------------------------------------------- ends


def test_stop_cancels_what_is_open_and_returns_what_is_held(start: Start) -> None:
    run = everybody(start("k-async:k=2"))
    assert run.send(push(1)) == []
    assert run.send(StopRequested("max-time")) == [Cancel(0), Cancel(2), Finish("max-time")]
    assert run.coordinator.ledger.num_left == 12


def test_nothing_follows_the_end(start: Start) -> None:
    run = everybody(start("k-async:k=2"))
    run.send(StopRequested("max-time"))
    assert run.send(push(0)) == [discard(0)]
    assert run.send(failed(2)) == [discard(2)]
    assert run.send(StopRequested("signal")) == []
    assert run.send(LearnerJoined(3)) == []
    assert run.send(lost(1)) == []


def test_a_run_without_end_has_left_what_it_ever_leased(start: Start) -> None:
    """Numbers 0, 1 and 3 were leased, 0 was applied; 2 and 4 were reserved only."""
    run = everybody(start("async", learners=2, mini_batches=None))
    run.send(push(0))
    assert run.send(StopRequested("updates")) == [Cancel(1), Cancel(2), Finish("updates")]
    assert run.coordinator.ledger.num_left == 2


# ---------------------------------------------------------------------------- factors


def test_inverse_counts_staleness_two_half(start: Start) -> None:
    run = everybody(start("async", modulation="inverse"))
    assert run.send(push(0))[0] == ApplyUpdate(1, (of(0, 0, 0, 1.0),))
    assert run.send(push(1))[0] == ApplyUpdate(2, (of(1, 0, 1, 1.0),))
    assert run.send(push(2))[0] == ApplyUpdate(3, (of(2, 0, 2, 0.5),))


def test_inverse_mean_takes_the_closed_form_of_todays_members(start: Start) -> None:
    """(P-1)/K: 2 with three learners, 1 with two, whatever was measured."""
    run = everybody(start("async", modulation="inverse-mean"))
    assert run.send(push(0))[0] == ApplyUpdate(1, (of(0, 0, 0, 1 / 3),))
    run.send(lost(2))
    assert run.send(push(3, 1))[0] == ApplyUpdate(2, (of(3, 1, 0, 1 / 2),))


def test_inverse_mean_of_k_async(start: Start) -> None:
    """(P-K)/K = 1/2."""
    run = everybody(start("k-async:k=2", modulation="inverse-mean"))
    run.send(push(0))
    assert run.send(push(1))[0] == ApplyUpdate(1, (of(0, factor=2 / 3), of(1, factor=2 / 3)))


def test_inverse_mean_leaves_the_cancelling_cells_alone(start: Start) -> None:
    run = everybody(start("k-batch-sync:k=1", modulation="inverse-mean:cap=true"))
    assert run.send(push(0))[0] == ApplyUpdate(1, (of(0, factor=1.0),))


def test_capped_inverse_mean_is_at_most_inverse(start: Start) -> None:
    """Mean staleness 1, so 1/2 each; the gradient that is 3 updates old counts 1/3."""
    run = everybody(start("async", learners=2, modulation="inverse-mean:cap=true"))
    for version, lease in enumerate((0, 2, 3)):
        run.send(push(lease, version))
    assert run.send(push(1))[0] == ApplyUpdate(4, (of(1, 0, 3, 1 / 3),))
    assert run.send(push(4, 3))[0] == ApplyUpdate(5, (of(4, 3, 1, 1 / 2),))


# ------------------------------------------------------- known values of mean staleness

LAWS: dict[str, Callable[[random.Random, int], float]] = {
    "constant": lambda rng, learner: 1.0,
    "exponential": lambda rng, learner: rng.expovariate(1.0),
    "uniform": lambda rng, learner: rng.uniform(0.5, 1.5),
    "pareto": lambda rng, learner: rng.paretovariate(2.5),
    "bimodal": lambda rng, learner: 10.0 if rng.random() < 0.1 else 1.0,
    "one straggler": lambda rng, learner: rng.expovariate(0.2 if learner == 0 else 1.0),
}


def simulate(spec: str, num_learners: int, law: str, num_updates: int) -> Coordinator:
    """The least engine: a heap of (time, lease)."""
    rng = random.Random(f"{spec} {num_learners} {law}")
    run = Coordinator(PROTOCOLS.parse(spec), range(num_learners), None)
    arrivals: list[tuple[float, int, int]] = []
    commands = [c for learner in range(num_learners) for c in run.handle(LearnerJoined(learner))]
    now = 0.0
    while run.version < num_updates:
        for command in commands:
            if isinstance(command, Compute):
                arrival = now + LAWS[law](rng, command.learner)
                heapq.heappush(arrivals, (arrival, command.lease, command.version))
        now, lease, version = heapq.heappop(arrivals)
        commands = run.handle(GradientPushed(lease, version, 0.5, 4))
    return run


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("spec", "num_learners", "mean"),
    [
        ("k-async:k=1", 4, 3.0),
        ("k-async:k=3", 8, 5 / 3),
        ("k-async:k=4", 4, 0.0),
        ("k-batch-async:k=4", 8, 7 / 4),
        ("k-batch-async:k=9", 4, 3 / 9),
        ("softsync:n=3", 8, 7 / 2),
        ("async", 5, 4.0),
    ],
)
def test_mean_staleness_is_known_whatever_the_delays(
    spec: str, num_learners: int, mean: float, law: str
) -> None:
    """(P-K)/K for k-async, (P-1)/K for k-batch-async: each update ages so many gradients by one."""
    run = simulate(spec, num_learners, law, num_updates=1500)
    assert run.staleness.mean == pytest.approx(mean, rel=0.02)
    assert run.expected_mean_staleness() == mean


@pytest.mark.parametrize("spec", ["k-sync:k=2", "k-batch-sync:k=5", "hardsync", "backup:b=1"])
def test_cancelling_cells_are_never_stale(spec: str) -> None:
    run = simulate(spec, 4, "exponential", num_updates=300)
    assert (run.version, run.staleness.max) == (300, 0)
