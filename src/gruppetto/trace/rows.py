"""The rows of a trace, and the bytes they are hashed as.

An *event row* is the truth: feeding the events to the program again gives every command again.
All other rows are derived: written for readers, never fed back.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeAlias

import msgspec

from gruppetto.protocols.messages import COMMANDS, EVENTS, Command, Event

__all__ = [
    "FORMAT",
    "EndRow",
    "EvaluationRow",
    "EventRow",
    "FailureRow",
    "GammaRow",
    "MessageDigest",
    "ModuleRow",
    "Row",
    "SegmentRow",
    "UpdateRow",
    "WorkRow",
    "decode_row",
    "encode_message",
    "encode_row",
]

#: Name and version of the format, in the first row of every segment.
FORMAT: Final = "gruppetto-trace-1"


class SegmentRow(msgspec.Struct, frozen=True, tag="segment", tag_field="kind"):
    """Opens a file. A resumed run continues after an event row; later ones before it are void."""

    format: str
    segment: int
    #: Event row this segment continues after; None for the first segment.
    continues_after: int | None = None


class EventRow(msgspec.Struct, frozen=True, tag="event", tag_field="kind"):
    """One event, with the time it was handled at."""

    row: int
    #: Run time in seconds, virtual or wall, evaluation excluded.
    time: float
    #: Seconds of this machine's clock since the run started.
    wall_time: float
    type: str
    event: msgspec.Raw
    #: First 16 hexadecimal digits of the running hash of all commands so far, this row's included.
    commands: str

    def decode(self) -> Event:
        """The event itself.

        Raises:
            msgspec.ValidationError: fields missing or of the wrong type.
            KeyError: an unknown type.
        """
        return msgspec.json.decode(self.event, type=EVENTS[self.type])


class UpdateRow(msgspec.Struct, frozen=True, tag="update", tag_field="kind"):
    """One update of the weights, and the counts so far."""

    version: int
    time: float
    #: Applied samples so far.
    samples: int
    epoch: float
    #: Of the first parameter group, after modulation.
    learning_rate: float
    #: Per contribution, in summation order.
    staleness: list[int]
    num_samples: list[int]
    factors: list[float]
    learners: list[int]
    losses: list[float]
    applied: int
    cancelled: int
    discarded: int
    given_up: int
    dropped: int = 0
    #: α₀ Σ n_i s_i / Σ n_i of the first parameter group: what the gradients counted on average,
    #: whether the factors scaled the rate or the gradients. None in traces of before.
    effective_rate: float | None = None


class EvaluationRow(msgspec.Struct, frozen=True, tag="evaluation", tag_field="kind"):
    """What ``evaluate`` returned for a version."""

    version: int
    #: When that version was published.
    time: float
    samples: int
    epoch: float
    #: Sample-weighted mean loss of the mini-batches applied since the evaluation before.
    train_loss: float | None
    #: None where the value was infinite or not a number.
    metrics: dict[str, float | None]


class GammaRow(msgspec.Struct, frozen=True, tag="gamma", tag_field="kind"):
    """How far staleness moved the gradient, measured just before an update on a fixed sample."""

    #: That the update made; its gradients were applied to the one before.
    version: int
    #: When it was published.
    time: float
    #: Per contribution, in summation order.
    staleness: list[int]
    #: ‖∇F(w_j) − ∇F(w_τ)‖² of each contribution, computed on w_τ and applied to w_j.
    squared_changes: list[float]
    #: ‖∇F(w_j)‖².
    squared_norm: float


class FailureRow(msgspec.Struct, frozen=True, tag="failure", tag_field="kind"):
    """The traceback behind a GradientFailed."""

    row: int
    learner: int
    mini_batch: int
    traceback: str


class WorkRow(msgspec.Struct, frozen=True, tag="work", tag_field="kind"):
    """Where the time of one lease went, in seconds of a learner's own clock.

    Engines with real processes write one for each lease that was answered; in virtual time the
    events alone tell it.
    """

    lease: int
    learner: int
    mini_batch: int
    #: ``pushed``, ``failed`` or ``cancelled``.
    outcome: str
    #: Run time at which the answer reached the server.
    time: float
    #: Since the learner had nothing left to do, until this lease was given or, where no delay is
    #: injected, until it arrived.
    waiting: float
    #: Injected delay, until it was over or cancelled.
    delay: float
    #: Waiting for the samples of the mini-batch.
    loading: float
    #: Forward and backward pass, and writing the gradient.
    computing: float


class ModuleRow(msgspec.Struct, frozen=True, tag="module", tag_field="kind"):
    """Decoupled backpropagation: what one module did for one update of its own, and for how long.

    Seconds of the run's clock. The forward pass is the one that comes in the module's column before
    this update's backward pass, so of a mini-batch ``delay`` later; the first update counts all
    forward passes before it, and updates of the tail have none.
    """

    module: int
    #: Mini-batch whose gradient was applied, by the update that made ``version`` = mini_batch + 1.
    mini_batch: int
    #: When the update was over.
    time: float
    #: Version at its update less version at its forward pass.
    staleness: int
    #: Fetching samples; modules that fetch none wait for them in ``waiting_for_inputs``.
    loading: float
    forward: float
    backward: float
    #: Combining, clipping, optimizer.
    step: float
    waiting_for_inputs: float
    waiting_for_gradients: float
    #: For room in a ring, and at barriers.
    waiting_for_others: float
    #: Mini-batches in flight, right after the update.
    in_flight: int
    #: Applied learning rate of the first parameter group; 0.0 for a module without parameters.
    learning_rate: float = 0.0
    factor: float = 1.0


class EndRow(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    """The summary of a run that came to its end; a killed run has none."""

    #: Event rows when it was written.
    rows: int
    result: dict[str, Any]
    #: Hash of all commands.
    commands_sha256: str


Row: TypeAlias = (
    SegmentRow
    | EventRow
    | UpdateRow
    | EvaluationRow
    | GammaRow
    | FailureRow
    | WorkRow
    | ModuleRow
    | EndRow
)

_ENCODER = msgspec.json.Encoder()
_NAMES: Final = {c: n.encode() for n, c in {**EVENTS, **COMMANDS}.items()}
_DECODER: msgspec.json.Decoder[Row] = msgspec.json.Decoder(Row)


def encode_row(row: Row) -> bytes:
    """One line, its newline included."""
    return _ENCODER.encode(row) + b"\n"


def decode_row(line: bytes) -> Row:
    """Read a line back.

    Raises:
        msgspec.DecodeError: not JSON, or not a row (msgspec.ValidationError is one of these).
    """
    return _DECODER.decode(line)


def encode_message(message: Event | Command) -> bytes:
    """The canonical bytes of a message's fields, in field order."""
    return _ENCODER.encode(message)


class MessageDigest:
    """A running SHA-256 over messages: type, fields, in order; no times."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, message: Event | Command, encoded: bytes | None = None) -> None:
        """Count one message in; ``encoded`` saves encoding it twice."""
        body = _ENCODER.encode(message) if encoded is None else encoded
        self._hash.update(b"%b %b\n" % (_NAMES[type(message)], body))

    def hexdigest(self) -> str:
        """64 hexadecimal digits for everything so far."""
        return self._hash.hexdigest()
