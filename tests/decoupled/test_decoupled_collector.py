"""The collector: whatever order modules report in, the same rows, evaluations and checkpoints."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from decoupled_tasks import PER_EPOCH, SAMPLES, blocks
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gruppetto.decoupled.schedule import Schedule
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.errors import RunFailed
from gruppetto.protocols.messages import Event, ModuleUpdated, PassFailed, StopRequested
from gruppetto.runs.decoupled.collector import Collector
from gruppetto.runs.decoupled.evaluation import (
    AtOnce,
    Deferred,
    InThread,
    Nowhere,
    choose_evaluation,
)
from gruppetto.runs.decoupled.groups import Groups
from gruppetto.runs.decoupled.parts import DecoupledParts, build_decoupled_parts
from gruppetto.runs.decoupled.train import plan_decoupled
from gruppetto.runs.decoupled.virtual import VirtualRun
from gruppetto.runs.evaluation import Due
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.progress import Progress
from gruppetto.trace import EvaluationRow, ModuleRow, Row, TraceWriter, UpdateRow, follow_rows


class Told(NamedTuple):
    """One call of a module's: an event, or a snapshot."""

    module: int
    event: Event | None
    time: float
    row: ModuleRow | None
    snapshot: Snapshot | None


class Recorder:
    """Stands where the collector does, and keeps what it is told."""

    def __init__(self, parts: DecoupledParts) -> None:
        self.marks = parts.marks
        self.told: list[Told] = []

    def take(
        self, event: Event, time: float, row: ModuleRow | None = None, traceback: str = ""
    ) -> None:
        if not isinstance(event, StopRequested):
            self.told.append(Told(event.module, event, time, row, None))  # type: ignore[union-attr]

    def take_snapshot(self, snapshot: Snapshot) -> None:
        self.told.append(Told(snapshot.module, None, 0.0, None, snapshot))


def parts_of(**settings: Any) -> DecoupledParts:
    values = {"decouple": "ddg:modules=3", "engine": "virtual", "epochs": 2, **settings}
    return build_decoupled_parts(*plan_decoupled(blocks(), **values))


@pytest.fixture(scope="module")
def recorded() -> tuple[DecoupledParts, list[Told], str]:
    parts = parts_of(evaluate_every=0.5)
    recorder = Recorder(parts)
    reason, _ = VirtualRun(parts, None).run(recorder)
    return parts, recorder.told, reason


def collect(
    parts: DecoupledParts, told: list[Told], folder: Path, evaluation: Any = None
) -> tuple[Collector, list[str]]:
    """A collector that was told all; with the reasons for which it asked the run to stop."""
    stops: list[str] = []
    where = RunFolder.create(folder, parts.settings, parts.about())
    chosen = evaluation or AtOnce(parts)
    collector = Collector(
        parts,
        where,
        TraceWriter(where.trace),
        Progress("", None, False),
        None,
        chosen,
        stops.append,
    )
    for each in told:
        if each.snapshot is not None:
            collector.take_snapshot(each.snapshot)
        else:
            assert each.event is not None
            collector.take(each.event, each.time, each.row)
        collector.poll()
    return collector, stops


def rows_of(folder: Path) -> list[Row]:
    return list(follow_rows(folder / "trace"))


def shown(rows: list[Row]) -> list[Any]:
    """What must not depend on the order in which modules report."""
    return [
        (row.row, row.type, bytes(row.event), row.commands, row.time)
        if row.__class__.__name__ == "EventRow"
        else row
        for row in rows
        if row.__class__.__name__ != "EndRow"
    ]


def concluded(
    parts: DecoupledParts, told: list[Told], reason: str, folder: Path
) -> tuple[list[Any], dict[str, Any], list[str]]:
    """The rows that do not depend on the order of reports, the result, and the checkpoints."""
    collector, stops = collect(parts, told, folder)
    result = collector.conclude(reason, {})
    assert not stops
    checkpoints = [path.name for path in folder.glob("checkpoint-*")]
    assert checkpoints == [f"checkpoint-{collector.tally.num_events - 1:09d}.safetensors"]
    del result["run"], result["wall_time"]
    return shown(rows_of(folder)), result, checkpoints


@pytest.fixture(scope="module")
def in_order(recorded: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What comes of reports in the order in which the run in virtual time made them."""
    return concluded(*recorded, tmp_path_factory.mktemp("in-order") / "run")


@given(st.data())
@examples(max_examples=12)
def test_the_order_between_modules_does_not_matter(
    recorded: Any, in_order: Any, data: st.DataObject
) -> None:
    parts, told, reason = recorded
    columns = {k: [each for each in told if each.module == k] for k in (1, 2, 3)}
    shuffled = []
    while any(columns.values()):
        number = data.draw(st.sampled_from([k for k, column in columns.items() if column]))
        taken = data.draw(st.integers(1, len(columns[number])))
        shuffled += columns[number][:taken]
        del columns[number][:taken]
    with TemporaryDirectory() as name:
        assert concluded(parts, shuffled, reason, Path(name) / "run") == in_order


def test_rows_stand_where_a_checkpoint_can_be_made(recorded: Any, tmp_path: Path) -> None:
    """An evaluation comes before the next group; nothing of a later one is written before it."""
    parts, told, reason = recorded
    collector, _ = collect(parts, told, tmp_path / "run")
    collector.conclude(reason, {})
    version = 0
    for row in rows_of(tmp_path / "run"):
        if isinstance(row, UpdateRow):
            assert row.version == version + 1
            version = row.version
        elif isinstance(row, EvaluationRow):
            assert row.version == version
        elif isinstance(row, ModuleRow):
            assert row.mini_batch == version
    assert [row.version for row in collector.evaluations] == [3, 6, 9, 12]
    assert collector.evaluations[0].samples == 24
    assert [row.time for row in collector.evaluations] == sorted(
        max(each.time for each in told if each.event == ModuleUpdated(each.module, v))
        for v in (3, 6, 9, 12)
    )


def test_a_missing_snapshot_holds_the_rows_that_come_after(recorded: Any, tmp_path: Path) -> None:
    parts, told, _ = recorded
    missing = [t for t in told if not (t.module == 2 and t.snapshot and t.snapshot.version == 3)]
    collector, _ = collect(parts, missing, tmp_path / "run")
    assert collector.tally.version == 3 and not collector.evaluations
    collector.take_snapshot(
        next(t.snapshot for t in told if t.module == 2 and t.snapshot and t.snapshot.version == 3)
    )
    assert collector.tally.version == 12
    assert [row.version for row in collector.evaluations] == [3, 6, 9, 12]


@pytest.mark.parametrize("kind", [InThread, Deferred])
def test_evaluations_elsewhere_give_the_same(recorded: Any, tmp_path: Path, kind: Any) -> None:
    parts, told, reason = recorded
    at_once, _ = collect(parts, told, tmp_path / "at-once")
    at_once.conclude(reason, {})
    warnings: list[str] = []
    evaluation = kind(parts, warnings.append) if kind is InThread else kind(parts)
    collector, _ = collect(parts, told, tmp_path / "elsewhere", evaluation)
    collector.conclude(reason, {})
    evaluation.close()
    assert collector.evaluations == at_once.evaluations
    assert not warnings and evaluation.seconds > 0
    assert evaluation.waiting() == []


def test_a_thread_that_falls_behind_skips_versions(recorded: Any) -> None:
    parts, told, _ = recorded
    newest = {t.module: t.snapshot for t in told if t.snapshot is not None and t.snapshot.plain}
    warnings: list[str] = []
    evaluation = InThread(parts, warnings.append)
    evaluation._busy = Due(0, 0.0, 0, 0.0, None), type("Never", (), {"done": lambda self: False})()
    for version in range(1, 19):
        evaluation.submit(Due(version, 0.0, 0, 0.0, None), newest)  # type: ignore[arg-type]
    assert len(warnings) == 2 and "version 1 is skipped" in warnings[0]
    assert [due.version for due in evaluation.waiting()] == [0, *range(3, 19)]
    evaluation._busy = None
    done: list[int] = []
    evaluation.done = lambda due, metrics: done.append(due.version)
    evaluation.finish()
    evaluation.close()
    assert done == list(range(3, 19))


def test_which_evaluation_there_is() -> None:
    def none(text: str) -> None: ...

    assert isinstance(choose_evaluation(parts_of(), none), AtOnce)
    assert isinstance(choose_evaluation(parts_of(evaluate="off"), none), Nowhere)
    assert isinstance(choose_evaluation(parts_of(evaluate="deferred"), none), Deferred)
    local = choose_evaluation(parts_of(engine="local"), none)
    assert isinstance(local, InThread)
    local.close()


def test_an_evaluation_that_fails_ends_the_run(recorded: Any, tmp_path: Path) -> None:
    parts, told, _ = recorded
    from gruppetto.errors import TaskError

    class Failing(AtOnce):
        def submit(self, due: Due, snapshots: Any) -> None:
            raise TaskError("no such thing")

    with pytest.raises(RunFailed, match="version 3 cannot be evaluated: no such thing; the run"):
        collect(parts, told, tmp_path / "run", Failing(parts))


def test_a_pass_that_failed_is_the_last_row_whatever_others_did(
    recorded: Any, tmp_path: Path
) -> None:
    parts, told, _ = recorded
    # Module 2 fails at the backward pass of mini-batch 7; the others have gone on as they did.
    cut = next(i for i, t in enumerate(told) if t.event == ModuleUpdated(2, 7))
    events = [t for i, t in enumerate(told) if t.module != 2 or i <= cut]
    collector, _ = collect(parts, events, tmp_path / "run")
    after = [t for i, t in enumerate(told) if t.module == 2 and i > cut and t.event is not None]
    collector.take(after[0].event, after[0].time)
    collector.take(PassFailed(2, 7, "Trouble: much"), 99.0, None, "Traceback\nTrouble: much\n")
    with pytest.raises(RunFailed, match="mini-batch 7 in module 2 failed after 7 updates: Trouble"):
        collector.conclude("Trouble: much", {})
    rows = rows_of(tmp_path / "run")
    kinds = [type(row).__name__ for row in rows[-4:]]
    assert kinds == ["EventRow", "EventRow", "FailureRow", "EndRow"]


# ------------------------------------------------------------------------ pieces


@pytest.mark.parametrize("tail", ["drain", "drop"])
def test_marks_follow_from_settings_alone(tail: str) -> None:
    parts = parts_of(evaluate_every=0.5, tail=tail, epochs=3)
    marks = [parts.marks(version) for version in range(20)]
    wanted = ["nothing"] * 20
    for version in (3, 9, 15):
        wanted[version] = "weights"
    for version in (6, 12, 18):
        wanted[version] = "state"
    if tail == "drop":  # module 1 ends at 16, so later versions are none of the network
        wanted[18] = "nothing"
    assert marks == wanted
    assert {parts_of(evaluate="off").marks(version) for version in range(6)} == {"nothing"}


def test_samples_are_counted_by_epochs() -> None:
    parts = parts_of()
    for version in range(1, 3 * PER_EPOCH):
        counted = sum(len(parts.mini_batches.indices(b)) for b in range(version))
        assert parts.samples_through(version) == counted
    assert parts.samples_through(PER_EPOCH) == SAMPLES


def test_groups_of_modules_that_end_early() -> None:
    groups = Groups(Schedule((2, 1, 0), 4, "drop"))
    for module, last in ((1, 2), (2, 3), (3, 4)):
        for version in range(last + 1):
            groups.take(module, ModuleUpdated(module, version), 0.0, None)
    popped = []
    while (whole := groups.pop()) is not None:
        popped.append([group.module for group in whole])
    assert popped == [[1, 2, 3], [1, 2, 3], [1, 2, 3], [2, 3], [3]]


def test_groups_of_a_run_that_goes_on_begin_after_its_version() -> None:
    groups = Groups(Schedule((1, 0)), 5)
    for module in (1, 2):
        groups.take(module, ModuleUpdated(module, 5), 0.0, None)  # ready: told before
        assert groups.pop() is None
    for module in (1, 2):
        groups.take(module, ModuleUpdated(module, 6), 0.0, None)
    whole = groups.pop()
    assert whole is not None and [len(group.events) for group in whole] == [1, 1]
