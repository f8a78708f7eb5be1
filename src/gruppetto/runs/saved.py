"""Where an interrupted run was: its newest checkpoint, and what the trace tells up to there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gruppetto.errors import InvalidSetting, RunFolderError
from gruppetto.protocols.messages import Command, Event, LearnerJoined, LearnerLost
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.parts import Parts
from gruppetto.trace import EvaluationRow, GammaRow, read_trace

__all__ = ["Saved", "check_limits", "read_saved"]


@dataclass(frozen=True)
class Saved:
    """An interrupted run, up to the event row that it continues after."""

    row: int
    #: What the checkpoint holds: tensors by name, and JSON values.
    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    #: (run time, event, commands), in order.
    history: list[tuple[float, Event, list[Command]]]
    evaluations: list[EvaluationRow]
    gammas: list[GammaRow]

    @property
    def time(self) -> float:
        """Run time of the last event."""
        return self.history[-1][0] if self.history else 0.0

    def joined(self) -> list[int]:
        """Every learner that has ever joined."""
        return [e.learner for _, e, _ in self.history if isinstance(e, LearnerJoined)]

    def alive(self, parts: Parts) -> list[int]:
        """Learners that had joined or were expected, and were not lost; computing ones last.

        A learner that is lost while others are idle hands its mini-batch to one of them, which is
        lost next: in this order each mini-batch changes hands once.
        """
        learners = set(range(parts.settings.learners)) | set(self.joined())
        learners -= {e.learner for _, e, _ in self.history if isinstance(e, LearnerLost)}
        computing = {lease.learner for lease in parts.coordinator.ledger.leased.values()}
        return sorted(learners, key=lambda learner: (learner in computing, learner))


def read_saved(
    folder: RunFolder, checkpoint: tuple[int, dict[str, Tensor], dict[str, Any]], parts: Parts
) -> Saved:
    """Bring fresh parts to where a run's checkpoint was made.

    Args:
        folder: of the run.
        checkpoint: as :meth:`RunFolder.load_checkpoint` gives it.
        parts: of the run; changed.

    Raises:
        RunFolderError: the run is complete.
    """
    row, tensors, plain = checkpoint
    trace = read_trace(folder.trace, up_to=row)
    events = [(r.time, r.decode()) for r in trace.events]
    history = [(time, event, parts.coordinator.handle(event)) for time, event in events]
    if parts.coordinator.finished is not None:
        raise RunFolderError(f"{folder.path} is complete ({parts.coordinator.finished})")
    parts.server.load(tensors, plain["server"])
    return Saved(row, tensors, plain, history, trace.evaluations, trace.gammas)


def check_limits(
    given: Mapping[str, Any], recorded: Mapping[str, Any], *, updates: int, time: float
) -> None:
    """Refuse to go on to where a run has been already; its own limits are no such wish.

    Args:
        given: limits to resume with, those that are.
        recorded: settings of the run.
        updates: that it has made.
        time: run time of its last event, in seconds.

    Raises:
        InvalidSetting: a new limit is behind it.
    """
    new = {key: limit for key, limit in given.items() if limit != recorded.get(key)}
    if new.get("updates", updates) < updates:
        raise InvalidSetting(
            f"updates: the run has made {updates} already; expected more, got {new['updates']}"
        )
    if new.get("max_time", time) < time:
        raise InvalidSetting(
            f"max_time: the run has taken {time:.6g} s of run time already; expected more, "
            f"got {new['max_time']:g}"
        )
