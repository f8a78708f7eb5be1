"""``gp.replay``: feed a run's events again and see whether the same weights come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gruppetto.engines.replay import ReplayEngine
from gruppetto.errors import (
    ImpossibleEvent,
    InvalidSetting,
    ReplayMismatch,
    TaskError,
    TraceError,
)
from gruppetto.protocols.messages import (
    ApplyUpdate,
    Command,
    Event,
)
from gruppetto.runs.evaluation import evaluate_version, finite_or_none
from gruppetto.runs.execute import summarise
from gruppetto.runs.folder import RunFolder, versions_here
from gruppetto.runs.journal import Tally
from gruppetto.runs.measuring import progress_loss
from gruppetto.runs.parts import build_parts, prepared_torch
from gruppetto.runs.progress import Progress
from gruppetto.runs.start import recall
from gruppetto.trace import EventRow, Trace, encode_message, read_trace
from gruppetto.trace.folder import read_config
from gruppetto.training.optimizers import OptimizerFactory, Schedule
from gruppetto.training.task import Task

__all__ = ["COMPARED", "replay"]

#: What has to be equal, all of it recomputed.
COMPARED = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
#: What a replay cannot tell, because it is about clocks.
_RECORDED = (
    "train_loss",
    "target_reached_at",
    "wall_time",
    "mean_update_time",
    "expected_update_time",
    "evaluation_time",
    "learners_restarted",
    "gamma",
)


class _ReplayJournal:
    """Counts and hashes, and writes nothing."""

    def __init__(
        self, tally: Tally, rows: Sequence[EventRow], advance: Callable[..., None]
    ) -> None:
        self._tally = tally
        self._rows = rows
        self._advance = advance
        #: The first row whose commands differ from the recorded ones.
        self.first_difference: int | None = None

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        row = self._tally.num_events
        self._tally.count(event, commands, time, encode_message(event))
        same = self._tally.commands.hexdigest()[:16] == self._rows[row].commands
        if not same and self.first_difference is None:
            self.first_difference = row

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        for command in commands:
            if isinstance(command, ApplyUpdate):
                self._tally.settle(command)
                coordinator = self._tally.coordinator
                self._advance(coordinator.num_samples_applied, command.version, time)


def replay(
    run: str | Path,
    *,
    task: Task | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Schedule | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Re-feed the event rows of a run, whichever engine made it, and recompute everything else.

    Args:
        run: its folder.
        task, optimizer, schedule: as given to the run, where they were objects.
        progress: show a bar on standard error.

    Returns:
        The JSON summary of the run as it comes out now (``train_loss``, ``target_reached_at`` and
        ``wall_time`` as recorded), with ``matches``: whether every loss is the recorded one and
        weights, state, events and commands have the recorded hashes; and ``difference``, in words.

    Raises:
        UsageError: no run there, one that did not end, or one that needs other threads.
    """
    folder = RunFolder.open(run)
    if "decouple" in read_config(folder.path).settings:
        from gruppetto.runs.decoupled.replay import replay_decoupled

        return replay_decoupled(
            folder, task=task, optimizer=optimizer, schedule=schedule, progress=progress
        )
    settings = folder.settings()
    trace = read_trace(folder.trace)
    if trace.end is None:
        raise TraceError(f"{run} did not end (killed or still running); resume it, then replay it")
    recorded = trace.end.result
    if recorded["threads"] != settings.threads:
        raise InvalidSetting(
            f"{run} ran with {recorded['threads']} threads and its settings say {settings.threads}"
        )
    with prepared_torch(settings):
        parts = build_parts(settings, recall(folder, settings, task, optimizer, schedule))
        tally = Tally(parts.coordinator)
        total = recorded["samples"]
        bar = Progress(f"replay {settings.protocol}", total, progress)
        journal = _ReplayJournal(tally, trace.events, bar.advance)
        engine: ReplayEngine | None = None
        error: str | None = None
        with bar:
            try:
                measure = progress_loss(parts)
                engine = ReplayEngine(parts.server, parts.learner, _events(trace), measure)
                engine.run(parts.coordinator, journal)
            except (ImpossibleEvent, ReplayMismatch, TaskError) as impossible:
                error = str(impossible)
        metrics: dict[str, float | None] = {}
        version = parts.coordinator.version
        if trace.evaluations and trace.evaluations[-1].version == version and error is None:
            metrics = finite_or_none(evaluate_version(parts, version))
        result = summarise(parts, tally, metrics, folder)
    for key in _RECORDED:
        result[key] = recorded.get(key)
    reasons = [error, None if engine is None else engine.first_difference]
    different = [key for key in COMPARED if result[key] != recorded[key]]
    if different:
        reasons.append(f"{', '.join(different)} differ from the recorded run")
        if journal.first_difference is not None:
            reasons.append(f"commands differ from event row {journal.first_difference} on")
        elif error is None:
            reasons.append(
                "the decisions are the same and the numbers are not: is the task's data, model "
                "or loss different each time it is loaded?"
            )
    said = [reason for reason in reasons if reason is not None]
    result["matches"] = not said
    if said and (others := _other_versions(folder)):
        said.append(f"recorded with {others}")
    result["difference"] = "; ".join(said) or None
    return result


def _events(trace: Trace) -> list[tuple[float, Event]]:
    try:
        return [(row.time, row.decode()) for row in trace.events]
    except (msgspec.DecodeError, KeyError) as error:
        raise ReplayMismatch(f"the trace has a row that is no event: {error}") from None


def _other_versions(folder: RunFolder) -> str:
    here = versions_here()
    return ", ".join(
        f"{name} {value} (here {here.get(name)})"
        for name, value in folder.versions().items()
        if here.get(name) != value
    )
