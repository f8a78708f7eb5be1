"""What a learner process does: wait for an order, sleep its delay, compute, answer; and again."""

from __future__ import annotations

import socket
import time
import traceback

from gruppetto.engines.local.loader import ReadingFailed
from gruppetto.engines.local.memory import RunMemory
from gruppetto.engines.local.reader import Reader
from gruppetto.engines.local.wire import (
    Answer,
    Kind,
    Order,
    Spent,
    is_readable,
    pack_answer,
    receive,
    unpack_order,
)
from gruppetto.engines.virtual import failure_reason
from gruppetto.protocols.messages import NOT_FINITE
from gruppetto.training.learner import Learner, NotFinite

__all__ = ["work"]


class _Stopped(BaseException):
    """The server wants no more, or is gone; not an Exception, for user code to catch."""


class _Cancelled(BaseException):
    """The lease being worked on is closed."""


def work(channel: socket.socket, learner: Learner, memory: RunMemory, reader: Reader) -> None:
    """Serve orders until the server stops or is gone.

    Args:
        channel: to the server.
        learner: computes; fetches from the reader.
        memory: where versions are read and gradients written.
        reader: told what comes next.
    """
    learner.read_from(reader)
    try:
        channel.send(bytes([Kind.JOINED]))
    except ConnectionError:  # the run was stopped before it began
        return
    answered = time.perf_counter()
    while True:
        order = unpack_order(receive(channel))
        if order is None:
            return
        if not isinstance(order, Order):
            continue  # the cancel of a lease that was answered just before
        waiting = time.perf_counter() - answered
        try:
            answer = _answer(channel, learner, memory, reader, order, waiting)
            channel.send(pack_answer(answer))
        except (_Stopped, ConnectionError):
            return
        answered = time.perf_counter()


def _answer(
    channel: socket.socket,
    learner: Learner,
    memory: RunMemory,
    reader: Reader,
    order: Order,
    waiting: float,
) -> Answer:
    kind, loss, num_samples, reason, text = Kind.CANCELLED, 0.0, 0, "", ""
    reader.expect(order.mini_batch, order.next_mini_batch)
    reader.waited = 0.0
    started = computing_from = time.perf_counter()
    try:
        _sleep(channel, order.delay)
        computing_from = time.perf_counter()
        weights, space = memory.version(order.weights_block), memory.gradient(order.gradient_block)
        gradient = learner.compute(order.mini_batch, weights, space)
        _look(channel)
        kind, loss, num_samples = Kind.PUSHED, gradient.loss, gradient.num_samples
    except _Cancelled:
        if computing_from == started:  # asleep
            computing_from = time.perf_counter()
    except NotFinite:
        kind, reason = Kind.FAILED, NOT_FINITE
    except ReadingFailed as failed:
        kind, reason, text = Kind.FAILED, str(failed), failed.traceback
    except Exception as error:
        kind, reason, text = Kind.FAILED, failure_reason(error), traceback.format_exc()
    total = time.perf_counter() - computing_from
    spent = Spent(waiting, computing_from - started, reader.waited, total - reader.waited)
    return Answer(kind, order.lease, order.version, loss, num_samples, spent, reason, text)


def _sleep(channel: socket.socket, seconds: float) -> None:
    """Sleep out a delay, unless something comes from the server."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        if is_readable(channel, left):
            _look(channel)


def _look(channel: socket.socket) -> None:
    """Whether the server has said something meanwhile: it can only be to cancel or to stop.

    Raises:
        _Cancelled: the open lease is to be cancelled.
        _Stopped: the run is over.
    """
    if is_readable(channel, 0.0):
        if unpack_order(receive(channel)) is None:
            raise _Stopped
        raise _Cancelled
