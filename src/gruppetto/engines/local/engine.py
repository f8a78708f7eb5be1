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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from gruppetto.delays import KeyedDelays
from gruppetto.engines.base import Engine
from gruppetto.engines.local.held import pack_held, unpack_held
from gruppetto.engines.local.memory import Blocks, RunMemory
from gruppetto.engines.local.seats import Seat, rest_of, tell, work_row
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
from gruppetto.engines.measuring import Measuring
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
from gruppetto.training.learner import Gradient

__all__ = ["LocalEngine"]


class LocalEngine(Engine):
    """Learners in processes of their own.

    Args:
        server: holds weights.
        memory: shared with the learners.
        delays: seconds each job sleeps; None for no sleep.
        supervisor: tells who is there, who is gone, and when to stop.
        num_learners: how many the run waits for before its clock starts.
        max_time: seconds; then the run stops.
        measuring: when progress is measured, for protocols that ask for it.
    """

    def __init__(
        self,
        server: PublishesWeights,
        memory: RunMemory,
        delays: KeyedDelays | None,
        supervisor: socket.socket,
        num_learners: int,
        max_time: float | None = None,
        measuring: Measuring | None = None,
    ) -> None:
        super().__init__()
        self._server = server
        self._memory = memory
        self._delays = delays
        self._supervisor = supervisor
        self._max_time = max_time
        self._measuring = measuring
        #: The last event was a measurement; another one has to wait for a look at the learners.
        self._has_just_measured = False
        self._versions = Versions(memory, server.needs_past)
        self._spaces = Blocks(memory.plan.num_gradients, "gradient")
        self._seats: dict[int, Seat] = {}
        #: lease -> its seat, while the coordinator counts on it.
        self._open: dict[int, Seat] = {}
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
        #: When the newest event was heard or, later, its version published. Delays run from there.
        self._since = 0.0
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
            if self._measuring is not None:
                until = self._measuring.next_at - self.now()
                if until <= 0 and not self._has_just_measured:
                    return self._measure(self._measuring)
                self._has_just_measured = False
                left = max(0.0, until if left is None else min(left, until))
            if self._events:
                self._since = time.perf_counter()
                return self._events.popleft()
            if self._stop_reason is not None:
                return StopRequested(self._stop_reason)
            if not self._seats and not self._num_coming:
                return StopRequested(LEARNERS_LOST)
            self._look(left)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Inside, run time does not pass; learners go on with what they have in hand."""
        before = time.perf_counter()
        yield
        if self._started_at is not None:
            self._started_at += time.perf_counter() - before

    def _measure(self, measuring: Measuring) -> Event:
        """Measure while run time stands still."""
        assert self._started_at is not None
        now = self.now()
        with self.standing_still():
            event = measuring.take(now)
        self._has_just_measured = True
        return event

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
                    tell(seat, bytes([Kind.STOP]))

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
        # What has arrived and is in no row yet is computed again.
        unheard = {e.lease for e in self._events if isinstance(e, GradientPushed)}
        heard = {lease: held for lease, held in self._held.items() if lease not in unheard}
        tensors, held = pack_held(heard)
        past, versions = self._versions.past_state(heard)
        counts = {"jobs_started": self._jobs_started, "num_restarted": self.num_restarted}
        if self._measuring is not None:
            counts["next_measurement"] = self._measuring.number
        return {**tensors, **past}, {"held": held, "past": versions, **counts}

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
        if self._measuring is not None:
            self._measuring.number = plain["next_measurement"]
        self._versions.restore_past(tensors, plain.get("past", {}))
        self._held = unpack_held(tensors, plain["held"], self._memory, self._spaces)
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
            seat = Seat(message["joins"], message["slot"], channel)
            self._seats[seat.learner] = seat
            self.watch(channel.fileno(), lambda: self._hear(seat))
        elif "coming" in message:
            self._num_coming += 1
            self.num_restarted += 1
        elif "lost" in message:
            self._lose(message["lost"], message["reason"])
        elif "stop" in message:
            self.request_stop(message["stop"])

    def _hear(self, seat: Seat) -> None:
        """Something from a learner."""
        message = receive(seat.channel)
        if message:
            self._read(seat, message)
        else:  # it is gone; the supervisor will say why
            self.unwatch(seat.channel.fileno())

    def _read(self, seat: Seat, message: bytes) -> None:
        if message[0] == Kind.JOINED:
            seat.has_joined = True
            self._num_coming -= 1
            self._events.append(LearnerJoined(seat.learner))
        else:
            self._take(seat, unpack_answer(message))

    def _lose(self, learner: int, reason: str) -> None:
        seat = self._seats.pop(learner)
        while message := rest_of(seat.channel):
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

    def _take(self, seat: Seat, answer: Answer) -> None:
        """An answer: hold its gradient, report it, and send what waits for the learner."""
        order = seat.order
        assert order is not None and order.lease == answer.lease
        seat.order = None
        self.work.append(work_row(seat, order, answer, self.now()))
        is_open = self._open.pop(answer.lease, None) is not None
        if answer.kind is Kind.PUSHED:
            self._versions.keep(answer.lease, order.version, order.weights_block)
            space = self._memory.gradient(order.gradient_block)
            gradient = Gradient(
                space.flat, space.read_absent(), space.news, answer.loss, answer.num_samples
            )
            self._held[answer.lease] = order.gradient_block, gradient
            pushed = (answer.lease, answer.version, answer.loss, answer.num_samples)
            self._events.append(GradientPushed(*pushed))
        else:
            self._versions.release(order.weights_block)
            self._spaces.give_back(order.gradient_block)
            if answer.kind is Kind.FAILED:
                if is_open and answer.traceback:
                    self.tracebacks[answer.lease] = answer.traceback
                self._events.append(GradientFailed(answer.lease, answer.reason))
        if seat.waiting is not None:
            waiting, seat.waiting = seat.waiting, None
            self._order(seat, *waiting)

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
            self._order(seat, compute, delay, self._since)
        else:
            seat.waiting = compute, delay, self._since

    def _order(self, seat: Seat, compute: Compute, delay: float, since: float) -> None:
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
            since=since,
        )
        tell(seat, pack_order(seat.order))

    def _cancel(self, lease: int) -> None:
        seat = self._open.pop(lease, None)
        if seat is None:
            return
        if seat.waiting is not None and seat.waiting[0].lease == lease:
            seat.waiting = None
        else:
            tell(seat, pack_cancel(lease, self._since))

    def _apply(self, update: ApplyUpdate) -> None:
        leases = [c.lease for c in update.contributions]
        taken = [self._held.pop(lease) for lease in leases]
        gradients = [gradient for _, gradient in taken]
        self._server.apply(update.contributions, gradients, self._versions.past(leases))
        self._versions.publish(update.version, self._server)
        self._since = time.perf_counter()
        for lease, (block, _) in zip(leases, taken, strict=True):
            self._spaces.give_back(block)
            self._versions.forget(lease)

    def _drop(self, lease: int) -> None:
        if lease in self._held:
            self._spaces.give_back(self._held.pop(lease)[0])
            self._versions.forget(lease)

    def _free(self, order: Order) -> None:
        """A learner will not answer: what it read and wrote is free."""
        self._open.pop(order.lease, None)
        self._versions.release(order.weights_block)
        self._spaces.give_back(order.gradient_block)
