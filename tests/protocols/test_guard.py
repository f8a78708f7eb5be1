"""The guard: what the fold over losses trips on, and what it never trips on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.errors import InvalidSetting
from gruppetto.protocols import GUARDS, Async, Coordinator, Hardsync, LossGuard, NoGuard
from gruppetto.protocols.coordinator import DIVERGED
from gruppetto.protocols.guard import LossWatch
from gruppetto.protocols.messages import (
    NOT_FINITE,
    Cancel,
    Compute,
    Finish,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
)

LEARNERS = st.integers(1, 12)


def trips_at(losses: list[float], watch: LossWatch, samples: int = 4) -> int | None:
    """The first place at which the fold trips."""
    return next((i for i, loss in enumerate(losses) if watch.add(loss, samples, 0)), None)


def watch(learners: int = 4, k: int = 1, **keys: float) -> LossWatch:
    return LossWatch(LossGuard(**keys), learners, k)


def test_names_and_keys() -> None:
    assert GUARDS.parse("loss") == LossGuard()
    assert GUARDS.parse("loss:factor=2.5,floor=0.1") == LossGuard(factor=2.5, floor=0.1)
    assert GUARDS.format(LossGuard(factor=3.0)) == "loss:factor=3.0"
    assert GUARDS.format(NoGuard()) == "off"


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("loss:factor=1", "expected factor > 1 and finite, got factor=1.0; guard off"),
        ("loss:factor=nan", "expected factor > 1"),
        ("loss:factor=inf", "expected factor > 1"),
        ("loss:floor=0", "expected floor > 0 and finite, got floor=0.0"),
        ("los", "unknown guard 'los'; valid: loss, off (did you mean 'loss'?)"),
    ],
)
def test_refused(spec: str, told: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        GUARDS.parse(spec)
    assert told in str(caught.value)


def test_windows_grow_with_learners_and_k() -> None:
    sizes = {(p, k): (watch(p, k).start_size, watch(p, k).window)
             for p, k in ((1, 1), (30, 1), (30, 30), (4, 4))}  # fmt: skip
    assert sizes == {(1, 1): (8, 20), (30, 1): (30, 60), (30, 30): (30, 300), (4, 4): (8, 40)}


def test_a_script_of_losses() -> None:
    """Half of the 20 recent ones have to be out of range, and a little more."""
    one = watch()
    assert trips_at([2.0] * 30, one) is None
    assert one.start == 2.0
    # The limit is 8; far above it each counts as at most 14, twice the way from 2 to 8.
    assert trips_at([1e9] * 20, one) == 10
    assert one.is_out_of_range
    assert one.loss == pytest.approx((9 * 2.0 + 11 * 1e9) / 20)


def test_a_loss_just_above_the_limit_takes_the_whole_window() -> None:
    one = watch()
    assert trips_at([2.0] * 20, one) is None
    assert trips_at([8.01] * 40, one) == 19
    other = watch()
    assert trips_at([2.0] * 20 + [7.99] * 100, other) is None


def test_a_few_outliers_say_nothing() -> None:
    assert trips_at(([2.0] * 9 + [1e12]) * 20, watch()) is None


def test_samples_are_weights() -> None:
    one = watch()
    trips_at([2.0] * 30, one)
    # One gradient of 1,000 samples among 19 of 4 is most of the window.
    assert one.add(20.0, 1000, 0)


def test_learners_that_explode_at_once_do_not_raise_the_start() -> None:
    """The first of 8 are of the initial weights; half of them may be off."""
    growing = [2.0 * 5.0**i for i in range(20)]
    one = watch(learners=4)
    assert trips_at([2.0] * 4 + growing, one) is not None
    assert one.start == 2.0


@pytest.mark.parametrize("start", [0.0, 1e-6, -0.5, 0.9])
def test_a_start_near_zero_is_measured_by_the_floor(start: float) -> None:
    """What is small may become much larger without being wrong."""
    assert trips_at([start] * 20 + [start + 2.9] * 100, watch()) is None
    assert trips_at([start] * 20 + [start + 3.1] * 100, watch()) is not None


def test_a_negative_loss_counts_by_its_size() -> None:
    assert trips_at([-10.0] * 20 + [19.0] * 100, watch()) is None
    assert trips_at([-10.0] * 20 + [21.0] * 100, watch()) is not None
    assert trips_at([-10.0 - i for i in range(10_000)], watch()) is None, "falling is not diverging"


def test_losses_that_scatter_around_zero_are_measured_by_their_spread() -> None:
    noisy = [100.0 * (-1) ** i for i in range(400)]
    assert trips_at(noisy, watch()) is None


def test_the_floor_is_a_key() -> None:
    assert trips_at([0.01] * 20 + [0.28] * 100, watch(floor=0.1)) is None
    assert trips_at([0.01] * 20 + [0.33] * 100, watch(floor=0.1)) is not None


@given(LEARNERS, LEARNERS, st.floats(0, 1e6), st.data())
def test_bounded_losses_never_trip(learners: int, k: int, low: float, data: st.DataObject) -> None:
    """All within the reach of the lowest of them, which the start is at least."""
    losses = st.floats(low, low + 2.999 * max(1.0, low))
    drawn = data.draw(st.lists(losses, max_size=300))
    assert trips_at(drawn, watch(learners, min(k, learners))) is None


@given(LEARNERS, LEARNERS, st.floats(-1e3, 1e3), st.floats(1.01, 3.0), st.integers(1, 50))
def test_losses_that_grow_for_long_always_trip(
    learners: int, k: int, start: float, growth: float, step: int
) -> None:
    one = watch(learners, min(k, learners))
    losses, size = [start] * 20, 1.0
    while size < 1e12:
        losses += [start + size] * step
        size *= growth
    losses += [start + size] * (3 * one.window)
    assert trips_at(losses, one) is not None


@given(LEARNERS, st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=200))
def test_no_guard_never_trips_and_any_finite_loss_is_taken(
    learners: int, losses: list[float]
) -> None:
    assert trips_at(losses, LossWatch(NoGuard(), learners, 1)) is None
    one = watch(learners)
    trips_at(losses, one)
    assert one.loss is None or not math.isnan(one.loss)


def test_what_is_told_of_the_recent_gradients() -> None:
    one = watch()
    assert (one.loss, one.mean_staleness, one.max_staleness) == (None, 0.0, 0)
    for staleness in range(30):
        one.add(float(staleness), 2, staleness)
    assert (one.loss, one.mean_staleness, one.max_staleness) == (19.5, 19.5, 29)


# ------------------------------------------------------------ in the coordinator


def run(coordinator: Coordinator, losses: list[float]) -> list[list[object]]:
    """Push these losses, oldest lease first; the commands after each event."""
    log: list[list[object]] = []
    todo: list[Compute] = []
    for learner in range(4):
        log.append(list(coordinator.handle(LearnerJoined(learner))))
        todo += [c for c in log[-1] if isinstance(c, Compute)]
    for loss in losses:
        compute = todo.pop(0)
        push = GradientPushed(compute.lease, compute.version, loss, 4)
        log.append(list(coordinator.handle(push)))
        todo += [c for c in log[-1] if isinstance(c, Compute)]
        if coordinator.finished:
            break
    return log


def coordinator(guard: LossGuard | NoGuard | None, protocol: object = None) -> Coordinator:
    return Coordinator(protocol or Async(), range(4), None, guard=guard)  # type: ignore[arg-type]


def test_a_run_ends_at_the_gradient_that_trips() -> None:
    one = coordinator(LossGuard())
    log = run(one, [2.0] * 20 + [50.0] * 20)
    assert one.finished == DIVERGED
    assert len(log) == 4 + 20 + 11
    assert log[-1][-1] == Finish(DIVERGED)
    assert sum(isinstance(c, Cancel) for c in log[-1]) == 3, "the others' leases are closed"
    assert one.num_held == 0 and not one.ledger.leased and not one.ledger.pushed
    assert one.version == 30, "the gradient that trips it is not applied"


def test_without_tripping_the_commands_are_those_without_a_guard() -> None:
    losses = [2.0 + 5.0 * (i % 3 == 0) for i in range(100)]
    made = [run(coordinator(guard), losses) for guard in (None, NoGuard(), LossGuard())]
    assert made[0] == made[1] == made[2]


def test_staleness_of_the_recent_is_that_of_their_updates() -> None:
    one = coordinator(LossGuard())
    run(one, [2.0] * 60)
    assert one.losses.max_staleness == 3 == one.staleness.max
    assert one.losses.mean_staleness == 3.0


def test_gradients_too_late_do_not_count() -> None:
    one = coordinator(LossGuard(), Hardsync())
    run(one, [2.0] * 8)
    seen = len(one.losses.recent)
    one.handle(GradientPushed(0, 0, 1e9, 4))
    assert len(one.losses.recent) == seen


def test_three_gradients_not_finite_still_end_a_run() -> None:
    one = coordinator(NoGuard())
    commands = [c for n in range(4) for c in one.handle(LearnerJoined(n))]
    leases = [c.lease for c in commands if isinstance(c, Compute)]
    for lease in leases[:3]:
        one.handle(GradientFailed(lease, NOT_FINITE))
    assert one.finished == DIVERGED
    assert not one.losses.is_out_of_range
