"""AdaSync: K of a loss by hand, when it changes, and what that does to a run.

Everybody starts as in test_coordinator_scripts.py: learner i leases mini-batch i as lease i.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from driver import Watched
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import Settings
from test_coordinator_scripts import Start, everybody, lost, of, push

from gruppetto.errors import ImpossibleEvent, InvalidSetting
from gruppetto.protocols import PROTOCOLS, AdaSync, Coordinator
from gruppetto.protocols.adaptive import Over, _adapted, adapted_k
from gruppetto.protocols.messages import (
    ApplyUpdate,
    Cancel,
    Compute,
    LearnerJoined,
    LearnerLost,
    ProgressMeasured,
)

OVERS = get_args(Over)
DISTINCT = ("k-sync", "k-async")


@pytest.fixture
def start() -> Start:
    """Begin a run: `start(protocol, learners=3, mini_batches=12, warmup=0, ...)`."""

    def begin(protocol: str, **settings: Any) -> Watched:
        return Watched(Settings(protocol, **settings))

    return begin


def over(cell: str, k0: int = 1) -> str:
    return f"adasync:over={cell},k0={k0},interval=1"


def measured(loss: float | None) -> ProgressMeasured:
    return ProgressMeasured(loss)


# ---------------------------------------------------------------------------- K by hand


@pytest.mark.parametrize(
    ("k0", "learners", "ratio", "log", "root"),
    [
        (1, 8, 1.0, 1.0, 1.0),
        # r = 4.6/7 = 0.657: (-0.657 + sqrt(0.432 + 21.03))/2; and sqrt(4.6).
        (1, 8, 4.6, 1.99, 2.14),
        (1, 8, 46.0, 4.67, 6.78),
        # r = 9/5 * 3 = 5.4: (-5.4 + sqrt(29.16 + 172.8))/2; and 3 sqrt(3).
        (3, 8, 3.0, 4.41, 5.20),
        # r = 4/12 * 10: (-3.33 + sqrt(11.1 + 213.3))/2; and 2 sqrt(10).
        (2, 14, 10.0, 5.37, 6.32),
        # A loss that rises: r = 16/4 * 0.25 = 1: (-1 + sqrt(33))/2; and 4 sqrt(0.25).
        (4, 8, 0.25, 2.37, 2.0),
    ],
)
def test_k_by_hand(k0: int, learners: int, ratio: float, log: float, root: float) -> None:
    """Before rounding, by both formulas, and rounded in each cell."""
    assert _adapted(k0, ratio, 1.0, learners, "log") == pytest.approx(log, abs=0.005)
    assert _adapted(k0, ratio, 1.0, learners, "linear") == pytest.approx(root, abs=0.005)
    for cell in OVERS:
        protocol = AdaSync(cell, k0, 1.0).measured(2.3, learners).measured(2.3 / ratio, learners)
        assert protocol.k == round(log if cell in DISTINCT else root), cell


def test_k_solves_the_equation_it_comes_from() -> None:
    for k0, learners, ratio in ((1, 8, 46.0), (2, 5, 1e-3), (7, 30, 1e6)):
        k = _adapted(k0, ratio, 1.0, learners, "log")
        assert k**2 / (learners - k) == pytest.approx(ratio * k0**2 / (learners - k0))


def test_rounding_is_to_the_nearest_and_a_tie_to_the_even_one() -> None:
    ratios = {1.49: 1, 1.5: 2, 2.5: 2, 2.51: 3, 3.5: 4}
    for k, rounded in ratios.items():
        assert adapted_k(1, k**2, 1.0, 8, time_grows="linear") == rounded


def test_the_start_stays_the_reference() -> None:
    """Renewing (K0, first loss) in part would compound: 4 times smaller twice is 16 times."""
    protocol = AdaSync("k-batch-sync", 1, 1.0)
    seen = [protocol := protocol.measured(loss, 8) for loss in (1.6, 0.4, 0.1, 0.4, 1.6, 6.4)]
    assert [p.k for p in seen] == [1, 2, 4, 2, 1, 1]
    assert {p.first_loss for p in seen} == {1.6}


def test_losses_that_are_none() -> None:
    """Not finite: nothing is known. 0 or less: the limit. None at first: still K0, and waiting."""
    for cell in OVERS:
        start = AdaSync(cell, 2, 1.0)
        assert start.measured(None, 4) is start
        assert start.measured(-1.0, 4) is start
        assert start.measured(0.0, 4) is start
        begun = start.measured(0.0, 4).measured(8.0, 4)
        assert (begun.k, begun.first_loss) == (2, 8.0)
        assert begun.measured(None, 4) is begun
        assert begun.measured(0.0, 4).k == 4
        assert begun.measured(-3.0, 4).k == 4
        assert begun.measured(0.0, 0) is begun


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    cell=st.sampled_from(OVERS),
    k0=st.integers(1, 40),
    losses=st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    live=st.lists(st.integers(0, 40), min_size=5, max_size=5),
)
@example("k-sync", 1, [5e-324, 1.7e308], [3, 3, 3, 3, 3])
@example("k-batch-async", 1, [1.7e308, 5e-324], [3, 3, 3, 3, 3])
def test_k_is_from_1_to_p(cell: Over, k0: int, losses: list[float | None], live: list[int]) -> None:
    """Whatever the losses, and however many learners there are then and later."""
    protocol = AdaSync(cell, k0, 1.0)
    for loss, num_live in zip(losses, live, strict=False):
        before, protocol = protocol.k, protocol.measured(loss, num_live)
        # What was measured is K in full; what nothing came of leaves it.
        assert protocol.k == before or 1 <= protocol.k <= num_live
        for p in live:
            assert 1 <= protocol.num_to_wait(p) <= max(1, p)
            assert protocol.num_to_wait(p) <= protocol.most_to_wait(max(1, p))


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    cell=st.sampled_from(OVERS),
    choices=st.lists(
        st.sampled_from([2.31, 1.19, 0.113, 0.0107, 0.0, None, "die", "push"]), max_size=30
    ),
)
def test_k_of_a_run_is_from_1_to_its_live_learners(cell: Over, choices: list[Any]) -> None:
    """Deaths and measurements in any order; pushes in between."""
    run = everybody(Watched(Settings(over(cell, 2), learners=6, mini_batches=None)))
    model, coordinator = run.model, run.coordinator
    for choice in choices:
        if choice == "die":
            if len(model.here) > 1:
                run.send(LearnerLost(max(model.here), "killed"))
        elif choice != "push":
            run.send(measured(choice))
        elif model.open:
            lease = next(iter(model.open.values()))
            run.send(push(lease.lease, lease.version))
        assert 1 <= coordinator.k <= coordinator.num_live
        assert coordinator.num_to_wait() <= coordinator.num_live


# ------------------------------------------------------------------------------ in a run


def test_k_grows_at_a_measurement(start: Start) -> None:
    """The first one is the reference; one 4 times smaller doubles K of k-batch-async."""
    run = everybody(start(over("k-batch-async")))
    assert run.send(measured(2.0)) == []
    assert run.send(push(0)) == [ApplyUpdate(1, (of(0),)), Compute(3, 0, 4, 1, 5)]
    assert run.send(measured(0.5)) == []
    assert run.send(push(1)) == [Compute(4, 1, 6, 1, 7)]
    assert run.send(push(2)) == [
        ApplyUpdate(2, (of(1, 0, 1), of(2, 0, 1))),
        Compute(5, 2, 3, 2, 8),
    ]


def test_a_smaller_k_may_fire_an_update_at_once(start: Start) -> None:
    """The loss has risen: K goes from 2 to 1, and one is held; k-sync cancels with it."""
    run = everybody(start(over("k-sync")))
    run.send(measured(9.0))
    run.send(measured(1.0))
    assert run.coordinator.num_to_wait() == 2
    assert run.send(push(1)) == []
    assert run.send(measured(9.0)) == [
        ApplyUpdate(1, (of(1),)),
        Cancel(0),
        Cancel(2),
        Compute(3, 1, 0, 1, 4),
        Compute(4, 0, 2, 1, 5),
        Compute(5, 2, 3, 1, 6),
    ]


def test_nothing_but_a_measurement_changes_k(start: Start) -> None:
    """Six of six pushed losses are small, and an update still waits for one."""
    run = everybody(start(over("k-async")))
    run.send(measured(2.0))
    for _ in range(6):
        lease = next(iter(run.model.open.values()))
        assert isinstance(run.send(push(lease.lease, lease.version))[0], ApplyUpdate)
    assert run.coordinator.protocol.k == 1


def test_k_is_by_all_that_are_expected(start: Start) -> None:
    """P = 3 before anybody has joined: a loss of 0 makes K = 3."""
    run = start(over("k-batch-async"))
    run.send(measured(2.0))
    run.send(measured(0.0))
    everybody(run)
    assert run.send(push(0))[0] == Compute(3, 0, 4, 0, 5)
    assert run.send(push(1))[0] == Compute(4, 1, 6, 0, 7)
    assert run.send(push(2))[0] == ApplyUpdate(1, (of(0), of(1), of(2)))


def test_the_dead_are_not_waited_for(start: Start) -> None:
    """K = 3 of 3; two are lost, and an update waits for one, also where mini-batches count."""
    for cell in ("k-sync", "k-batch-sync", "k-async", "k-batch-async"):
        run = everybody(start(over(cell)))
        run.send(measured(2.0))
        run.send(measured(0.0))
        assert run.coordinator.num_to_wait() == 3
        run.send(lost(0))
        run.send(lost(2))
        assert run.coordinator.num_to_wait() == 1, cell
        assert run.send(push(1))[0] == ApplyUpdate(1, (of(1),)), cell


def test_who_comes_back_is_waited_for_again(start: Start) -> None:
    """K is what was measured; only the live ones clamp it."""
    run = everybody(start(over("k-batch-sync")))
    run.send(measured(2.0))
    run.send(measured(0.0))
    run.send(lost(0))
    assert run.coordinator.num_to_wait() == 2
    run.send(LearnerJoined(3))
    assert run.coordinator.num_to_wait() == 3


def test_the_expected_mean_staleness_is_that_of_the_current_k(start: Start) -> None:
    """inverse-mean: 1/(1 + (P-1)/K), at K = 1 of 3 and then at K = 2."""
    run = everybody(start(over("k-batch-async"), modulation="inverse-mean"))
    run.send(measured(2.0))
    assert run.send(push(0))[0] == ApplyUpdate(1, (of(0, factor=1 / 3),))
    run.send(measured(0.5))
    assert run.coordinator.expected_mean_staleness() == 1.0
    run.send(push(1))
    assert run.send(push(2))[0] == ApplyUpdate(2, (of(1, 0, 1, 0.5), of(2, 0, 1, 0.5)))


def test_a_warmup_measures_and_k_counts_after_it(start: Start) -> None:
    """Hardsync waits for all 3 whatever is measured; then K is by the losses since the start."""
    run = everybody(start(over("k-batch-async"), warmup=3))
    run.send(measured(2.0))
    run.send(measured(0.5))
    assert run.coordinator.is_warming_up
    assert run.coordinator.num_to_wait() == 3
    run.send(push(0))
    run.send(push(1))
    assert run.send(push(2))[0] == ApplyUpdate(1, (of(0), of(1), of(2)))
    assert not run.coordinator.is_warming_up
    assert run.coordinator.num_to_wait() == 2


def test_a_measurement_changes_nothing_elsewhere(start: Start) -> None:
    run = everybody(start("k-sync:k=2"))
    assert run.send(measured(2.0)) == []
    assert run.send(push(0)) == []
    assert run.send(measured(1e-9)) == []
    assert run.coordinator.num_to_wait() == 2


def test_a_measurement_after_the_end_is_nothing(start: Start) -> None:
    run = everybody(start(over("k-batch-async"), learners=1, mini_batches=1))
    run.send(push(0))
    assert run.coordinator.finished == "epochs"
    assert run.send(measured(0.1)) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_impossible(loss: float) -> None:
    """None says so: a trace can hold no other."""
    coordinator = Coordinator(AdaSync("k-sync", 1, 1.0), range(3), 12)
    with pytest.raises(ImpossibleEvent, match="expected a finite loss, or None without one"):
        coordinator.handle(measured(loss))
    assert coordinator.protocol == AdaSync("k-sync", 1, 1.0)


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "adasync:over=async,k0=1,interval=1",
            "protocol adasync:over: expected one of k-sync, k-batch-sync, k-async, k-batch-async, "
            "got 'async'",
        ),
        ("adasync:over=k-sync,k0=0,interval=1", "adasync: expected k0 >= 1, got k0=0"),
        (
            "adasync:over=k-sync,k0=1,interval=0",
            "adasync: expected interval > 0 seconds and finite, got interval=0.0",
        ),
        (
            "adasync:over=k-sync,k0=1,interval=inf",
            "adasync: expected interval > 0 seconds and finite, got interval=inf",
        ),
        ("adasync:over=k-sync,k0=1", "protocol 'adasync' needs interval=; expected adasync:over="),
        ("adasync:over=k-sync,k=1", "protocol 'adasync' has no key 'k'; valid: over, k0, interval"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        PROTOCOLS.parse(text)
    assert str(caught.value).startswith(message)


def test_an_object_over_no_cell_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="expected over to be one of k-sync, k-batch-sync"):
        AdaSync("hardsync", 1, 1.0)  # type: ignore[arg-type]


def test_numbers_of_learners() -> None:
    """K0 < P among distinct learners, unless there is but one; K0 <= P among mini-batches."""
    for cell in OVERS:
        PROTOCOLS.parse(over(cell, 1)).check(1)
        PROTOCOLS.parse(over(cell, 3)).check(4)
        sign = "<" if cell in DISTINCT else "<="
        with pytest.raises(InvalidSetting) as caught:
            PROTOCOLS.parse(over(cell, 5)).check(4)
        assert str(caught.value) == (
            f"adasync:over={cell},k0=5,interval=1.0: K goes from k0 to the number of learners; "
            f"expected k0 {sign} learners = 4"
        )
    for cell in DISTINCT:
        with pytest.raises(InvalidSetting, match="expected k0 < learners = 4"):
            PROTOCOLS.parse(over(cell, 4)).check(4)
    PROTOCOLS.parse(over("k-batch-async", 4)).check(4)


def test_it_is_the_cell_it_is_over() -> None:
    for cell in OVERS:
        assert PROTOCOLS.parse(over(cell)).cell == PROTOCOLS.parse(f"{cell}:k=1").cell


def test_what_was_measured_is_no_setting() -> None:
    """A protocol in the middle of a run is written as it was given."""
    protocol = AdaSync("k-sync", 1, 5.0).measured(2.0, 8).measured(0.02, 8)
    assert protocol.k > 1
    assert PROTOCOLS.format(protocol) == "adasync:over=k-sync,k0=1,interval=5.0"
