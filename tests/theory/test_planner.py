"""What there is to choose from, what is known of it without training, and how one is chosen."""

from __future__ import annotations

import math

import pytest

from gruppetto.delays import DELAYS, Constant, Delay, Empirical, Exponential, KeyedDelays
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS, Async, Hardsync, KAsync, KBatchSync, KSync
from gruppetto.theory import update_time
from gruppetto.theory.machines import (
    Machines,
    RunTimes,
    scaled_law,
    slowest_ratio,
    time_updates,
)
from gruppetto.theory.planner import (
    Choice,
    candidates,
    center_and_band,
    decide,
    floor_ratio,
    may_be_best,
    pooled_spread,
)
from gruppetto.theory.timing import simulate

EXAMPLES = [
    "constant:value=2", "exponential:mean=2", "shifted-exponential:shift=1,mean=2",
    "pareto:shape=2.5,scale=1", "uniform:low=1,high=2", "lognormal:median=1,sigma=0.5",
    "gamma:shape=2,scale=3", "weibull:shape=2,scale=3", "bimodal:fast=1,slow=5,p_slow=0.2",
    "regimes:fast=1,slow=5,jobs=20",
]  # fmt: skip


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_scaled_law_is_the_law_of_scaled_times(text: str) -> None:
    law = DELAYS.parse(text)
    scaled = scaled_law(law, 0.25)
    assert scaled.expectation() == pytest.approx(0.25 * law.expectation())
    assert scaled.variance() == pytest.approx(0.25**2 * law.variance())
    assert type(scaled) is type(law)


def test_every_law_can_be_scaled() -> None:
    tried = {text.split(":")[0] for text in EXAMPLES} | {"empirical"}
    assert tried == set(DELAYS)
    assert scaled_law(Empirical.of([1.0, 3.0]), 2.0).expectation() == 4.0


@pytest.mark.parametrize("learners", [1, 2, 3, 4, 5, 8, 16, 17, 100])
def test_candidates_can_all_run_differ_and_are_few(learners: int) -> None:
    found = candidates(learners, 32, fixed_share=0.5, total=256)
    assert found[0] == Choice(Hardsync(), 32, 1.0)
    assert len(found) == len(set(found)) < 60
    for choice in found:
        choice.protocol.check(learners)
        assert choice.batch_size >= 1 and choice.rate_factor > 0
    same_size = [choice for choice in found if choice.batch_size == 32]
    assert same_size == list(candidates(learners, 32))
    waits = {c.protocol.num_to_wait(learners) for c in found if isinstance(c.protocol, KSync)}
    if learners >= 4:
        assert waits >= {learners - 1, -(-3 * learners // 4), learners // 2}


def test_other_sizes_are_half_and_that_of_rudras_product() -> None:
    sizes = {c.batch_size for c in candidates(8, 16, fixed_share=0.9, total=64)}
    assert sizes == {16, 8}  # 64 / 8 is 8, too
    sizes = {c.batch_size for c in candidates(16, 16, fixed_share=0.9, total=64)}
    assert sizes == {16, 8, 4}
    assert {c.batch_size for c in candidates(8, 1, fixed_share=0.9)} == {1}
    halved = next(c for c in candidates(8, 16, fixed_share=0.9) if c.batch_size == 8)
    assert halved.protocol == Hardsync() and halved.rate_factor == pytest.approx(math.sqrt(0.5))


def test_machines_refuse_what_no_plan_can_be_made_for() -> None:
    def refusal(law: Delay, own: dict[int, Delay], learners: int) -> str:
        with pytest.raises(InvalidSetting) as caught:
            Machines(law, own, learners).check()
        return str(caught.value)

    heavy = DELAYS.parse("pareto:shape=1,scale=1")
    assert "infinite mean; expected a finite one for a plan" in refusal(heavy, {}, 4)
    assert "infinite mean" in refusal(Constant(value=1.0), {1: heavy}, 4)
    assert "learners: expected at least 1" in refusal(Constant(value=1.0), {}, 0)
    assert "takes no time" in refusal(Constant(value=0.0), {}, 4)
    assert "learner 7; expected a learner from 0 to 3" in refusal(heavy, {7: heavy}, 4)


@pytest.mark.parametrize(
    "name", ["hardsync", "k-batch-async:k=3", "k-batch-sync:k=4", "k-async:k=4"]
)
@pytest.mark.parametrize("law", EXAMPLES[:5])
def test_times_are_theorys_where_exact_and_simulated_elsewhere(name: str, law: str) -> None:
    protocol, machines = PROTOCOLS.parse(name), Machines(DELAYS.parse(law), {}, 8)
    found = time_updates(protocol, machines)
    exact = update_time(protocol, machines.law, 8)
    if exact.kind == "exact":
        assert (found.kind, found.seconds) == ("exact", exact.seconds)
        assert found.band == (exact.seconds, exact.seconds)
    else:
        assert found.kind == "simulated" and found.band[0] <= found.seconds <= found.band[1]
    simulated = simulate(protocol, KeyedDelays(99, machines.law, {}, 8), 8, 20_000)
    assert found.seconds == pytest.approx(simulated.mean_update_time, rel=0.06)
    assert found.fresh == pytest.approx(simulated.fresh_fraction, abs=0.03)
    assert found.staleness == pytest.approx(simulated.mean_staleness, abs=0.01)


def test_what_other_measurements_might_have_said_makes_the_band() -> None:
    machines = Machines(Exponential(mean=1.0), {}, 4)
    others = [Machines(Exponential(mean=mean), {}, 4) for mean in (0.9, 0.95, 1.0, 1.1, 1.2)]
    low, high = time_updates(Hardsync(), machines, others).band
    per_mean = 25 / 12  # 1 + 1/2 + 1/3 + 1/4
    assert 0.9 * per_mean < low < per_mean < high < 1.2 * per_mean


@pytest.mark.parametrize("name", ["hardsync", "k-async:k=3", "k-batch-sync:k=6"])
def test_a_run_of_many_updates_takes_the_mean_of_each(name: str) -> None:
    protocol, machines = (
        PROTOCOLS.parse(name),
        Machines(DELAYS.parse("gamma:shape=2,scale=1"), {}, 4),
    )
    mean = time_updates(protocol, machines).seconds
    run_times = RunTimes(protocol, machines, mean, seed=500)
    assert run_times.at(400) == pytest.approx(400 * mean, rel=0.02)
    # Beyond what is simulated, too, and without a step.
    far = [run_times.at(n) for n in (100_000, 100_001, 200_000)]
    assert far[1] - far[0] == pytest.approx(mean)
    assert far[2] == pytest.approx(200_000 * mean, rel=0.02)
    for n in (1, 2, 31, 32, 33, 399, 150_000):
        assert run_times.count(run_times.at(n)) == n


def test_a_short_run_under_heavy_tails_takes_less_than_the_mean_of_each() -> None:
    machines = Machines(DELAYS.parse("pareto:shape=1.2,scale=1"), {}, 8)
    mean = time_updates(Hardsync(), machines).seconds
    run_times = RunTimes(Hardsync(), machines, mean, seed=500)
    keyed = [machines.keyed(seed) for seed in range(201)]
    logs = [math.log(simulate(Hardsync(), delays, 8, 20).total_time) for delays in keyed]
    assert run_times.at(20) == pytest.approx(math.exp(sum(logs) / len(logs)), rel=0.25)
    assert run_times.at(20) < 0.7 * 20 * mean


def test_the_first_updates_are_those_of_learners_that_all_start_at_once() -> None:
    machines = Machines(Constant(value=3.0), {}, 4)
    run_times = RunTimes(Async(), machines, 0.75)
    assert [round(run_times.at(n), 6) for n in (1, 4, 5, 8)] == [3.0, 3.0, 6.0, 6.0]
    assert run_times.count(3.0) == 1 and run_times.count(3.1) == 5


def test_the_floor_is_relative_to_hardsync() -> None:
    hardsync = Choice(Hardsync(), 16, 1.0)
    assert floor_ratio(hardsync, hardsync, 8, 1.0) == 1.0
    assert floor_ratio(Choice(KSync(4), 16, 1.0), hardsync, 8, 1.0) == 2.0
    assert floor_ratio(Choice(KBatchSync(16), 16, 1.0), hardsync, 8, 1.0) == 0.5
    # Nothing fresh: γ' is 1 where the cells that cancel have 1.5.
    assert floor_ratio(Choice(Async(), 16, 1.0), hardsync, 8, 0.0) == pytest.approx(12.0)


def test_who_is_slow() -> None:
    assert slowest_ratio(Machines(Constant(value=2.0), {}, 4), 2) == 1.0
    slow = Machines(Constant(value=1.0), {0: Constant(value=10.0)}, 4)
    assert slowest_ratio(slow, 1) == 10.0 and slowest_ratio(slow, 2) == 5.5
    exponential = slowest_ratio(Machines(Exponential(mean=1.0), {}, 3), 1)
    assert exponential == pytest.approx((11 / 6) / (5 / 6), rel=0.05)


def test_a_band_narrows_with_seeds_and_widens_with_the_time_per_update() -> None:
    one, few = center_and_band([2.0], 0.3), center_and_band([2.0] * 9, 0.3)
    assert one[0] == few[0] == 2.0
    assert one[1][0] < few[1][0] < 2.0 < few[1][1] < one[1][1]
    others = [Machines(Exponential(mean=mean), {}, 4) for mean in (0.8, 1.0, 1.25)]
    update = time_updates(Hardsync(), Machines(Exponential(mean=1.0), {}, 4), others)
    wide = center_and_band([2.0] * 9, 0.3, update=update)
    assert wide[1][0] < few[1][0] and wide[1][1] > few[1][1]
    assert pooled_spread([[1.0] * 50]) < 0.1 < 0.5 < pooled_spread([[1.0, 4.0] * 20])


def test_few_seeds_leave_more_choices_that_may_be_best() -> None:
    def left(num_seeds: int) -> int:
        return sum(may_be_best([[1.0 + 0.05 * i] * num_seeds for i in range(20)], 0.2))

    assert left(1) > left(4) > left(24) > 1
    assert may_be_best([[3.0]], 0.2) == [True] and may_be_best([], 0.2) == []
    # Whoever was measured less may still be the best.
    assert may_be_best([[1.0] * 16, [1.3] * 16, [1.3]], 0.2) == [True, False, True]
    # Whatever the unit.
    assert may_be_best([[60.0] * 16, [78.0] * 16, [78.0]], 0.2) == [True, False, True]


HARDSYNC, SYNC = Choice(Hardsync(), 16, 1.0), Choice(KSync(3), 16, 1.0)
STALE = Choice(KAsync(2), 16, 1.0)


@pytest.mark.parametrize(
    ("times", "width", "chosen"),
    [
        ((1.0, 1.0, 1.0), 1.1, HARDSYNC),
        ((1.1, 1.0, 1.05), 1.1, HARDSYNC),  # not beyond the bands
        ((1.5, 1.0, 1.05), 1.1, SYNC),
        ((1.5, 1.02, 1.0), 1.1, SYNC),  # about as fast, and simpler
        ((1.5, 1.04, 1.0), 1.1, STALE),
        ((1.5, 1.2, 1.0), 1.1, STALE),
        ((1.5, 1.2, 1.0), 2.0, HARDSYNC),  # too little is known
    ],
)
def test_the_simplest_that_is_not_beaten(
    times: tuple[float, ...], width: float, chosen: Choice
) -> None:
    choices = [HARDSYNC, SYNC, STALE]
    bands = [(time / width, time * width) for time in times]
    assert choices[decide(choices, times, bands)] == chosen
    assert choices[decide(choices, times, bands, constant=True)] == HARDSYNC
    # In any order.
    turned = decide(choices[::-1], times[::-1], bands[::-1])
    assert choices[::-1][turned] == chosen
