"""Where a trace lies and how it is written and read: ``RUN/trace/000.jsonl``, ``001.jsonl``, ...

A row is handed to the operating system in one piece before its effect is published, so a trace
can be read after kill -9; a last row cut short by a crash of the machine is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gruppetto.errors import TraceError
from gruppetto.trace.rows import (
    FORMAT,
    EndRow,
    EvaluationRow,
    EventRow,
    FailureRow,
    GammaRow,
    ModuleRow,
    Row,
    SegmentRow,
    UpdateRow,
    WorkRow,
    decode_row,
    encode_row,
)

__all__ = ["Trace", "TraceWriter", "follow_rows", "read_trace", "segment_files"]


def segment_files(folder: Path) -> list[Path]:
    """The segment files of a trace folder, in order."""
    return sorted(folder.glob("[0-9][0-9][0-9].jsonl"))


class TraceWriter:
    """Appends rows to a new segment.

    Args:
        folder: the trace folder; made if missing.
        continues_after: event row this segment continues after, when a run is resumed.
    """

    def __init__(self, folder: Path, continues_after: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(segment_files(folder))
        self.path = folder / f"{number:03d}.jsonl"
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._waiting = b""
        self.write(SegmentRow(FORMAT, number, continues_after))

    def write(self, row: Row, *, is_urgent: bool = True) -> None:
        """Append one row; it survives this process from here on.

        A row that is not urgent (a derived one) is written together with the next that is.
        """
        self._waiting += encode_row(row)
        if is_urgent:
            self.flush()

    def flush(self) -> None:
        """Append what is waiting for an urgent row."""
        line = memoryview(self._waiting)
        self._waiting = b""
        while line:  # a nearly full disk writes short before it refuses
            line = line[os.write(self._descriptor, line) :]

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._descriptor >= 0:
            self.flush()
            os.close(self._descriptor)
            self._descriptor = -1


class Trace:
    """A trace in memory: the rows that hold, sorted by kind, in order."""

    def __init__(self) -> None:
        self.events: list[EventRow] = []
        self.updates: list[UpdateRow] = []
        self.evaluations: list[EvaluationRow] = []
        self.failures: list[FailureRow] = []
        #: Where γ was measured only.
        self.gammas: list[GammaRow] = []
        #: Of engines with real processes only.
        self.work: list[WorkRow] = []
        #: Of decoupled backpropagation only.
        self.modules: list[ModuleRow] = []
        #: None when the run was killed, or is running.
        self.end: EndRow | None = None

    def add(self, row: Row) -> None:
        """Take one row in."""
        match row:
            case EventRow():
                self.events.append(row)
            case UpdateRow():
                self.updates.append(row)
            case EvaluationRow():
                self.evaluations.append(row)
            case GammaRow():
                self.gammas.append(row)
            case FailureRow():
                self.failures.append(row)
            case WorkRow():
                self.work.append(row)
            case ModuleRow():
                self.modules.append(row)
            case EndRow():
                self.end = row
            case SegmentRow():
                pass


def _rows(path: Path) -> Iterator[Row]:
    lines = path.read_bytes().split(b"\n")
    # Complete files end in a newline; what follows the last one is a row cut short.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = decode_row(line)
        except msgspec.DecodeError as error:
            if number == len(lines) - 1 and not lines[-1] and number > 1:
                return
            raise TraceError(
                f"{path}, line {number}: expected a row of {FORMAT}, got something else ({error})"
            ) from None
        if (number == 1) != isinstance(row, SegmentRow):
            raise TraceError(f"{path}, line {number}: expected one segment row, and that first")
        if isinstance(row, SegmentRow) and row.format != FORMAT:
            raise TraceError(f"{path}: expected format {FORMAT}, got {row.format!r}")
        yield row


def follow_rows(folder: str | Path, up_to: int | None = None) -> Iterator[Row]:
    """Every row that holds, over all segments, in order; what a resume made void is left out.

    Void are the rows after the one a later segment continues from, but for evaluations of older
    versions: where they are made while the run goes on, or after it has stopped, they come late.

    Args:
        folder: of the run, or the trace folder in it.
        up_to: leave out what follows after this event row and its derived rows, too.

    Raises:
        TraceError: no segment there, or one that cannot be read.
    """
    folder = Path(folder)
    if (folder / "trace").is_dir():
        folder = folder / "trace"
    files = segment_files(folder)
    if not files:
        raise TraceError(f"{folder} holds no trace; expected 000.jsonl in it")
    limits: list[int | None] = [None]
    for path in files[1:]:
        first = next(_rows(path), None)
        limits.append(first.continues_after if isinstance(first, SegmentRow) else None)
    last_row, version = -1, 0
    for index, path in enumerate(files):
        # A later segment may continue from before an earlier segment's start.
        later = [limit for limit in (up_to, *limits[index + 1 :]) if limit is not None]
        limit = min(later) if later else None
        if limit is not None and limit < last_row:
            continue
        is_void = False
        for row in _rows(path):
            if isinstance(row, EventRow):
                is_void = is_void or (limit is not None and row.row > limit)
                if not is_void and row.row != last_row + 1:
                    raise TraceError(f"{path}: expected event row {last_row + 1}, got {row.row}")
            if is_void:
                if isinstance(row, EvaluationRow) and row.version < version:
                    yield row
                continue
            if isinstance(row, EventRow):
                last_row = row.row
            elif isinstance(row, UpdateRow):
                version = row.version
            yield row


def read_trace(folder: str | Path, up_to: int | None = None) -> Trace:
    """Read a trace; see :func:`follow_rows`.

    Raises:
        TraceError: no trace there, or one damaged before its last row.
    """
    trace = Trace()
    for row in follow_rows(folder, up_to):
        trace.add(row)
    return trace
