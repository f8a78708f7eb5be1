"""What a learner process does: wait for an order, sleep its delay, compute, answer; and again."""

from __future__ import annotations

import socket
import time
import traceback
from typing import Final

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

#: A sleeper that the clock wakes is some ten microseconds late: so many seconds before the end of a
#: delay a learner begins to look at the clock itself.
_EARLY: Final = 1e-4


class _Stopped(BaseException):
    """The server wants no more, or is gone; not an Exception, for user code to catch."""


class _Cancelled(BaseException):
    """The lease being worked on is closed."""

    def __init__(self, since: float) -> None:
        super().__init__()
        self.since = since


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
    free = time.perf_counter()
    while True:
        order = unpack_order(receive(channel))
        if order is None:
            return
        if not isinstance(order, Order):
            continue  # the cancel of a lease that was answered just before
        try:
            answer, free = _answer(channel, learner, memory, reader, order, free)
            channel.send(pack_answer(answer))
        except (_Stopped, ConnectionError):
            return


def _answer(
    channel: socket.socket,
    learner: Learner,
    memory: RunMemory,
    reader: Reader,
    order: Order,
    free: float,
) -> tuple[Answer, float]:
    """Carry out an order.

    Args:
        channel, learner, memory, reader: as in :func:`work`.
        order: what to do.
        free: since when this learner has had nothing to do, by the machine's clock.

    Returns:
        What to say, and since when there is nothing to do again.
    """
    reader.expect(order.mini_batch, order.next_mini_batch)
    reader.waited = 0.0
    # A delay stands for how long the work takes: the order's way here is not on top of it.
    began = max(free, order.since) if order.delay > 0.0 else time.perf_counter()
    kind, loss, num_samples, reason, text = Kind.CANCELLED, 0.0, 0, "", ""
    try:
        _sleep(channel, began + order.delay)
    except _Cancelled as cancelled:
        # What comes next begins with this cancel, too, however late a sleeper hears of it.
        ended = max(began, cancelled.since)
        spent = Spent(began - free, ended - began, 0.0, 0.0)
        return Answer(kind, order.lease, order.version, loss, num_samples, spent), ended
    computing_from = time.perf_counter()
    try:
        weights, space = memory.version(order.weights_block), memory.gradient(order.gradient_block)
        gradient = learner.compute(order.mini_batch, weights, space)
        _look(channel)
        kind, loss, num_samples = Kind.PUSHED, gradient.loss, gradient.num_samples
    except _Cancelled:
        pass
    except NotFinite:
        kind, reason = Kind.FAILED, NOT_FINITE
    except ReadingFailed as failed:
        kind, reason, text = Kind.FAILED, str(failed), failed.traceback
    except Exception as error:
        kind, reason, text = Kind.FAILED, failure_reason(error), traceback.format_exc()
    ended = time.perf_counter()
    computing = ended - computing_from - reader.waited
    spent = Spent(began - free, computing_from - began, reader.waited, computing)
    answer = Answer(kind, order.lease, order.version, loss, num_samples, spent, reason, text)
    return answer, ended


def _sleep(channel: socket.socket, until: float) -> None:
    """Sleep to the end of a delay, unless something comes from the server."""
    while (left := until - time.perf_counter()) > 0:
        if is_readable(channel, max(0.0, left - _EARLY)):
            _look(channel)


def _look(channel: socket.socket) -> None:
    """Whether the server has said something meanwhile: it can only be to cancel or to stop.

    Raises:
        _Cancelled: the open lease is to be cancelled.
        _Stopped: the run is over.
    """
    if is_readable(channel, 0.0):
        said = unpack_order(receive(channel))
        if said is None:
            raise _Stopped
        raise _Cancelled(said.since)
