"""The event log: append-only, readable after kill -9. No torch in here."""

from gruppetto.trace.files import Trace, TraceWriter, follow_rows, read_trace
from gruppetto.trace.rows import (
    EndRow,
    EvaluationRow,
    EventRow,
    FailureRow,
    GammaRow,
    MessageDigest,
    ModuleRow,
    Row,
    SegmentRow,
    UpdateRow,
    WorkRow,
    encode_message,
)

__all__ = [
    "EndRow",
    "EvaluationRow",
    "EventRow",
    "FailureRow",
    "GammaRow",
    "MessageDigest",
    "ModuleRow",
    "Row",
    "SegmentRow",
    "Trace",
    "TraceWriter",
    "UpdateRow",
    "WorkRow",
    "encode_message",
    "follow_rows",
    "read_trace",
]
