"""What crosses the socket between the server and a learner: a few numbers, one datagram each.

    server -> learner    COMPUTE  CANCEL  STOP
    learner -> server    JOINED   PUSHED  CANCELLED  FAILED

Each COMPUTE is answered exactly once. Texts travel only with FAILED. The sockets keep the borders
of messages, and reading one whose other end is gone gives nothing.
"""

from __future__ import annotations

import enum
import json
import select
import socket
import struct
from typing import Any, Final, NamedTuple

__all__ = [
    "Answer",
    "Cancelled",
    "Kind",
    "Order",
    "Spent",
    "is_readable",
    "pack_answer",
    "pack_cancel",
    "pack_order",
    "pack_texts",
    "pair",
    "readable",
    "receive",
    "receive_json",
    "receive_with_files",
    "send_json",
    "unpack_answer",
    "unpack_order",
    "unpack_texts",
]

#: Bytes of a failure's text; the end of a traceback says most.
_MAX_TEXT: Final = 24_000
_MAX_MESSAGE: Final = 64_000
#: Descriptors from here on are beyond select, which alone knows microseconds.
_SELECT_LIMIT: Final = 1024


class Kind(enum.IntEnum):
    """The first byte of a message."""

    COMPUTE = 1
    CANCEL = 2
    STOP = 3
    JOINED = 4
    PUSHED = 5
    CANCELLED = 6
    FAILED = 7


class Order(NamedTuple):
    """COMPUTE: what a learner is told."""

    lease: int
    mini_batch: int
    #: -1 for none.
    next_mini_batch: int
    version: int
    #: Blocks of the shared memory.
    weights_block: int
    gradient_block: int
    #: Seconds, and since when they run by the clock that all processes of a machine share.
    delay: float
    since: float


class Cancelled(NamedTuple):
    """CANCEL: the lease that is closed, and since when."""

    lease: int
    since: float


class Spent(NamedTuple):
    """Seconds of a learner's clock; see :class:`gruppetto.trace.WorkRow`."""

    waiting: float
    delay: float
    loading: float
    computing: float


class Answer(NamedTuple):
    """PUSHED, CANCELLED or FAILED: what a learner says, once for each COMPUTE."""

    kind: Kind
    lease: int
    version: int
    loss: float
    num_samples: int
    spent: Spent
    #: Reason of a failure, and its traceback; empty otherwise.
    reason: str = ""
    traceback: str = ""


_ORDER: Final = struct.Struct("<Bqqqqiidd")
_CANCEL: Final = struct.Struct("<Bqd")
_ANSWER: Final = struct.Struct("<Bqqdqdddd")


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def pack_order(order: Order) -> bytes:
    """COMPUTE."""
    return _ORDER.pack(Kind.COMPUTE, *order)


def pack_cancel(lease: int, since: float) -> bytes:
    """CANCEL."""
    return _CANCEL.pack(Kind.CANCEL, lease, since)


def unpack_order(message: bytes) -> Order | Cancelled | None:
    """What a learner is told: an order, what to cancel, or None to stop.

    An empty message, from a server that is gone, means stop as well.
    """
    kind = message[0] if message else Kind.STOP
    if kind == Kind.COMPUTE:
        return Order(*_ORDER.unpack(message)[1:])
    if kind == Kind.CANCEL:
        return Cancelled(*_CANCEL.unpack(message)[1:])
    return None


def pack_answer(answer: Answer) -> bytes:
    """PUSHED, CANCELLED, FAILED."""
    numbers = _ANSWER.pack(
        answer.kind, answer.lease, answer.version, answer.loss, answer.num_samples, *answer.spent
    )
    if answer.kind is not Kind.FAILED:
        return numbers
    return numbers + pack_texts(answer.reason, answer.traceback)


def unpack_answer(message: bytes) -> Answer:
    """What a learner says."""
    kind, lease, version, loss, num_samples, *spent = _ANSWER.unpack_from(message)
    texts = unpack_texts(message[_ANSWER.size :])
    return Answer(Kind(kind), lease, version, loss, num_samples, Spent(*spent), *texts)


def pack_texts(reason: str, traceback: str) -> bytes:
    """What a failure says, cut to what a message holds; the end of a traceback says most."""
    head = reason.replace("\0", " ").encode(errors="replace")[:_MAX_TEXT]
    return head + b"\0" + traceback.encode(errors="replace")[-_MAX_TEXT:]


def unpack_texts(message: bytes) -> tuple[str, str]:
    """Reason and traceback."""
    reason, _, traceback = message.decode(errors="replace").partition("\0")
    return reason, traceback


def receive(channel: socket.socket) -> bytes:
    """The next message, waiting for it; empty when the other end is gone."""
    return receive_with_files(channel, 0)[0]


def receive_with_files(channel: socket.socket, max_files: int) -> tuple[bytes, list[int]]:
    """The next message and the open files that came with it; empty when the other end is gone."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, _MAX_MESSAGE, max_files)
        except ConnectionResetError:
            # It ended with something of ours unread, which is told once and before its last words.
            continue
        return message, descriptors


def is_readable(channel: socket.socket, timeout: float) -> bool:
    """Whether a message comes (or the other end goes) within so many seconds."""
    return bool(readable([channel.fileno()], timeout))


def readable(descriptors: list[int], timeout: float | None) -> set[int]:
    """Those that can be read or whose other end is gone, within so many seconds."""
    if max(descriptors) < _SELECT_LIMIT:
        return set(select.select(descriptors, [], [], timeout)[0])
    # A data set may have many files open. Sleeps are then rounded up to a millisecond.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {found for found, _ in poll.poll(None if timeout is None else timeout * 1000.0)}


# ------------------------------------------------------- what is not on a gradient's way


def send_json(channel: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    """A message of the supervisor, the fork server or the evaluator, perhaps with open files."""
    data = json.dumps(message).encode()
    if descriptors:
        socket.send_fds(channel, [data], descriptors)
    else:
        channel.send(data)


def receive_json(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A message and the files that came with it; None when the other end is gone."""
    data, descriptors = receive_with_files(channel, 16)
    return (json.loads(data) if data else None), descriptors
