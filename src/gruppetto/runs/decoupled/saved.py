"""Where an interrupted decoupled run was: its newest checkpoint, and the trace up to there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gruppetto.decoupled.schedule import COMPLETED
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.errors import RunFolderError
from gruppetto.runs.decoupled.checkpoints import unpack_snapshots
from gruppetto.runs.decoupled.parts import DecoupledParts
from gruppetto.runs.decoupled.tally import Tally
from gruppetto.runs.folder import RunFolder
from gruppetto.trace import EvaluationRow, EventRow, ModuleRow, UpdateRow, follow_rows

__all__ = ["Saved", "read_saved"]


@dataclass(frozen=True)
class Saved:
    """An interrupted run, up to the event row that it continues after."""

    row: int
    #: Module -> what it was, with state; all of one version.
    snapshots: dict[int, Snapshot]
    #: JSON values of the checkpoint.
    plain: dict[str, Any]
    #: Of the rows up to there.
    tally: Tally
    evaluations: list[EvaluationRow]

    @property
    def version(self) -> int:
        """Of all modules."""
        return self.tally.version

    @property
    def time(self) -> float:
        """Run time of the last event."""
        return self.tally.time


def read_saved(folder: RunFolder, parts: DecoupledParts) -> Saved:
    """What a run goes on from.

    Args:
        folder: of the run.
        parts: of the run; not changed.

    Raises:
        RunFolderError: there is no checkpoint, or the run is complete.
    """
    row, tensors, plain = folder.load_checkpoint()
    tally = Tally(parts)
    evaluations = []
    for each in follow_rows(folder.trace, up_to=row):
        match each:
            case EventRow():
                tally.event(each.decode(), each.time, each.wall_time)
            case ModuleRow():
                tally.module(each)
            case UpdateRow():
                tally.updated(each)
            case EvaluationRow():
                evaluations.append(each)
            case _:
                pass
    if tally.version == parts.schedule.num_mini_batches:
        raise RunFolderError(f"{folder.path} is complete ({COMPLETED})")
    return Saved(row, unpack_snapshots(tensors, plain), plain, tally, evaluations)
