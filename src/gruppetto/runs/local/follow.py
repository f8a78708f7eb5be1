"""Reading a trace while another process writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gruppetto.runs.progress import Progress
from gruppetto.trace import EvaluationRow, FailureRow, Row, SegmentRow, UpdateRow
from gruppetto.trace.rows import decode_row

__all__ = ["Follower"]


class Follower:
    """The rows of one segment as they appear.

    Args:
        path: of the segment; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def rows(self) -> Iterator[Row]:
        """Whole rows written since the last call, without the one that opens the segment."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            row = decode_row(line)
            if not isinstance(row, SegmentRow):
                yield row

    @staticmethod
    def show(row: Row, bar: Progress) -> None:
        """Tell a progress bar what a row says."""
        match row:
            case UpdateRow():
                bar.advance(row.samples, row.version, row.time)
            case EvaluationRow():
                bar.show(row.metrics)
            case FailureRow():
                reason = row.traceback.strip().splitlines()[-1]
                bar.warn(f"mini-batch {row.mini_batch} failed on learner {row.learner}: {reason}")
            case _:
                pass
