"""Learners die, hang, arrive late, twice, out of order; nothing is lost and nothing counts twice.

Thousands of seeded runs of the virtual engine without tensors, each watched by the oracle after
every event (``fault_runs.py``), and a few with real gradients that a replay must reproduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_runs import FaultyRun, Plan, draw_plan, run_seed
from oracle import RULES, Settings

import gruppetto as gp
from gruppetto.engines.faults import FAULT_PLANS, Fault, FaultKind, FaultPlan
from gruppetto.engines.gradients import Gradients
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.errors import InvalidSetting, LearnersLost
from gruppetto.testing import reference
from gruppetto.testing.checks import check_accounts, check_trace, tell

PROTOCOLS = sorted(RULES)
SEEDS = 400 * len(PROTOCOLS)
HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")


# ------------------------------------------------------------ thousands, null


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_random_faults_break_nothing(protocol: str) -> None:
    """400 runs of each protocol; and every kind of fault and of ending was among them."""
    seen: Counter[str] = Counter()
    for seed in range(PROTOCOLS.index(protocol), SEEDS, len(PROTOCOLS)):
        run = run_seed(seed)
        assert run.plan.settings.protocol.startswith(protocol)
        seen.update(run.seen)
    expected = [f"drawn {kind.value}" for kind in FaultKind]
    expected += ["died", "hung", "failed", "not finite", "pushed twice", "rejoined"]
    expected += ["pushed after its learner was lost"]
    expected += [f"ended by {r}" for r in ("epochs", "given-up", "learners-lost", "max-time")]
    expected += ["ended by callback", "ended by diverged"]
    distinct, cancels, _ = RULES[protocol]
    expected += ["pushed after its cancel"] if cancels else []
    # A learner that waits has no job to die of; and without a bound K = 1 holds nothing.
    if not distinct and protocol not in ("ringmaster", "ssp", "async"):
        expected += ["lost while its contribution is held"]
    missing = [what for what in expected if not seen[what]]
    assert not missing, f"never happened in these runs: {missing}; of {dict(seen)}"


def test_a_failing_seed_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the plan, the event and a command."""

    def wrong(run: FaultyRun) -> str:
        raise AssertionError("two and two are five")

    monkeypatch.setattr(FaultyRun, "run", wrong)
    with pytest.raises(AssertionError, match="two and two are five") as caught:
        run_seed(17)
    assert "python tests/engines/fault_runs.py 17" in str(caught.value)
    assert repr(draw_plan(17)) in str(caught.value)


def _never_release(engine: type[VirtualEngine], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gradients, "release", lambda self, version: None)


def _compute_on_the_newest(engine: type[VirtualEngine], patch: pytest.MonkeyPatch) -> None:
    original = Gradients.compute
    patch.setattr(Gradients, "compute", lambda self, batch, _: original(self, batch, self.newest))


def _ignore_cancels(engine: type[VirtualEngine], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VirtualEngine, "_cancel", lambda self, lease: None)


def _rejoin_under_the_same_number(engine: type[VirtualEngine], patch: pytest.MonkeyPatch) -> None:
    from gruppetto.protocols.messages import LearnerJoined

    original = VirtualEngine._put

    def put(self: VirtualEngine, time: float, item: Any) -> None:
        if isinstance(item, LearnerJoined):
            item = LearnerJoined(item.learner % self._num_learners)
        original(self, time, item)

    patch.setattr(VirtualEngine, "_put", put)


def _run_first_seeds() -> None:
    for seed in range(200):
        run_seed(seed)


@pytest.mark.parametrize(
    "sabotage",
    [_never_release, _compute_on_the_newest, _ignore_cancels, _rejoin_under_the_same_number],
)
def test_a_sabotaged_engine_is_found(
    sabotage: Callable[[type[VirtualEngine], pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch is not blind: one mistake in the engine, and some of the first seeds fail."""
    sabotage(VirtualEngine, monkeypatch)
    with pytest.raises(AssertionError, match="replay it with"):
        _run_first_seeds()


# ------------------------------------------------------- each kind by itself


def _alone(
    kind: FaultKind, protocol: str, share: float = 1.0, **settings: Any
) -> tuple[FaultyRun, str]:
    plan = Plan(
        settings=Settings(protocol, learners=3, mini_batches=12, max_given_up=100),
        law=settings.pop("law", "constant:value=1.0"),
        laws={},
        faults=FaultPlan(seed=1, **{kind.value: share}, **settings),
        max_time=None,
        stop_at=None,
    )
    run = FaultyRun(plan)
    return run, run.run()


def test_if_everybody_dies_at_once_the_run_ends_lost() -> None:
    """Nobody returns, nobody is waited for; each death costs its mini-batch one attempt."""
    run, reason = _alone(FaultKind.DIE, "async", rejoin=0.0)
    assert reason == "learners-lost"
    assert run.time == 1.0
    assert run.watched.coordinator.num_lost == 3
    assert run.learner.computed == []


def test_if_everybody_dies_and_returns_all_mini_batches_are_given_up() -> None:
    """Three deaths on a mini-batch give it up; the run ends although nothing was ever pushed."""
    run, reason = _alone(FaultKind.DIE, "k-async:k=2", rejoin=1.0)
    assert reason == "epochs"
    assert run.watched.coordinator.ledger.num_given_up == 12
    assert run.seen["rejoined"] > 12


def test_a_hung_learner_is_lost_first_and_pushes_later() -> None:
    """Its push finds a closed lease, is counted as discarded and never applied."""
    run, _ = _alone(FaultKind.HANG, "async", share=0.5, law="uniform:low=0.5,high=1.5")
    assert run.seen["hung"] > 3
    assert run.seen["pushed after its learner was lost"] > 3
    assert run.watched.coordinator.num_discarded >= run.seen["pushed after its learner was lost"]


def test_a_cancel_that_is_not_noticed_is_discarded() -> None:
    """Late pushes of cancelled leases: computed, sent, thrown away."""
    law = "uniform:low=0.5,high=1.5"
    run, reason = _alone(FaultKind.LATE, "k-sync:k=1", law=law)
    assert reason == "epochs"
    assert run.seen["pushed after its cancel"] == run.watched.coordinator.num_cancelled > 5
    assert len(run.server.applied) == 12


def test_a_push_that_is_delivered_twice_counts_once() -> None:
    """Every push twice: as many discarded as applied, and the second is not computed again."""
    run, reason = _alone(FaultKind.DUPLICATE, "k-batch-async:k=2")
    assert reason == "epochs"
    assert run.seen["pushed twice"] == run.watched.coordinator.num_discarded == 12
    assert len(run.learner.computed) == 12


def test_pushes_overtake_each_other() -> None:
    """Held up on their way by different times, equal jobs arrive out of lease order."""
    run, reason = _alone(FaultKind.REORDER, "k-batch-async:k=2", share=0.5)
    assert reason == "epochs"
    assert run.seen["overtaken on its way"] > 2
    assert sorted(run.server.applied) == list(range(12))


def test_failing_and_not_finite_computations_cost_attempts() -> None:
    """Both reject a gradient; only the second is divergence."""
    run, reason = _alone(FaultKind.FAIL, "async")
    assert (reason, run.seen["failed"]) == ("epochs", 36)
    assert run.watched.coordinator.ledger.num_given_up == 12
    run, reason = _alone(FaultKind.NOT_FINITE, "async")
    assert (reason, run.seen["not finite"]) == ("diverged", 3)


def test_faults_are_keyed_by_slot_and_job() -> None:
    """Drawn again, or for another job first, a fault is the same; seeds and slots differ."""
    plan = FaultPlan(seed=3, die=0.2, hang=0.2, late=0.2, duplicate=0.2, rejoin=0.5)
    there = [plan.draw(slot, n) for slot in range(3) for n in range(50)]
    back = [plan.draw(slot, n) for slot in (2, 1, 0) for n in reversed(range(50))]
    assert there == back[::-1]
    assert there[:50] != there[50:100]
    other = FaultPlan(seed=4, die=0.2, hang=0.2, late=0.2, duplicate=0.2, rejoin=0.5)
    assert [other.draw(0, n) for n in range(50)] != there[:50]


def test_shares_are_kept_and_extras_stay_below_twice_their_mean() -> None:
    """4,000 draws: each kind within 3 points of its share, times uniform from 0 to 2·extra."""
    plan = FaultPlan(seed=5, die=0.3, reorder=0.1, fail=0.2, rejoin=0.25, extra=2.0)
    drawn = [plan.draw(0, n) for n in range(4000)]
    faults: list[Fault] = [fault for fault in drawn if fault is not None]
    kinds = Counter(fault.kind for fault in faults)
    shares = {FaultKind.DIE: 0.3, FaultKind.REORDER: 0.1, FaultKind.FAIL: 0.2}
    assert set(kinds) == set(shares)
    for kind, share in shares.items():
        assert kinds[kind] / 4000 == pytest.approx(share, abs=0.03)
    assert sum(f.extra for f in faults) / len(faults) == pytest.approx(2.0, abs=0.1)
    assert all(0.0 < fault.extra < 4.0 for fault in faults)
    returning = [fault for fault in faults if fault.rejoin_after is not None]
    assert len(returning) / len(faults) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("random:die=1.5", "expected die from 0 to 1, got 1.5"),
        ("random:die=-0.1", "expected die from 0 to 1, got -0.1"),
        ("random:late=nan", "expected late from 0 to 1, got nan"),
        ("random:extra=inf", "expected extra from 0 to inf, got inf"),
        ("random:die=0.6,hang=0.6", "expected shares that sum to at most 1, got 1.2"),
    ],
)
def test_bad_plans_are_refused(spec: str, message: str) -> None:
    """In a sentence, before anything runs."""
    with pytest.raises(InvalidSetting, match=message):
        FAULT_PLANS.parse(spec)


# ------------------------------------------------------------ real gradients

EVERYTHING = "die=0.06,hang=0.05,late=0.1,duplicate=0.1,reorder=0.1,fail=0.05,not_finite=0.05"


@pytest.mark.parametrize("on_late", ["requeue", "drop"])
@pytest.mark.parametrize("protocol", ["k-sync:k=2", "k-batch-sync:k=2", "k-async:k=2", "async"])
def test_a_faulty_run_with_real_gradients_replays(
    tmp_path: Path, protocol: str, on_late: str
) -> None:
    """BatchNorm, dropout and momentum under all faults: the replay makes the same bits."""
    kinds: Counter[str] = Counter()
    for seed in range(3):
        out = tmp_path / str(seed)
        run = gp.train(
            reference(),
            protocol=protocol,
            learners=4,
            epochs=4,
            delay="exponential:mean=1.0",
            faults=f"random:seed={seed},{EVERYTHING}",
            on_late=on_late,
            max_given_up=100,
            seed=seed,
            out=out,
            progress=False,
            engine="virtual",
        )
        story = tell(out, 24)
        check_trace(story)
        check_accounts(story, 44)
        kinds.update(type(event).__name__ for event, _ in story.log)
        kinds["discarded"] += run.result["mini_batches_discarded"]
        kinds["dropped"] += run.result["mini_batches_dropped"]
        replayed = gp.replay(out, progress=False)
        assert replayed["matches"], replayed["difference"]
        assert [replayed[h] for h in HASHES] == [run.result[h] for h in HASHES]
    assert kinds["LearnerLost"] and kinds["GradientFailed"] and kinds["discarded"]
    assert bool(kinds["dropped"]) == (on_late == "drop")


def test_a_run_whose_learners_are_all_lost_fails_in_a_sentence_and_replays(
    tmp_path: Path,
) -> None:
    """What was trained until then is in the folder."""
    with pytest.raises(LearnersLost, match="all learners are lost after") as caught:
        gp.train(
            reference(),
            protocol="async",
            learners=3,
            epochs=4,
            faults="random:seed=2,die=0.3,rejoin=0",
            out=tmp_path / "out",
            progress=False,
            engine="virtual",
        )
    assert "\n" not in str(caught.value)
    replayed = gp.replay(tmp_path / "out", progress=False)
    assert replayed["matches"], replayed["difference"]
    assert replayed["mini_batches_left"] > 0
