"""A seat: what the server knows of one learner process, and how the two talk."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import Final

from gruppetto.engines.local.wire import Answer, Kind, Order, receive
from gruppetto.protocols.messages import Compute
from gruppetto.trace import WorkRow

__all__ = ["Seat", "rest_of", "tell", "work_row"]

_OUTCOMES: Final = {Kind.PUSHED: "pushed", Kind.FAILED: "failed", Kind.CANCELLED: "cancelled"}


@dataclass(slots=True)
class Seat:
    """One learner process."""

    learner: int
    slot: int
    channel: socket.socket
    has_joined: bool = False
    #: The order it works on, or has been told to cancel.
    order: Order | None = None
    #: Waits until that is answered, with the delay drawn for it and since when that runs.
    waiting: tuple[Compute, float, float] | None = None


def work_row(seat: Seat, order: Order, answer: Answer, time: float) -> WorkRow:
    """What the trace says of an order that was answered at a run time."""
    return WorkRow(
        lease=answer.lease,
        learner=seat.learner,
        mini_batch=order.mini_batch,
        outcome=_OUTCOMES[answer.kind],
        time=time,
        **answer.spent._asdict(),
    )


def tell(seat: Seat, message: bytes) -> None:
    """Send a learner a message."""
    with contextlib.suppress(OSError):  # it is gone; the supervisor will say so
        seat.channel.send(message)


def rest_of(channel: socket.socket) -> bytes:
    """What a process that has ended had still said."""
    channel.setblocking(False)
    try:
        return receive(channel)
    except BlockingIOError:  # a process it had started has the other end open
        return b""
