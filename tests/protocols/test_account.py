"""Per learner: leases given against applied, by hand and against the random driver."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from driver import drive

from gruppetto.protocols import Coordinator, KSync
from gruppetto.protocols.account import Account
from gruppetto.protocols.messages import (
    Event,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
    LearnerLost,
    StopRequested,
)


def account_of(coordinator: Coordinator, events: list[Event]) -> Account:
    account = Account()
    for event in events:
        account.count(event, coordinator.handle(event))
    return account


def test_a_small_run_by_hand() -> None:
    """k-sync:k=2 of three: leases 0, 1, 2; two arrive, one is cancelled and answers too late."""
    events: list[Event] = [
        LearnerJoined(0),
        LearnerJoined(1),
        LearnerJoined(2),
        GradientPushed(0, 0, 1.0, 4),
        GradientPushed(1, 0, 1.0, 3),  # update 1; lease 2 of learner 2 is cancelled; leases 3, 4, 5
        GradientPushed(2, 0, 1.0, 4),  # too late
        GradientFailed(3, "bad data"),  # of learner 0, which gets lease 6
        LearnerLost(1, "killed"),  # with lease 4
        StopRequested("callback"),  # leases 5 and 6 are cancelled
    ]
    account = account_of(Coordinator(KSync(2), range(3), None), events)
    made = {n: {k: v for k, v in asdict(each).items() if v} for n, each in account.learners.items()}
    assert made == {
        0: {"leases": 3, "applied": 1, "samples": 4, "rejected": 1, "cancelled": 1, "stopped": 1},
        1: {"learner": 1, "leases": 2, "applied": 1, "samples": 3, "lost": 1},
        2: {"learner": 2, "leases": 2, "cancelled": 2, "stopped": 1, "discarded": 1},
    }
    assert all(each.left == 0 for each in account.learners.values())
    assert account.learners[0].mean_staleness == 0.0


@pytest.mark.parametrize("seed", range(60))
def test_sums_are_the_coordinators_counts(seed: int) -> None:
    watched = drive(seed)
    account = Account()
    for event, commands in watched.log:
        account.count(event, commands)
    accounts = list(account.learners.values())
    coordinator = watched.coordinator

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in accounts)

    assert total("applied") == coordinator.ledger.num_applied
    assert total("samples") == coordinator.num_samples_applied
    assert total("staleness") == coordinator.staleness.total
    assert max((each.max_staleness for each in accounts), default=0) == coordinator.staleness.max
    assert total("cancelled") == coordinator.num_cancelled
    assert total("discarded") == coordinator.num_discarded
    assert total("rejected") == coordinator.num_rejected
    assert all(each.left >= 0 for each in accounts)
    # The driver lets every run end: what is left are gradients that were held at a stop.
    assert total("leases") == len(watched.model.given)
