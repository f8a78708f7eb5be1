"""What is kept of a decoupled run while it goes on: trace, evaluations, checkpoints, limits.

It works in the caller's process, and modules tell it what they have done: nobody waits for it. Rows
are written for whole groups (:mod:`gruppetto.runs.decoupled.groups`), and a network version is
evaluated and saved from the snapshots that every module handed in when it had that version.
"""

from __future__ import annotations

import time as clock
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gruppetto.decoupled.schedule import COMPLETED
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.errors import Diverged, TaskError
from gruppetto.protocols.messages import NOT_FINITE, Event, PassFailed, StopRequested
from gruppetto.runs.decoupled.checkpoints import pack_snapshots
from gruppetto.runs.decoupled.ending import (
    FAILED,
    Memory,
    divergence_of,
    failure_of,
    summarise,
)
from gruppetto.runs.decoupled.evaluation import Evaluation
from gruppetto.runs.decoupled.groups import Group, Groups
from gruppetto.runs.decoupled.parts import DecoupledParts, Mark
from gruppetto.runs.decoupled.saved import Saved
from gruppetto.runs.decoupled.tally import Tally
from gruppetto.runs.divergence import last_metrics
from gruppetto.runs.evaluation import Due, Metrics, evaluation_failed
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.journal import TARGET, Listener
from gruppetto.runs.progress import Progress
from gruppetto.trace import (
    EndRow,
    EvaluationRow,
    FailureRow,
    ModuleRow,
    Row,
    TraceWriter,
    UpdateRow,
)

__all__ = ["CALLBACK", "Collector"]

CALLBACK = "callback"


class Collector:
    """Records a run in its folder.

    Args:
        parts: of the run.
        folder: where checkpoints go.
        writer: of the trace.
        progress: shown while the run goes on.
        on_event: told every row.
        evaluation: where and when versions are evaluated.
        request_stop: ends the run, with a reason.
        saved: where an interrupted run was that goes on now.
    """

    def __init__(
        self,
        parts: DecoupledParts,
        folder: RunFolder,
        writer: TraceWriter,
        progress: Progress,
        on_event: Listener | None,
        evaluation: Evaluation,
        request_stop: Callable[[str], object],
        saved: Saved | None = None,
    ) -> None:
        self._parts = parts
        self.folder = folder
        self._writer = writer
        self._progress = progress
        self._on_event = on_event
        self._evaluation = evaluation
        evaluation.done = self._evaluated
        self._request_stop = request_stop
        self.tally = Tally(parts) if saved is None else saved.tally
        self._groups = Groups(parts.schedule, self.tally.version)
        self.evaluations: list[EvaluationRow] = []
        self.target_reached_at: float | None = None
        self.train_loss: float | None = None
        #: Version -> module -> what it handed in.
        self._handed: defaultdict[int, dict[int, Snapshot]] = defaultdict(dict)
        #: Module -> its newest snapshot with state.
        self.newest: dict[int, Snapshot] = {}
        #: A version whose snapshots must be here before rows of later ones are written.
        self._marked: int | None = None
        self._failure: tuple[PassFailed, float, str] | None = None
        self._divergence: dict[str, Any] | None = None
        self._loss_sum, self._loss_samples = 0.0, 0
        self._last_submitted = self._last_saved = -1
        self._started, self._wall_before = clock.perf_counter(), 0.0
        if saved is not None:
            self._go_on(saved)

    def _go_on(self, saved: Saved) -> None:
        self.evaluations = list(saved.evaluations)
        self.newest = dict(saved.snapshots)
        self.train_loss = self.evaluations[-1].train_loss if self.evaluations else None
        plain = saved.plain
        self._loss_sum, self._loss_samples = plain["loss_sum"], plain["loss_samples"]
        self._wall_before = plain["wall_time"]
        tally = self.tally
        self._last_saved = tally.version
        self._last_submitted = self.evaluations[-1].version if self.evaluations else -1
        self._progress.advance(tally.samples, tally.version, tally.time)
        if plain["evaluation_due"] is not None:
            self._submit(Due(**plain["evaluation_due"]), saved.snapshots)
        target = self._parts.target
        reached = [e for e in self.evaluations if target and target.is_reached(e.metrics)]
        if reached:
            self.target_reached_at = reached[0].time
            if reached[-1] is self.evaluations[-1]:
                self._request_stop(TARGET)

    @property
    def wall_time(self) -> float:
        """Seconds of this machine's clock, those of an interrupted run's first part included."""
        return self._wall_before + clock.perf_counter() - self._started

    # ------------------------------------------------------- while it goes on

    def marks(self, version: int) -> Mark:
        """What every module hands in when it has a version; besides, its state when it ends."""
        return self._parts.marks(version)

    def take(
        self, event: Event, time: float, row: ModuleRow | None = None, traceback: str = ""
    ) -> None:
        """An event of any module; those of one module come in order.

        Args:
            event: of a module; what asked the run to stop is written when it has.
            time: run time.
            row: with an update.
            traceback: behind a failed pass, where there is one.
        """
        if isinstance(event, StopRequested):
            return
        if isinstance(event, PassFailed) and self._failure is None:
            self._failure = event, time, traceback
        module: int = event.module  # type: ignore[union-attr]
        self._groups.take(module, event, time, row)
        self._advance()

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """What a module handed in, after the update that made the version."""
        number, version = snapshot.module, snapshot.version
        if snapshot.plain:
            self.newest[number] = snapshot
        is_due = version > self.tally.version or version == self._marked
        is_better = bool(snapshot.plain) or number not in self._handed.get(version, {})
        if is_due and is_better and self.marks(version) != "nothing":
            self._handed[version][number] = snapshot
        self._advance()

    def poll(self) -> None:
        """Look whether something goes on that nobody tells of: evaluations elsewhere."""
        self._guarded(self._evaluation.poll)

    def _advance(self) -> None:
        while True:
            if self._marked is not None:
                handed = self._handed[self._marked]
                if len(handed) < self._parts.method.modules:
                    return
                version, self._marked = self._marked, None
                self._after_mark(version, handed)
                for old in [v for v in self._handed if v <= version]:
                    del self._handed[old]
            groups = self._groups.pop()
            if groups is None:
                return
            self._write_groups(groups)

    def _write_groups(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._write_events(group)
        rows = [group.row for group in groups if group.row is not None]
        if not rows:  # all are ready
            self._writer.flush()
            return
        update = self.tally.update(rows)
        self._loss_sum += update.num_samples[0] * update.losses[0]
        self._loss_samples += update.num_samples[0]
        self._write(update)
        self._progress.advance(update.samples, update.version, update.time)
        watch = self.tally.watch
        if watch.is_out_of_range and self._divergence is None:
            self._divergence = divergence_of(self._parts, self.tally, None)
            self._request_stop(Diverged.stopped_by)
        if self.marks(update.version) != "nothing":
            self._marked = update.version

    def _write_events(self, group: Group) -> None:
        for event, time in group.events:
            self._write(self.tally.event(event, time, self.wall_time), is_urgent=False)
        if group.row is not None:
            self.tally.module(group.row)
            self._write(group.row, is_urgent=False)

    def _after_mark(self, version: int, snapshots: dict[int, Snapshot]) -> None:
        if self._parts.evaluates(version):
            self._evaluate(snapshots)
        if self._parts.saves(version):
            self._save(snapshots)

    # -------------------------------------------------------------- evaluating

    def _evaluate(self, snapshots: dict[int, Snapshot]) -> None:
        last = self.tally.last_update
        assert isinstance(last, UpdateRow)
        if self._loss_samples:
            self.train_loss = self._loss_sum / self._loss_samples
            self._loss_sum, self._loss_samples = 0.0, 0
        due = Due(
            version=last.version,
            time=last.time,
            samples=last.samples,
            epoch=last.epoch,
            train_loss=self.train_loss,
        )
        self._submit(due, snapshots)

    def _submit(self, due: Due, snapshots: dict[int, Snapshot]) -> None:
        self._last_submitted = due.version
        self._guarded(lambda: self._evaluation.submit(due, snapshots))

    def _guarded(self, evaluate: Callable[[], None]) -> None:
        try:
            evaluate()
        except TaskError as error:
            waiting = self._evaluation.waiting()
            raise evaluation_failed(
                error, waiting, self._last_submitted, self.folder.path
            ) from error

    def _evaluated(self, due: Due, metrics: Metrics) -> None:
        row = EvaluationRow(**asdict(due), metrics=metrics)
        self.evaluations.append(row)
        self._write(row)
        self._progress.show(row.metrics)
        target = self._parts.target
        if target is not None and target.is_reached(row.metrics):
            if self.target_reached_at is None:
                self.target_reached_at = row.time
            self._request_stop(TARGET)

    # ---------------------------------------------------------- saving, ending

    def _write(self, row: Row, *, is_urgent: bool = True) -> None:
        # Whoever listens must find in the file what it is told.
        self._writer.write(row, is_urgent=is_urgent or self._on_event is not None)
        if self._on_event is not None and self._on_event(row) is True:
            self._request_stop(CALLBACK)

    def _save(self, snapshots: Mapping[int, Snapshot]) -> None:
        # What the checkpoint holds, the trace must tell of.
        self._writer.flush()
        tensors, plain = pack_snapshots(snapshots)
        version = self.tally.version
        due = [d for d in self._evaluation.waiting() if d.version == version]
        self._last_saved = version
        self.folder.save_checkpoint(
            self.tally.num_events - 1,
            tensors,
            {
                **plain,
                "evaluation_due": asdict(due[0]) if due else None,
                "loss_sum": self._loss_sum,
                "loss_samples": self._loss_samples,
                "wall_time": self.wall_time,
            },
        )

    @property
    def is_complete(self) -> bool:
        """Whether every mini-batch of the run has gone its way."""
        return self.tally.version == self._parts.schedule.num_mini_batches

    def conclude(self, reason: str, memory: Memory) -> dict[str, Any]:
        """All modules have ended and handed in their state: sum up, and write the last row.

        Args:
            reason: why they ended.
            memory: of the modules.

        Returns:
            The summary, as ``gruppetto train --json`` prints it.

        Raises:
            RunFailed: the run ended without its goal; its folder holds what there is.
        """
        self._advance()
        failure = None if self._failure is None else self._failure[0]
        if failure is not None:
            reason = self._end_failed()
        elif self._divergence is not None:
            reason = Diverged.stopped_by
        elif self.is_complete:  # asked to stop when nothing was left to do
            reason = COMPLETED
        final = {} if failure is not None else dict(sorted(self.newest.items()))
        if failure is None:
            self._end_at_version(reason, final)
        self._guarded(self._evaluation.finish)
        metrics = last_metrics(self.evaluations, finite=reason == Diverged.stopped_by)
        result = summarise(self._parts, self.tally, final, metrics, memory, self.folder)
        result.update(
            stopped_by=reason,
            diverged=self._divergence,
            train_loss=self.train_loss,
            target_reached_at=self.target_reached_at,
            wall_time=self.wall_time,
        )
        if self._parts.settings.engine != "virtual":
            result["evaluation_time"] = self._evaluation.seconds
        commands = self.tally.commands.hexdigest()
        self._write(EndRow(self.tally.num_events, result, commands))
        updates = self.tally.num_applied
        error = failure_of(reason, self._divergence, failure, updates, self.folder)
        if error is not None:
            error.result = result
            raise error
        return result

    def _end_at_version(self, reason: str, final: dict[int, Snapshot]) -> None:
        has_begun = self.tally.version > 0
        if reason != COMPLETED and has_begun and self._last_saved != self.tally.version:
            # Before the stop, and before what a run that is not stopped would not evaluate.
            self._save(final)
        if reason != COMPLETED:
            stop = StopRequested(reason)
            self._write(self.tally.event(stop, self.tally.time, self.wall_time))
        is_evaluated = self._last_submitted == self.tally.version
        if reason != Diverged.stopped_by and has_begun and not is_evaluated:
            self._evaluate(final)
        if reason == COMPLETED and self._last_saved != self.tally.version:
            self._save(final)

    def _end_failed(self) -> str:
        """Write what the module did whose pass failed, up to there."""
        assert self._failure is not None
        failure, _, traceback = self._failure
        for group in self._groups.rest(failure.module):
            for event, time in group.events:
                self._write(self.tally.event(event, time, self.wall_time), is_urgent=False)
        row = self.tally.num_events - 1
        self._writer.flush()
        if traceback:
            self._write(FailureRow(row, failure.module, failure.mini_batch, traceback))
        if failure.reason != NOT_FINITE:
            return FAILED
        self._divergence = divergence_of(self._parts, self.tally, failure)
        return Diverged.stopped_by
