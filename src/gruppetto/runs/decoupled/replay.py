"""Replay of a decoupled run: run its schedule virtually, and see whether the same comes out.

A trace holds what happened in the order of the network's versions, and nothing else decides on the
numbers: so it is enough to run the columns again, up to the version at which the run ended.
"""

from __future__ import annotations

from typing import Any

from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.errors import InvalidSetting, TraceError
from gruppetto.protocols.messages import Event, PassFailed, StopRequested
from gruppetto.runs.decoupled.ending import divergence_of, summarise
from gruppetto.runs.decoupled.groups import Group, Groups
from gruppetto.runs.decoupled.parts import DecoupledParts, Mark, build_decoupled_parts
from gruppetto.runs.decoupled.settings import DecoupledSettings
from gruppetto.runs.decoupled.tally import Tally
from gruppetto.runs.decoupled.virtual import VirtualRun
from gruppetto.runs.evaluation import finite_or_none
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.parts import prepared_torch
from gruppetto.runs.progress import Progress
from gruppetto.runs.settings import read_settings
from gruppetto.trace import EventRow, ModuleRow, Trace, encode_message, read_trace
from gruppetto.trace.folder import read_config
from gruppetto.training.optimizers import OptimizerFactory, Schedule
from gruppetto.training.task import Task

__all__ = ["replay_decoupled"]

#: What has to be equal, all of it recomputed.
_COMPARED = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
#: What a replay cannot tell, because it is about clocks.
_RECORDED = (
    "stopped_by",
    "engine",
    "time",
    "train_loss",
    "target_reached_at",
    "wall_time",
    "mean_update_time",
    "expected_update_time",
    "evaluation_time",
    "per_module",
    "cores",
    "mini_batches_left",
)


class _Comparison:
    """Takes what a run does, as a collector does, and compares it with what another one did."""

    def __init__(self, parts: DecoupledParts, trace: Trace, bar: Progress) -> None:
        self.tally = Tally(parts)
        self._groups = Groups(parts.schedule)
        self._recorded = trace.events
        self._num_updates = len(trace.updates)
        self._bar = bar
        self.newest: dict[int, Snapshot] = {}
        self.failure: PassFailed | None = None
        #: The first event row that differs, in words.
        self.difference: str | None = None

    def marks(self, version: int) -> Mark:
        """Only the end is of interest."""
        return "nothing"

    def take(
        self, event: Event, time: float, row: ModuleRow | None = None, traceback: str = ""
    ) -> None:
        """The next event of a module."""
        if isinstance(event, StopRequested):
            return
        if isinstance(event, PassFailed):
            self.failure = event
        self._groups.take(event.module, event, time, row)  # type: ignore[union-attr]
        while (groups := self._groups.pop()) is not None:
            self._count(groups)

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """A module at its end."""
        self.newest[snapshot.module] = snapshot

    def _count(self, groups: list[Group]) -> None:
        # Beyond, where a pass failed, rows are of one module only.
        is_compared = self.tally.version < self._num_updates or not self.tally.num_events
        for group in groups:
            for event, time in group.events:
                self.event(event, time, is_compared)
            if group.row is not None:
                self.tally.module(group.row)
        rows = [group.row for group in groups if group.row is not None]
        if rows:
            update = self.tally.update(rows)
            self._bar.advance(update.samples, update.version, update.time)

    def event(self, event: Event, time: float, is_compared: bool = False) -> None:
        """Count an event in, and compare it."""
        number = self.tally.num_events
        made = self.tally.event(event, time, 0.0)
        if not is_compared or self.difference is not None or number >= len(self._recorded):
            return
        row = self._recorded[number]
        if row.type != made.type or bytes(row.event) != encode_message(event):
            self.difference = f"event row {number} was {_shown(row)} and is {_shown(made)} now"

    def end_failed(self) -> None:
        """Count what the module did whose pass failed, up to there."""
        assert self.failure is not None
        for group in self._groups.rest(self.failure.module):
            for event, time in group.events:
                self.event(event, time)


def replay_decoupled(
    folder: RunFolder,
    *,
    task: Task | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Schedule | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Run a recorded run's schedule in virtual time; see :func:`gruppetto.replay`.

    Where a pass failed, how far the other modules were is a matter of clocks: then the same pass
    has to fail, and what all modules had done before to be the same.

    Raises:
        UsageError: a run that did not end, or one that needs other threads.
    """
    from gruppetto.runs.start import recall

    settings = read_settings(DecoupledSettings, read_config(folder.path).settings)
    trace = read_trace(folder.trace)
    if trace.end is None:
        raise TraceError(
            f"{folder.path} did not end (killed or still running); resume it, then replay it"
        )
    recorded = trace.end.result
    if recorded["threads"] != settings.threads:
        raise InvalidSetting(
            f"{folder.path} ran with {recorded['threads']} threads and its settings say "
            f"{settings.threads}"
        )
    with prepared_torch(settings):
        ingredients = recall(folder, settings, task, optimizer, schedule)
        parts = build_decoupled_parts(_as_recorded(settings, trace), ingredients, is_checked=True)
        bar = Progress(f"replay {settings.decouple}", recorded["samples"], progress)
        with bar:
            made = _run_again(parts, trace, bar)
        version = made.tally.version
        metrics: dict[str, float | None] = {}
        is_evaluated = bool(trace.evaluations) and trace.evaluations[-1].version == version
        final = {} if made.failure is not None else dict(sorted(made.newest.items()))
        if is_evaluated and final:
            metrics = finite_or_none(parts.evaluate(version, final))
        result = summarise(parts, made.tally, final, metrics, {}, folder)
    if recorded.get("diverged") is not None:
        result["diverged"] = divergence_of(parts, made.tally, made.failure)
    for key in _RECORDED:
        if key in recorded:
            result[key] = recorded[key]
    said = _differences(made, trace, result)
    result["matches"] = not said
    result["difference"] = "; ".join(said) or None
    return result


def _as_recorded(settings: DecoupledSettings, trace: Trace) -> DecoupledSettings:
    """The settings of a run that ends where the recorded one did, and of itself."""
    has_stopped = any(row.type == "StopRequested" for row in trace.events[-1:])
    version = trace.updates[-1].version if has_stopped and trace.updates else None
    changed = {"engine": "virtual", "max_time": None, "target": None, "updates": version}
    return settings.model_copy(update=changed)


def _run_again(parts: DecoupledParts, trace: Trace, bar: Progress) -> _Comparison:
    made = _Comparison(parts, trace, bar)
    stops = [row for row in trace.events if row.type == "StopRequested"]
    run = VirtualRun(parts, None)
    if stops and not trace.updates:  # before anything was applied
        run.request_stop("nothing")
    run.run(made)
    if made.failure is not None:
        made.end_failed()
    elif stops:
        made.event(stops[-1].decode(), made.tally.time)
    return made


def _differences(made: _Comparison, trace: Trace, result: dict[str, Any]) -> list[str]:
    assert trace.end is not None
    recorded = trace.end.result
    failures = [row for row in trace.events if row.type == "PassFailed"]
    if made.failure is not None or failures:
        was = failures[-1].decode() if failures else None
        if was == made.failure and made.difference is None:
            return []
        return [f"the failed pass was {was} and is {made.failure} now"]
    different = [key for key in _COMPARED if result[key] != recorded[key]]
    said = [] if made.difference is None else [made.difference]
    if different:
        said.append(f"{', '.join(different)} differ from the recorded run")
    return said


def _shown(row: EventRow) -> str:
    return f"{row.type} {bytes(row.event).decode()}"
