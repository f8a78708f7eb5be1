"""The local engine: carries out commands with real processes. It lives in the server process.

A *seat* is one learner process. It has at most one order that is not answered, so it holds one
block of weights and one of gradients; a ``Compute`` that follows a ``Cancel`` waits in the engine
until the cancelled order is answered, which takes as long as a message does when the learner
sleeps, and as long as its mini-batch when it computes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from gruppetto.delays import KeyedDelays
from gruppetto.engines.base import Engine
from gruppetto.engines.local.memory import Blocks, RunMemory
from gruppetto.engines.local.versions import PublishesWeights, Versions
from gruppetto.engines.local.wire import (
    Answer,
    Kind,
    Order,
    pack_cancel,
    pack_order,
    receive,
    receive_json,
    send_json,
    unpack_answer,
)
from gruppetto.engines.virtual import LEARNERS_LOST, MAX_TIME
from gruppetto.protocols.messages import (
    RESUMED,
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Discard,
    Event,
    Finish,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
    LearnerLost,
    StopRequested,
)
from gruppetto.trace import WorkRow
from gruppetto.training.learner import Gradient

__all__ = ["LocalEngine"]

_OUTCOMES: Final = {Kind.PUSHED: "pushed", Kind.FAILED: "failed", Kind.CANCELLED: "cancelled"}


@dataclass(slots=True)
class _Seat:
    """One learner process."""

    learner: int
    slot: int
    channel: socket.socket
    has_joined: bool = False
    #: The order it works on, or has been told to cancel.
    order: Order | None = None
    #: Waits until that is answered, with the delay drawn for it.
    waiting: tuple[Compute, float] | None = None


class LocalEngine(Engine):
    """Learners in processes of their own.

    Args:
        server: holds weights.
        memory: shared with the learners.
        delays: seconds each job sleeps; None for no sleep.
        supervisor: tells who is there, who is gone, and when to stop.
        num_learners: how many the run waits for before its clock starts.
        max_time: seconds; then the run stops.
    """

    def __init__(
        self,
        server: PublishesWeights,
        memory: RunMemory,
        delays: KeyedDelays | None,
        supervisor: socket.socket,
        num_learners: int,
        max_time: float | None = None,
    ) -> None:
        super().__init__()
        self._server = server
        self._memory = memory
        self._delays = delays
        self._supervisor = supervisor
        self._max_time = max_time
        self._versions = Versions(memory)
        self._spaces = Blocks(memory.plan.num_gradients, "gradient")
        self._seats: dict[int, _Seat] = {}
        #: lease -> its seat, while the coordinator counts on it.
        self._open: dict[int, _Seat] = {}
        #: lease -> block and gradient, arrived and not applied.
        self._held: dict[int, tuple[int, Gradient]] = {}
        self._events: deque[Event] = deque()
        #: Replacements that have been announced and are not there yet.
        self._num_coming = num_learners
        #: The coordinator counts on these from the start, before they join.
        self._expected = set(range(num_learners))
        self._jobs_started = [0] * num_learners
        self._poll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._started_at: float | None = None
        self._time_before = 0.0
        self.watch(supervisor.fileno(), self._listen)

    # -------------------------------------------------------- the four verbs

    def start(self) -> None:
        """Return when every learner is there or lost; run time starts then."""
        self._versions.publish(self._versions.newest, self._server)
        while self._num_coming and self._stop_reason is None:
            self._look(None)
        self._started_at = time.perf_counter()

    def now(self) -> float:
        """Seconds since all learners were there, those before an interruption included."""
        if self._started_at is None:
            return self._time_before
        return self._time_before + time.perf_counter() - self._started_at

    def wait(self) -> Event:
        """The next event, without spinning."""
        while True:
            left = None
            if self._max_time is not None:
                left = self._max_time - self.now()
                if left <= 0:
                    return StopRequested(MAX_TIME)
            if self._events:
                return self._events.popleft()
            if self._stop_reason is not None:
                return StopRequested(self._stop_reason)
            if not self._seats and not self._num_coming:
                return StopRequested(LEARNERS_LOST)
            self._look(left)

    def send(self, command: Command) -> None:
        """Carry out a command."""
        match command:
            case Compute():
                self._compute(command)
            case ApplyUpdate():
                self._apply(command)
            case Cancel():
                self._cancel(command.lease)
            case Discard():
                self._drop(command.lease)
            case Finish():
                # First, so that nobody is replaced for ending now.
                self.tell_supervisor({"stopped": command.reason})
                for seat in self._seats.values():
                    _tell(seat, bytes([Kind.STOP]))

    def close(self) -> None:
        """The run is over: close what it had open to its learners."""
        self._poll.close()
        for seat in self._seats.values():
            seat.channel.close()

    def tell_supervisor(self, message: dict[str, Any]) -> None:
        """Something that the caller's process should know."""
        with contextlib.suppress(OSError):  # when it is gone, this process soon is, too
            send_json(self._supervisor, message, [])

    def nudge_supervisor(self) -> None:
        """A row was written. If it has not read the last nudges yet, this one may be lost."""
        with contextlib.suppress(OSError):
            self._supervisor.send(b'{"row": true}', socket.MSG_DONTWAIT)

    # ------------------------------------------------------- saving, resuming

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a resumed run needs of the engine: gradients that are held, and counts."""
        tensors: dict[str, Tensor] = {}
        held = {}
        # What has arrived and is in no row yet is computed again.
        unheard = {e.lease for e in self._events if isinstance(e, GradientPushed)}
        for lease, (_, gradient) in self._held.items():
            if lease in unheard:
                continue
            held[str(lease)] = {
                "absent": sorted(gradient.absent),
                "loss": gradient.loss,
                "num_samples": gradient.num_samples,
            }
            for i, vector in enumerate(gradient.flat.vectors):
                tensors[f"held/{lease}/flat/{i}"] = vector
            for module, news in gradient.news.items():
                tensors.update({f"held/{lease}/news/{module}/{n}": t for n, t in news.items()})
        counts = {"jobs_started": self._jobs_started, "num_restarted": self.num_restarted}
        return tensors, {"held": held, **counts}

    def restore(
        self,
        tensors: dict[str, Tensor],
        plain: dict[str, Any],
        newest: int,
        time: float,
        learners: Iterable[int],
    ) -> None:
        """Bring a fresh engine to where another one was; its learners are lost.

        Args:
            tensors, plain: what :meth:`state` gave.
            newest: the version of the server's weights.
            time: run time.
            learners: those that were alive.
        """
        self._versions.newest = newest
        self._expected.clear()
        self._time_before = time
        self._jobs_started = list(plain["jobs_started"])
        self.num_restarted = plain["num_restarted"]
        for text, numbers in plain["held"].items():
            block = self._spaces.take()
            space = self._memory.gradient(block)
            for i, vector in enumerate(space.flat.vectors):
                vector.copy_(tensors[f"held/{text}/flat/{i}"])
            for module, news in space.news.items():
                for name, place in news.items():
                    place.copy_(tensors[f"held/{text}/news/{module}/{name}"])
            absent, loss = frozenset(numbers["absent"]), numbers["loss"]
            gradient = Gradient(space.flat, absent, space.news, loss, numbers["num_samples"])
            self._held[int(text)] = block, gradient
        self._events.extend(LearnerLost(learner, RESUMED) for learner in learners)

    # -------------------------------------------------------------- listening

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back when something can be read there, between events."""
        self._callbacks[descriptor] = callback
        self._poll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """No more."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _look(self, timeout: float | None) -> None:
        for descriptor, _ in self._poll.poll(timeout):
            callback = self._callbacks.get(descriptor)
            if callback is not None:  # not closed by one before it
                callback()

    def _listen(self) -> None:
        """Something from the supervisor."""
        message, descriptors = receive_json(self._supervisor)
        if message is None:
            sys.exit("the process that started this run is gone")
        if "joins" in message:
            channel = socket.socket(fileno=descriptors[0])
            seat = _Seat(message["joins"], message["slot"], channel)
            self._seats[seat.learner] = seat
            self.watch(channel.fileno(), lambda: self._hear(seat))
        elif "coming" in message:
            self._num_coming += 1
            self.num_restarted += 1
        elif "lost" in message:
            self._lose(message["lost"], message["reason"])
        elif "stop" in message:
            self.request_stop(message["stop"])

    def _hear(self, seat: _Seat) -> None:
        """Something from a learner."""
        message = receive(seat.channel)
        if message:
            self._read(seat, message)
        else:  # it is gone; the supervisor will say why
            self.unwatch(seat.channel.fileno())

    def _read(self, seat: _Seat, message: bytes) -> None:
        if message[0] == Kind.JOINED:
            seat.has_joined = True
            self._num_coming -= 1
            self._events.append(LearnerJoined(seat.learner))
        else:
            self._take(seat, unpack_answer(message))

    def _lose(self, learner: int, reason: str) -> None:
        seat = self._seats.pop(learner)
        while message := _rest_of(seat.channel):
            self._read(seat, message)
        self.unwatch(seat.channel.fileno())
        seat.channel.close()
        if seat.order is not None:
            self._free(seat.order)
        if seat.waiting is not None:
            self._open.pop(seat.waiting[0].lease, None)
        if not seat.has_joined:
            self._num_coming -= 1
            if learner not in self._expected:
                return  # a replacement that nobody has heard of yet
        self._events.append(LearnerLost(learner, reason))

    def _take(self, seat: _Seat, answer: Answer) -> None:
        """An answer: hold its gradient, report it, and send what waits for the learner."""
        order = seat.order
        assert order is not None and order.lease == answer.lease
        seat.order = None
        self._note(seat, order, answer)
        is_open = self._open.pop(answer.lease, None) is not None
        self._versions.release(order.weights_block)
        if answer.kind is Kind.PUSHED:
            space = self._memory.gradient(order.gradient_block)
            gradient = Gradient(
                space.flat, space.read_absent(), space.news, answer.loss, answer.num_samples
            )
            self._held[answer.lease] = order.gradient_block, gradient
            pushed = (answer.lease, answer.version, answer.loss, answer.num_samples)
            self._events.append(GradientPushed(*pushed))
        else:
            self._spaces.give_back(order.gradient_block)
            if answer.kind is Kind.FAILED:
                if is_open and answer.traceback:
                    self.tracebacks[answer.lease] = answer.traceback
                self._events.append(GradientFailed(answer.lease, answer.reason))
        if seat.waiting is not None:
            (compute, delay), seat.waiting = seat.waiting, None
            self._order(seat, compute, delay)

    def _note(self, seat: _Seat, order: Order, answer: Answer) -> None:
        self.work.append(
            WorkRow(
                lease=answer.lease,
                learner=seat.learner,
                mini_batch=order.mini_batch,
                outcome=_OUTCOMES[answer.kind],
                time=self.now(),
                **answer.spent._asdict(),
            )
        )

    # ------------------------------------------------------------- commanding

    def _compute(self, compute: Compute) -> None:
        seat = self._seats.get(compute.learner)
        if seat is None:  # it is gone, and the event that says so is on its way
            return
        delay = 0.0
        if self._delays is not None:
            delay = self._delays.draw(seat.slot, self._jobs_started[seat.slot])
        self._jobs_started[seat.slot] += 1
        self._open[compute.lease] = seat
        if seat.order is None:
            self._order(seat, compute, delay)
        else:
            seat.waiting = compute, delay

    def _order(self, seat: _Seat, compute: Compute, delay: float) -> None:
        following = compute.next_mini_batch
        seat.order = Order(
            lease=compute.lease,
            mini_batch=compute.mini_batch,
            next_mini_batch=-1 if following is None else following,
            # Newer than leased where this had to wait for a cancelled order: never older.
            version=self._versions.newest,
            weights_block=self._versions.hold(),
            gradient_block=self._spaces.take(),
            delay=delay,
        )
        _tell(seat, pack_order(seat.order))

    def _cancel(self, lease: int) -> None:
        seat = self._open.pop(lease, None)
        if seat is None:
            return
        if seat.waiting is not None and seat.waiting[0].lease == lease:
            seat.waiting = None
        else:
            _tell(seat, pack_cancel(lease))

    def _apply(self, update: ApplyUpdate) -> None:
        taken = [self._held.pop(c.lease) for c in update.contributions]
        self._server.apply(update.contributions, [gradient for _, gradient in taken])
        self._versions.publish(update.version, self._server)
        for block, _ in taken:
            self._spaces.give_back(block)

    def _drop(self, lease: int) -> None:
        if lease in self._held:
            self._spaces.give_back(self._held.pop(lease)[0])

    def _free(self, order: Order) -> None:
        """A learner will not answer: what it read and wrote is free."""
        self._open.pop(order.lease, None)
        self._versions.release(order.weights_block)
        self._spaces.give_back(order.gradient_block)


def _tell(seat: _Seat, message: bytes) -> None:
    with contextlib.suppress(OSError):  # it is gone; the supervisor will say so
        seat.channel.send(message)


def _rest_of(channel: socket.socket) -> bytes:
    """What a process that has ended had still said."""
    channel.setblocking(False)
    try:
        return receive(channel)
    except BlockingIOError:  # a process it had started has the other end open
        return b""
