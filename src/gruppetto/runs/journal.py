"""What is kept of a run while it goes on: trace, evaluations, checkpoints, limits, progress.

Rows are written in this order: the event before anything of it is carried out; then its update,
its failure, its evaluation. Only events are the truth; everything else is derived.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import msgspec
from torch import Tensor

from gruppetto.engines.base import Engine
from gruppetto.errors import TaskError
from gruppetto.protocols import Coordinator
from gruppetto.protocols.account import Account
from gruppetto.protocols.coordinator import DIVERGED, EPOCHS, GIVEN_UP
from gruppetto.protocols.messages import (
    TOO_STALE,
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Discard,
    Event,
    Finish,
    GradientFailed,
    GradientPushed,
    LearnerLost,
    StopRequested,
)
from gruppetto.runs.evaluation import Due, Evaluation, Metrics, evaluation_failed
from gruppetto.runs.expected import RoundTimes
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.parts import Parts, crosses
from gruppetto.runs.progress import Progress
from gruppetto.trace import (
    EndRow,
    EvaluationRow,
    EventRow,
    FailureRow,
    GammaRow,
    MessageDigest,
    Row,
    TraceWriter,
    UpdateRow,
    encode_message,
)

__all__ = ["TARGET", "UPDATES", "Journal", "Listener", "Tally"]

TARGET = "target"
UPDATES = "updates"
_ENDED_ITSELF = (EPOCHS, DIVERGED, GIVEN_UP)

#: Called with every row after it is written; True asks for a stop.
Listener: TypeAlias = Callable[[Row], object]
#: What a checkpoint holds of an engine: tensors, and JSON values.
EngineState: TypeAlias = Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]


class Tally:
    """The numbers of a run that follow from its events alone, and their hashes."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.events = MessageDigest()
        self.commands = MessageDigest()
        self.account = Account()
        self.num_events = 0
        self.time = 0.0
        #: lease -> (learner, mini-batch) while it is open or held.
        self.work: dict[int, tuple[int, int]] = {}
        self._losses: dict[int, float] = {}
        #: (learner, mini-batch) of the newest failure; None if that came too late to matter.
        self.last_failed: tuple[int, int] | None = None

    def count(self, event: Event, commands: Sequence[Command], time: float, encoded: bytes) -> None:
        """Take one event and its commands in."""
        self.time = time
        self.num_events += 1
        self.events.add(event, encoded)
        self.account.count(event, commands)
        for command in commands:
            self.commands.add(command)
        if isinstance(event, GradientPushed) and event.lease in self.work:
            self._losses.setdefault(event.lease, event.loss)
        elif isinstance(event, GradientFailed):
            # Of a lease whose push is held it is a late report, and its work still counts.
            is_late = event.lease in self._losses
            self.last_failed = None if is_late else self.work.pop(event.lease, None)
        elif isinstance(event, LearnerLost):
            held = self._losses
            self.work = {k: w for k, w in self.work.items() if w[0] != event.learner or k in held}
        for command in commands:
            if isinstance(command, Compute):
                self.work[command.lease] = (command.learner, command.mini_batch)
            elif isinstance(command, Cancel):
                self.work.pop(command.lease, None)
            elif isinstance(command, Discard) and command.reason == TOO_STALE:
                del self.work[command.lease], self._losses[command.lease]

    def settle(self, update: ApplyUpdate) -> tuple[list[int], list[float]]:
        """Learner and loss of each contribution; they are forgotten."""
        leases = [c.lease for c in update.contributions]
        learners = [self.work.pop(lease)[0] for lease in leases]
        return learners, [self._losses.pop(lease) for lease in leases]


class Journal:
    """Records a run in its folder.

    Args:
        parts: of the run.
        engine: asked to stop when a limit is reached.
        folder: where checkpoints go.
        writer: of the trace.
        progress: shown while the run goes on.
        on_event: told every row.
        evaluation: where and when versions are evaluated.
        engine_state: of the engine, for checkpoints.
    """

    def __init__(
        self,
        parts: Parts,
        engine: Engine,
        folder: RunFolder,
        writer: TraceWriter,
        progress: Progress,
        on_event: Listener | None,
        evaluation: Evaluation,
        engine_state: EngineState,
    ) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._engine = engine
        self._folder = folder
        self._writer = writer
        self._progress = progress
        self._on_event = on_event
        self._evaluation = evaluation
        evaluation.done = self._evaluated
        self._engine_state = engine_state
        self.tally = Tally(parts.coordinator)
        self.rounds = RoundTimes.of(parts)
        self.evaluations: list[EvaluationRow] = []
        self.gammas: list[GammaRow] = []
        self.target_reached_at: float | None = None
        self.train_loss: float | None = None
        self._loss_sum = 0.0
        self._loss_samples = 0
        self._last_submitted = -1
        self._published_at = 0.0
        self._started = clock.perf_counter()
        self._wall_before = 0.0

    # ------------------------------------------------------- while it goes on

    @property
    def wall_time(self) -> float:
        """Seconds of this machine's clock, those of an interrupted run's first part included."""
        return self._wall_before + clock.perf_counter() - self._started

    @property
    def evaluation_time(self) -> float:
        """Seconds that evaluations took."""
        return self._evaluation.seconds

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """Write the event row; before a stop, a checkpoint that a resumed run continues from."""
        if isinstance(event, StopRequested) and self.tally.num_events:
            self._save_checkpoint()
        encoded = encode_message(event)
        row = self.tally.num_events
        self.tally.count(event, commands, time, encoded)
        self._write(
            EventRow(
                row,
                time,
                self.wall_time,
                type(event).__name__,
                msgspec.Raw(encoded),
                self.tally.commands.hexdigest()[:16],
            )
        )

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """Write what followed; evaluate, save and look at limits where it is time to."""
        if self.rounds is not None:
            self.rounds.take(event, commands)
        if isinstance(event, GradientFailed):
            self._write_failure(event)
        self._write_work()
        ends_epoch = False
        for command in commands:
            if isinstance(command, ApplyUpdate):
                self._after_update(command, time)
                ends_epoch = self._crosses(command, 1.0)
            elif isinstance(command, Finish):
                self._after_finish(command.reason)
                return
        if ends_epoch:
            self._save_checkpoint()

    @property
    def _samples(self) -> int:
        """Applied so far."""
        return self._parts.coordinator.num_samples_applied

    @property
    def _epoch(self) -> float:
        return self._samples / self._parts.mini_batches.samples_per_epoch

    def _crosses(self, update: ApplyUpdate, epochs: float) -> bool:
        """Whether the update just applied crossed a multiple of so many epochs."""
        every = epochs * self._parts.mini_batches.samples_per_epoch
        return crosses(self._samples, update.contributions, every)

    def _after_update(self, update: ApplyUpdate, time: float) -> None:
        coordinator = self._parts.coordinator
        applied = self._parts.server.last_update
        learners, losses = self.tally.settle(update)
        num_samples = [c.num_samples for c in update.contributions]
        self._published_at = time
        self._loss_sum += sum(n * x for n, x in zip(num_samples, losses, strict=True))
        self._loss_samples += sum(num_samples)
        self._write(
            UpdateRow(
                version=update.version,
                time=time,
                samples=self._samples,
                epoch=self._epoch,
                learning_rate=applied.learning_rate,
                staleness=[c.staleness for c in update.contributions],
                num_samples=num_samples,
                factors=list(applied.factors),
                learners=learners,
                losses=losses,
                applied=coordinator.ledger.num_applied,
                cancelled=coordinator.num_cancelled,
                discarded=coordinator.num_discarded,
                given_up=coordinator.ledger.num_given_up,
                dropped=coordinator.ledger.num_dropped,
                effective_rate=applied.effective_rate,
            ),
            is_urgent=False,
        )
        self._write_gamma(update, time)
        if self._crosses(update, self._settings.evaluate_every):
            self._evaluate()
        self._progress.advance(self._samples, update.version, time)
        if self._settings.updates is not None and update.version >= self._settings.updates:
            self._engine.request_stop(UPDATES)

    def _after_finish(self, reason: str) -> None:
        version = self._parts.coordinator.version
        if reason != DIVERGED and version > 0 and version != self._last_submitted:
            self._evaluate()
        # Before evaluations that may take long: what has been trained is safe.
        if reason in _ENDED_ITSELF:
            self._save_checkpoint()
        self._guarded(self._evaluation.finish)

    def _evaluate(self) -> None:
        if self._loss_samples:
            self.train_loss = self._loss_sum / self._loss_samples
            self._loss_sum, self._loss_samples = 0.0, 0
        self._submit(
            Due(
                version=self._parts.coordinator.version,
                time=self._published_at,
                samples=self._samples,
                epoch=self._epoch,
                train_loss=self.train_loss,
            )
        )

    def _submit(self, due: Due) -> None:
        self._last_submitted = due.version
        self._guarded(lambda: self._evaluation.submit(due))

    def take_evaluation(self, collect: Callable[[], None]) -> None:
        """Let an evaluation that goes on elsewhere give its result."""
        self._guarded(collect)

    def _guarded(self, evaluate: Callable[[], None]) -> None:
        try:
            evaluate()
        except TaskError as error:
            waiting = self._evaluation.waiting()
            raise evaluation_failed(
                error, waiting, self._last_submitted, self._folder.path
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
            self._engine.request_stop(TARGET)

    def _write_gamma(self, update: ApplyUpdate, time: float) -> None:
        gamma = self._parts.gamma
        measured = None if gamma is None else gamma.take()
        if measured is None:
            return
        staleness = [c.staleness for c in update.contributions]
        changes = list(measured.changes)
        row = GammaRow(update.version, time, staleness, changes, measured.norm)
        self.gammas.append(row)
        self._write(row, is_urgent=False)

    def _write_work(self) -> None:
        for row in self._engine.work:
            self._write(row, is_urgent=False)
        self._engine.work.clear()

    def _write_failure(self, event: GradientFailed) -> None:
        text = self._engine.tracebacks.pop(event.lease, "")
        if text and self.tally.last_failed is not None:
            learner, mini_batch = self.tally.last_failed
            self._write(FailureRow(self.tally.num_events - 1, learner, mini_batch, text))
            self._progress.warn(
                f"mini-batch {mini_batch} failed on learner {learner}: {event.reason}"
            )

    def _write(self, row: Row, *, is_urgent: bool = True) -> None:
        # Whoever listens must find in the file what it is told.
        self._writer.write(row, is_urgent=is_urgent or self._on_event is not None)
        if self._on_event is not None and self._on_event(row) is True:
            self._engine.request_stop("callback")

    # ---------------------------------------------------------- saving, ending

    def _save_checkpoint(self) -> None:
        """A checkpoint after the last event row carried out."""
        # What the checkpoint holds, the trace must tell of.
        self._writer.flush()
        tensors, plain = self._parts.server.state()
        more, engine = self._engine_state()
        newest = self._parts.coordinator.version
        due = [d for d in self._evaluation.waiting() if d.version == newest]
        self._folder.save_checkpoint(
            self.tally.num_events - 1,
            {**tensors, **more},
            {
                "server": plain,
                **engine,
                "newest": newest,
                "evaluation_due": asdict(due[0]) if due else None,
                "loss_sum": self._loss_sum,
                "loss_samples": self._loss_samples,
                "rounds": None if self.rounds is None else self.rounds.state(),
                "wall_time": self.wall_time,
            },
        )

    def resume(
        self,
        history: Sequence[tuple[float, Event, Sequence[Command]]],
        evaluations: Sequence[EvaluationRow],
        gammas: Sequence[GammaRow],
        saved: dict[str, Any],
    ) -> None:
        """Bring a fresh journal to where an interrupted one was."""
        if self.rounds is not None:
            self.rounds.restore(saved, [event for _, event, _ in history])
        for time, event, commands in history:
            self.tally.count(event, commands, time, encode_message(event))
            for command in commands:
                if isinstance(command, ApplyUpdate):
                    self.tally.settle(command)
                    self._published_at = time
        self.evaluations, self.gammas = list(evaluations), list(gammas)
        self.train_loss = evaluations[-1].train_loss if evaluations else None
        self._loss_sum, self._loss_samples = saved["loss_sum"], saved["loss_samples"]
        self._wall_before = saved["wall_time"]
        version = self._parts.coordinator.version
        self._progress.advance(self._samples, version, self._published_at)
        self._last_submitted = evaluations[-1].version if evaluations else -1
        if saved["evaluation_due"] is not None:
            self._submit(Due(**saved["evaluation_due"]))
        if self._settings.updates is not None and version >= self._settings.updates:
            self._engine.request_stop(UPDATES)
        target = self._parts.target
        reached = [e for e in evaluations if target is not None and target.is_reached(e.metrics)]
        if reached:
            self.target_reached_at = reached[0].time
            if reached[-1] is evaluations[-1]:
                self._engine.request_stop(TARGET)

    def end(self, result: dict[str, Any]) -> None:
        """Write the last row."""
        self._write(EndRow(self.tally.num_events, result, self.tally.commands.hexdigest()))
