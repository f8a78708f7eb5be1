"""A replay makes every run's bits again, and is not fooled by a trace that was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import gruppetto as gp
from gruppetto.errors import RunFolderError, TraceError
from gruppetto.testing import protocols_for, reference

HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
Rows: TypeAlias = "list[dict[str, Any]]"


def _train(out: Path, protocol: str, **settings: Any) -> gp.Run:
    chosen = {"learners": 3, "epochs": 2, "delay": "exponential:mean=1.0", **settings}
    return gp.train(
        reference(), protocol=protocol, out=out, progress=False, **chosen, engine="virtual"
    )


def _rows(run: Path) -> Rows:
    return [json.loads(line) for line in (run / "trace" / "000.jsonl").read_text().splitlines()]


def _write(run: Path, rows: Rows) -> None:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (run / "trace" / "000.jsonl").write_text(text)


def _renumber(rows: Rows) -> Rows:
    number = 0
    for row in rows:
        if row["kind"] == "event":
            row["row"], number = number, number + 1
        elif row["kind"] == "end":
            row["rows"] = number
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with stale gradients, and one with cancelled and discarded ones and lost learners."""
    folder = tmp_path_factory.mktemp("runs")
    _train(folder / "late", "k-async:k=2")
    faults = "random:seed=2,die=0.1,late=0.3,duplicate=0.2,fail=0.1"
    _train(folder / "faulty", "k-sync:k=2", faults=faults, max_given_up=100, max_attempts=9)
    for name in ("late", "faulty"):
        result = gp.replay(folder / name, progress=False)
        assert result["matches"], result["difference"]
    kinds = {row["type"] for row in _rows(folder / "faulty") if row["kind"] == "event"}
    assert kinds == {"LearnerJoined", "LearnerLost", "GradientPushed", "GradientFailed"}
    return {"late": folder / "late", "faulty": folder / "faulty"}


# ------------------------------------------------------------------------ same


@pytest.mark.parametrize("protocol", protocols_for(4))
def test_every_protocol_matches(tmp_path: Path, protocol: str) -> None:
    """All four hashes are recomputed and equal; the summary is the recorded one."""
    run = _train(tmp_path / "out", protocol, learners=4, seed=2)
    replayed = gp.replay(tmp_path / "out", progress=False)
    assert (replayed["matches"], replayed["difference"]) == (True, None)
    recorded = {k: v for k, v in run.result.items() if k != "run"}
    assert {k: replayed[k] for k in recorded} == recorded


def test_a_run_stopped_early_matches(tmp_path: Path) -> None:
    """What it had in hand when it stopped is not applied in the replay either."""
    run = _train(tmp_path / "out", "k-batch-async:k=3", epochs=None, max_time=3.3)
    replayed = gp.replay(tmp_path / "out", progress=False)
    assert replayed["matches"], replayed["difference"]
    assert replayed["mini_batches_left"] == run.result["mini_batches_left"] > 0


def test_a_replay_writes_nothing(runs: dict[str, Path]) -> None:
    """Not a byte in the folder changes."""
    before = {p: p.read_bytes() for p in runs["late"].rglob("*") if p.is_file()}
    gp.replay(runs["late"], progress=False)
    assert {p: p.read_bytes() for p in runs["late"].rglob("*") if p.is_file()} == before


def test_rows_that_are_derived_do_not_matter(runs: dict[str, Path], tmp_path: Path) -> None:
    """Updates, evaluations and tracebacks are for readers: without them, the bits are the same."""
    for name, folder in runs.items():
        out = tmp_path / name
        shutil.copytree(folder, out)
        kept = [r for r in _rows(out) if r["kind"] in ("segment", "event", "end")]
        assert len(kept) < len(_rows(out))
        _write(out, kept)
        assert gp.replay(out, progress=False)["matches"]


# --------------------------------------------------------------------- changed

Change: TypeAlias = Callable[[Rows, int], "Rows | None"]


def _event(rows: Rows, index: int, **changed: Any) -> Rows:
    rows[index]["event"].update(changed)
    return rows


def _newer_version(rows: Rows, index: int) -> Rows | None:
    """A version that the learner may have read, if the server has one by then."""
    event, newest = rows[index]["event"], 0
    newest = max((r["version"] for r in rows[:index] if r["kind"] == "update"), default=0)
    return _event(rows, index, version=event["version"] + 1) if event["version"] < newest else None


def _version_of(version: int) -> Change:
    def change(rows: Rows, index: int) -> Rows | None:
        return _event(rows, index, version=version)

    return change


def _loss(rows: Rows, index: int) -> Rows | None:
    return _event(rows, index, loss=rows[index]["event"]["loss"] * 1.5)


def _num_samples(rows: Rows, index: int) -> Rows | None:
    return _event(rows, index, num_samples=rows[index]["event"]["num_samples"] + 1)


def _next_lease(rows: Rows, index: int) -> Rows | None:
    return _event(rows, index, lease=rows[index]["event"]["lease"] + 1)


def _far_lease(rows: Rows, index: int) -> Rows | None:
    return _event(rows, index, lease=10_000)


def _first_lease(rows: Rows, index: int) -> Rows | None:
    if rows[index]["event"]["lease"] == 0:
        return None
    return _event(rows, index, lease=0)


def _failed_instead(rows: Rows, index: int) -> Rows | None:
    lease = rows[index]["event"]["lease"]
    rows[index].update(type="GradientFailed", event={"lease": lease, "reason": "not so"})
    return rows


def _drop(rows: Rows, index: int) -> Rows | None:
    return _renumber(rows[:index] + rows[index + 1 :])


def _twice(rows: Rows, index: int) -> Rows | None:
    return _renumber([*rows[: index + 1], json.loads(json.dumps(rows[index])), *rows[index + 1 :]])


def _swap(rows: Rows, index: int) -> Rows | None:
    """With the next event row."""
    after = next((i for i in range(index + 1, len(rows)) if rows[i]["kind"] == "event"), None)
    if after is None or rows[after]["event"] == rows[index]["event"]:  # a push delivered twice
        return None
    rows[index], rows[after] = rows[after], rows[index]
    return _renumber(rows)


CHANGES: dict[str, Change] = {
    "newer version": _newer_version,
    "version of the future": _version_of(1000),
    "negative version": _version_of(-1),
    "loss": _loss,
    "number of samples": _num_samples,
    "next lease": _next_lease,
    "far lease": _far_lease,
    "first lease": _first_lease,
    "failed instead": _failed_instead,
    "dropped": _drop,
    "twice": _twice,
    "swapped": _swap,
}


def _changed(run: Path, change: Change, out: Path) -> Iterator[tuple[int, Path]]:
    """A copy of the run with each of its pushes changed, one at a time."""
    pushes = [i for i, row in enumerate(_rows(run)) if row.get("type") == "GradientPushed"]
    shutil.copytree(run, out)
    for index in pushes:
        rows = change(_rows(run), index)
        if rows is not None:
            _write(out, rows)
            yield index, out


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("which", ["late", "faulty"])
def test_a_changed_push_is_noticed(
    runs: dict[str, Path], tmp_path: Path, which: str, name: str
) -> None:
    """Whichever push it is: no match, a reason in words, and never an exception."""
    count = 0
    recorded = _rows(runs[which])[-1]["result"]
    for index, out in _changed(runs[which], CHANGES[name], tmp_path / "out"):
        count += 1
        replayed = gp.replay(out, progress=False)
        assert replayed["matches"] is False, f"row {index} of the file"
        assert replayed["difference"]
        equal = [replayed[h] for h in HASHES] == [recorded[h] for h in HASHES]
        # Those are made anew, and right; or a row too many comes after the end.
        assert not equal or name in ("loss", "number of samples", "twice")
    # Where unfinished work is cancelled, only pushes that come too late could be of a newer one.
    assert count > (0 if name == "newer version" else 3)


@pytest.mark.parametrize(
    ("type", "changed"),
    [
        ("GradientFailed", {"reason": "another"}),
        ("GradientFailed", {"lease": 9999}),
        ("LearnerLost", {"reason": "another"}),
        ("LearnerLost", {"learner": 77}),
        ("LearnerJoined", {"learner": 88}),
        ("LearnerJoined", {"learner": -1}),
    ],
)
def test_other_events_changed_are_noticed(
    runs: dict[str, Path], tmp_path: Path, type: str, changed: dict[str, Any]
) -> None:
    """Also words: they are part of the events' hash."""
    out = tmp_path / "out"
    shutil.copytree(runs["faulty"], out)
    rows = _rows(out)
    index = next(i for i, row in enumerate(rows) if row.get("type") == type)
    _write(out, _event(rows, index, **changed))
    replayed = gp.replay(out, progress=False)
    assert replayed["matches"] is False
    assert replayed["difference"]


@pytest.mark.parametrize(
    ("type", "event"),
    [
        ("GradientPulled", {"lease": 0}),
        ("GradientPushed", {"lease": 0}),
        ("GradientPushed", {"lease": "0", "version": 0, "loss": 1.0, "num_samples": 8}),
        ("GradientPushed", {"lease": 0, "version": 0, "loss": None, "num_samples": 8}),
        ("LearnerJoined", {}),
    ],
)
def test_a_row_that_is_no_event_is_noticed(
    runs: dict[str, Path], tmp_path: Path, type: str, event: dict[str, Any]
) -> None:
    """An unknown type, missing fields, fields of another type: no match, in words."""
    out = tmp_path / "out"
    shutil.copytree(runs["late"], out)
    rows = _rows(out)
    index = next(i for i, row in enumerate(rows) if row.get("type") == "GradientPushed")
    rows[index].update(type=type, event=event)
    _write(out, rows)
    replayed = gp.replay(out, progress=False)
    assert replayed["matches"] is False
    assert "a row that is no event" in replayed["difference"]


@pytest.mark.parametrize("name", HASHES)
def test_a_changed_hash_is_noticed(runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Each of the four counts."""
    out = tmp_path / "out"
    shutil.copytree(runs["late"], out)
    rows = _rows(out)
    rows[-1]["result"][name] = "0" * 64
    _write(out, rows)
    replayed = gp.replay(out, progress=False)
    assert replayed["matches"] is False
    assert replayed["difference"].startswith(f"{name} differ")


# --------------------------------------------------------------------- refused


def test_a_hole_in_the_row_numbers_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    """That is a damaged file, not another run."""
    out = tmp_path / "out"
    shutil.copytree(runs["late"], out)
    rows = _rows(out)
    _write(out, rows[:4] + rows[5:])
    with pytest.raises(TraceError, match="expected event row 3, got 4"):
        gp.replay(out, progress=False)


def test_a_run_that_did_not_end_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    """In a sentence that says what to do."""
    out = tmp_path / "out"
    shutil.copytree(runs["late"], out)
    _write(out, _rows(out)[:-1])
    with pytest.raises(TraceError, match=r"did not end .* resume it, then replay it"):
        gp.replay(out, progress=False)


def test_a_task_given_as_an_object_is_asked_for_again(tmp_path: Path) -> None:
    """The folder cannot name it; another task gives no match."""
    from gruppetto.testing import conformance_task

    task = conformance_task()
    gp.train(task, learners=2, out=tmp_path / "out", progress=False, engine="virtual")
    with pytest.raises(RunFolderError, match=r"give it again: task=\.\.\."):
        gp.replay(tmp_path / "out", progress=False)
    assert gp.replay(tmp_path / "out", task=task, progress=False)["matches"]
