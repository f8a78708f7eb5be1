"""Runs under a bound: with faults, stopped and resumed, replayed; in virtual time and for real."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bound_oracle import CORNERS, BoundModel
from fault_runs import FaultyRun, Plan
from oracle import Settings

import gruppetto as gp
from gruppetto.engines.faults import FaultPlan
from gruppetto.errors import InvalidSetting
from gruppetto.protocols.messages import TOO_STALE, ApplyUpdate, Cancel, Compute, Discard
from gruppetto.runs.execute import Run
from gruppetto.runs.measured import measured_delays
from gruppetto.testing import reference
from gruppetto.testing.checks import check_accounts, check_trace, tell
from gruppetto.trace import EventRow, Row

PER_EPOCH, SAMPLES, EPOCHS = 6, 44, 3
HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
SPECS = (
    "async:max_staleness=1,on_stale=discard",
    "k-batch-async:k=2,max_staleness=0",
    "async:max_staleness=3,on_stale=wait",
    "k-async:k=2,max_staleness=1,on_stale=wait",
    "ringmaster:r=2",
    "ssp:s=0",
    "ssp:s=1",
)
EVERYTHING = "die=0.06,hang=0.05,late=0.1,duplicate=0.1,reorder=0.1,fail=0.05,not_finite=0.02"


def train(out: Path, **settings: Any) -> Run:
    """Four learners, the last one slow, three epochs of 6 mini-batches."""
    chosen = {
        "engine": "virtual",
        "learners": 4,
        "epochs": EPOCHS,
        "delay": "exponential:mean=1.0",
        "delays": {3: "constant:value=4"},
        "progress": False,
        **settings,
    }
    return gp.train(reference(), out=out, **chosen)


# --------------------------------------------------------------------------- faults


@pytest.mark.parametrize("spec", SPECS)
def test_every_fault_under_every_bound(spec: str) -> None:
    """Null gradients: the oracle watches, the run ends, and the bound had something to do."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        run = FaultyRun(
            Plan(
                settings=Settings(spec, learners=4, mini_batches=30, max_given_up=100),
                law="exponential:mean=1.0",
                laws={3: "constant:value=7.0"},
                faults=FaultPlan(
                    seed=seed, die=0.05, hang=0.05, late=0.1, duplicate=0.1, reorder=0.1,
                    fail=0.05, rejoin=0.8,
                ),
                max_time=None,
                stop_at=None,
            )
        )  # fmt: skip
        assert run.run() in ("epochs", "learners-lost")
        seen += run.seen + run.watched.model.counts
    kind = BoundModel(spec).kind
    assert kind is not None
    # Waiting for distinct learners, four of them have room for one gradient each.
    corners = [c for c in CORNERS[kind] if c != "kept idle" or not spec.startswith("k-async")]
    expected = (*corners, "died", "hung", "pushed twice", "rejoined", "ended by epochs")
    missing = [what for what in expected if not seen[what]]
    assert not missing, f"never happened: {missing}; of {dict(seen)}"


@pytest.mark.parametrize("spec", SPECS)
def test_a_faulty_run_with_real_gradients_replays(tmp_path: Path, spec: str) -> None:
    """BatchNorm, dropout and momentum, what is discarded and restarted: the same bits again."""
    run = train(
        tmp_path / "out",
        protocol=spec,
        epochs=4,
        faults=f"random:seed=5,{EVERYTHING}",
        max_given_up=100,
    )
    story = tell(tmp_path / "out", 24)
    check_trace(story)
    check_accounts(story, SAMPLES)
    replayed = gp.replay(tmp_path / "out", progress=False)
    assert replayed["matches"], replayed["difference"]
    assert [replayed[h] for h in HASHES] == [run.result[h] for h in HASHES]


# ------------------------------------------------------------------ stop and resume


class At:
    """Asks a run to stop when an event row with a number is written."""

    def __init__(self, row: int) -> None:
        self.row = row

    def __call__(self, row: Row) -> bool:
        return isinstance(row, EventRow) and row.row == self.row


@pytest.mark.parametrize("spec", SPECS)
def test_stopped_anywhere_and_resumed(tmp_path: Path, spec: str) -> None:
    """With gradients held back, discarded and restarted before and after; equal bits."""
    whole = train(tmp_path / "whole", protocol=spec)
    for row in (5, 9, 13):
        out = tmp_path / str(row)
        assert train(out, protocol=spec, on_event=At(row)).result["stopped_by"] == "callback"
        resumed = gp.resume(out, progress=False)
        assert [resumed.result[h] for h in HASHES] == [whole.result[h] for h in HASHES], row
        assert resumed.staleness == whole.staleness


# ------------------------------------------------------------- what engines are told


def commands_of(run: Run) -> list[list[Any]]:
    return [commands for _, commands in tell(run.folder.path, EPOCHS * PER_EPOCH).log]


@pytest.mark.parametrize("engine", ["virtual", "local"])
def test_engines_restart_a_learner_within_one_list(tmp_path: Path, engine: str) -> None:
    """ApplyUpdate, Cancel and Compute for the same learner; nothing is applied too stale."""
    fast, slow = ("exponential:mean=1", "constant:value=5")
    if engine == "local":
        fast, slow = "exponential:mean=0.002", "constant:value=0.05"
    run = train(
        tmp_path / "out",
        engine=engine,
        protocol="ringmaster:r=2",
        learners=3,
        delay=fast,
        delays={2: slow},
    )
    cancels = restarts = 0
    lists = commands_of(run)
    learners = {c.lease: c.learner for commands in lists for c in commands if type(c) is Compute}
    for commands in lists:
        cancelled = {learners[c.lease] for c in commands if isinstance(c, Cancel)}
        if cancelled:
            assert isinstance(commands[0], ApplyUpdate)
            cancels += len(cancelled)
            # But for the last mini-batches, which those that contributed take.
            restarts += cancelled <= {c.learner for c in commands if isinstance(c, Compute)}
    assert cancels == run.result["mini_batches_cancelled"] > 0
    assert restarts > 0
    assert run.result["max_staleness"] <= 1
    assert gp.replay(tmp_path / "out", progress=False)["matches"]


@pytest.mark.parametrize("engine", ["virtual", "local"])
def test_engines_throw_away_what_is_discarded(tmp_path: Path, engine: str) -> None:
    """More often than there are blocks of memory for: each is free again."""
    fast, slow = ("constant:value=1", "constant:value=2.5")
    if engine == "local":
        fast, slow = "exponential:mean=0.001", "constant:value=0.02"
    run = train(
        tmp_path / "out",
        engine=engine,
        protocol="async:max_staleness=0,on_stale=discard",
        epochs=5,
        delay=fast,
        delays={3: slow},
    )
    discards = [
        command
        for _, commands in tell(tmp_path / "out", 5 * PER_EPOCH).log
        for command in commands
        if isinstance(command, Discard)
    ]
    assert {command.reason for command in discards} == {TOO_STALE}
    assert len(discards) == run.result["mini_batches_discarded"] > 12
    assert run.result["mini_batches_applied"] == 5 * PER_EPOCH
    if engine == "virtual":  # their times count, too
        assert measured_delays(tmp_path / "out").samples.keys() == {0, 1, 2, 3}


def test_a_learner_without_contribution_is_named_in_the_result(tmp_path: Path) -> None:
    """Always restarted; and a replay says the same."""
    run = train(tmp_path / "out", protocol="ringmaster:r=1", delays={3: "constant:value=1000"})
    assert run.result["learners_without_contribution"] == [3]
    why = run.result["without_contribution_why"]
    assert why.startswith("learner 3 contributed nothing: ")
    assert "were restarted as too stale" in why
    replayed = gp.replay(tmp_path / "out", progress=False)
    assert (replayed["learners_without_contribution"], replayed["without_contribution_why"]) == (
        [3],
        why,
    )


def test_lockstep_of_ssp_is_told_by_its_versions(tmp_path: Path) -> None:
    """s = 0: all four compute on versions that are multiples of four, one gradient each."""
    run = train(tmp_path / "out", protocol="ssp:s=0", epochs=4)
    log = tell(run.folder.path, 4 * PER_EPOCH).log
    versions = {c.version for _, commands in log for c in commands if isinstance(c, Compute)}
    assert versions == set(range(0, 24, 4))


# ---------------------------------------------------------------------------- settings


def test_a_bound_given_as_settings_is_part_of_the_protocol(tmp_path: Path) -> None:
    run = train(tmp_path / "out", protocol="async", max_staleness=3, on_stale="wait")
    assert run.result["protocol"] == "async:max_staleness=3,on_stale=wait"
    assert run.folder.settings().protocol == "async:max_staleness=3,on_stale=wait"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"protocol": "k-sync:k=2", "max_staleness": 3}, "cancels what would be late"),
        ({"protocol": "async", "max_staleness": 2.5}, "max staleness: expected a whole number"),
        ({"protocol": "async:max_staleness=2", "max_staleness": 3}, "says 2 and 3 is given"),
        ({"protocol": "async:max_staleness=2,on_stale=wait"}, "there are 4 learners"),
    ],
)
def test_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidSetting, match=words):
        train(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_memory_counts_what_waiting_holds(tmp_path: Path) -> None:
    """Up to K (s + 1) gradients may be held back; one is all that async holds without a bound."""
    common: dict[str, Any] = {"protocol": "async", "memory": 1e-4}
    train(tmp_path / "fits", **common)
    with pytest.raises(InvalidSetting, match="this run needs about"):
        train(tmp_path / "out", max_staleness=1000, on_stale="wait", **common)
