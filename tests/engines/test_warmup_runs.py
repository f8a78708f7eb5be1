"""Runs that begin with hardsync: equal to hardsync where they must be, resumed and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gruppetto as gp
from gruppetto.errors import InvalidSetting
from gruppetto.runs.execute import Run
from gruppetto.testing import reference
from gruppetto.testing.checks import check_accounts, check_trace, tell
from gruppetto.trace import EventRow, Row, read_trace

PER_EPOCH, SAMPLES, EPOCHS = 6, 44, 3
HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")


def train(out: Path, **settings: Any) -> Run:
    """Three learners, three epochs of 6 mini-batches."""
    chosen = {
        "engine": "virtual",
        "protocol": "softsync:n=3",
        "learners": 3,
        "epochs": EPOCHS,
        "delay": "exponential:mean=1.0",
        "progress": False,
        **settings,
    }
    return gp.train(reference(), out=out, **chosen)


def hashes(run: Run) -> list[str]:
    return [run.result[key] for key in HASHES]


def staleness_of(run: Run) -> list[list[int]]:
    """Staleness of each update's contributions."""
    return [row.staleness for row in read_trace(run.folder.trace).updates]


@pytest.mark.parametrize("protocol", ["softsync:n=3", "async", "k-async:k=2", "backup:b=1"])
@pytest.mark.parametrize("faults", [None, "random:seed=3,die=0.05,fail=0.05,late=0.2"])
def test_a_warmup_of_the_whole_run_is_hardsync(
    tmp_path: Path, protocol: str, faults: str | None
) -> None:
    """Bit for bit, though the protocols differ in their default modulation."""
    common = {"faults": faults, "max_given_up": 99}
    whole = train(tmp_path / "hardsync", protocol="hardsync", **common)
    warm = train(tmp_path / "warm", protocol=protocol, warmup=f"hardsync:epochs={EPOCHS}", **common)
    assert hashes(warm) == hashes(whole)
    assert warm.result["time"] == whole.result["time"]
    assert warm.history == whole.history


@pytest.mark.parametrize(("epochs", "updates"), [(0.1, 1), (0.5, 1), (1, 2), (1.5, 3), (2, 4)])
def test_hardsync_first_and_stale_gradients_afterwards(
    tmp_path: Path, epochs: float, updates: int
) -> None:
    """3 at a time until ceil(epochs · 6) are applied, then one by one; never stale before."""
    whole = train(tmp_path / "hardsync", protocol="hardsync")
    run = train(tmp_path / "out", protocol="async", warmup=f"hardsync:epochs={epochs}")
    ours, theirs = read_trace(run.folder.trace).updates, read_trace(whole.folder.trace).updates
    assert ours[:updates] == theirs[:updates]
    assert {len(row.staleness) for row in ours[updates:]} == {1}
    assert max(max(row.staleness) for row in ours[updates:]) > 0
    assert len(ours) == updates + EPOCHS * PER_EPOCH - 3 * updates
    assert run.result["weights_sha256"] != whole.result["weights_sha256"]
    story = tell(run.folder.path, EPOCHS * PER_EPOCH, PER_EPOCH)
    check_trace(story)
    check_accounts(story, SAMPLES)


class At:
    """Asks a run to stop when an event row with a number is written."""

    def __init__(self, row: int) -> None:
        self.row = row

    def __call__(self, row: Row) -> bool:
        return isinstance(row, EventRow) and row.row == self.row


@pytest.mark.parametrize("protocol", ["async", "softsync:n=2", "k-async:k=1", "k-batch-sync:k=2"])
def test_stopped_in_or_after_the_warmup_and_resumed(tmp_path: Path, protocol: str) -> None:
    """At every row from the first join to some updates after the switch, with equal bits."""
    settings: dict[str, Any] = {"protocol": protocol, "warmup": "hardsync:epochs=1"}
    whole = train(tmp_path / "whole", **settings)
    # Rows 0 to 2 are joins; 6 pushes later, in row 8, the warm-up ends.
    for row in (0, 4, 5, 7, 8, 9, 12):
        out = tmp_path / str(row)
        assert train(out, on_event=At(row), **settings).result["stopped_by"] == "callback"
        resumed = gp.resume(out, progress=False)
        assert hashes(resumed) == hashes(whole), f"row {row}"
        assert staleness_of(resumed) == staleness_of(whole)
        replayed = gp.replay(out, progress=False)
        assert replayed["matches"], replayed["difference"]


def test_a_run_without_epochs_warms_up_too(tmp_path: Path) -> None:
    run = train(
        tmp_path / "out", protocol="async", epochs=None, updates=9, warmup="hardsync:epochs=1"
    )
    assert [len(s) for s in staleness_of(run)] == [3, 3, 1, 1, 1, 1, 1, 1, 1]
    assert gp.replay(tmp_path / "out", progress=False)["matches"]


def test_a_protocol_that_cannot_run_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="waits for 4 distinct learners of 3"):
        train(tmp_path / "out", protocol="k-async:k=4", warmup="hardsync:epochs=99")
    assert not (tmp_path / "out").exists()


def test_memory_counts_what_hardsync_holds(tmp_path: Path) -> None:
    """k-sync:k=1 holds one gradient, its warm-up one of each of 60 learners."""
    common: dict[str, Any] = {"protocol": "k-sync:k=1", "learners": 60, "memory": 1e-4}
    train(tmp_path / "fits", **common)
    with pytest.raises(InvalidSetting, match="this run needs about"):
        train(tmp_path / "out", warmup="hardsync:epochs=1", **common)


def test_a_story_of_a_warmup_needs_to_know_its_epochs(tmp_path: Path) -> None:
    train(tmp_path / "out", warmup="hardsync:epochs=1")
    with pytest.raises(AssertionError, match="a warm-up counts epochs"):
        tell(tmp_path / "out", EPOCHS * PER_EPOCH)
