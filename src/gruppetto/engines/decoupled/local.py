"""The local engine of decoupled backpropagation: one module, in a process of its own.

Each process runs the same loop over its module's column. What a pass needs of another module comes
through a ring, and the process sleeps until it is there, until its own message has room, or until
the caller says something: never for one of these alone.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final

from gruppetto.decoupled.module import Module
from gruppetto.decoupled.replica import Payload
from gruppetto.decoupled.schedule import Schedule
from gruppetto.engines.base import Engine
from gruppetto.engines.decoupled.channels import Ends
from gruppetto.engines.decoupled.line import Line, Ready
from gruppetto.engines.decoupled.rings import Message, Ring
from gruppetto.engines.decoupled.samples import Samples
from gruppetto.engines.local.loader import ReadingFailed
from gruppetto.engines.virtual import MAX_TIME, failure_reason
from gruppetto.protocols.messages import (
    NOT_FINITE,
    Backward,
    BackwardFinished,
    Command,
    Event,
    Finish,
    Forward,
    ForwardFinished,
    ModuleUpdated,
    PassFailed,
    Step,
    StopAt,
    StopPassedOn,
    StopRequested,
)
from gruppetto.trace import ModuleRow
from gruppetto.training.learner import NotFinite

__all__ = ["ModuleEngine"]

#: What a row tells seconds of.
_SPENT: Final = (
    "loading",
    "forward",
    "backward",
    "step",
    "waiting_for_inputs",
    "waiting_for_gradients",
    "waiting_for_others",
)
#: What a pass waits for.
_WAITING: Final = {"forward": "waiting_for_inputs", "backward": "waiting_for_gradients"}


class _Heard(Exception):
    """Something that comes before the pass that waits; the pass stays to be done."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class ModuleEngine(Engine):
    """Runs one module's column; a :class:`~gruppetto.decoupled.schedule.ModuleProgram` says what.

    Args:
        module: k.
        schedule: of the network.
        ends: of the channels to the other modules.
        line: to the caller.
        samples: reads mini-batches in module 1, and puts together those that module K receives.
        max_time: seconds of run time after which module 1 stops the run.
    """

    def __init__(
        self,
        module: Module,
        schedule: Schedule,
        ends: Ends,
        line: Line,
        samples: Samples,
        max_time: float | None = None,
    ) -> None:
        super().__init__()
        #: Of updates, until the journal has taken them.
        self.rows: list[ModuleRow] = []
        self._module = module
        self._schedule = schedule
        self._ends = ends
        self._line = line
        self._samples = samples
        self._max_time = max_time
        self._has_begun = False
        #: In flight when it was interrupted, still to be sent: see :meth:`resume`.
        self._sent: dict[int, tuple[Payload | None, int]] = {}
        self._pending: Command | None = None
        #: Told by this module or one upstream, or known from the start.
        self._stop: StopAt | None = schedule.planned_stop
        self._has_reported_stop = False
        #: Module 1 at a barrier: versions of the others.
        self._versions: dict[int, int] = {}
        self._spent = dict.fromkeys(_SPENT, 0.0)

    # -------------------------------------------------------- the four verbs

    def start(self) -> None:
        """Return when all modules are ready; run time starts then."""
        self._versions = dict.fromkeys(self._ends.barrier, self._module.version)
        self._line.tell(Ready())
        while self._line.start is None:
            self._line.wait(())

    def now(self) -> float:
        """Seconds by a clock that all modules share, those before an interruption included."""
        if self._line.start is None:
            return 0.0
        started, before = self._line.start
        return before + time.perf_counter() - started

    def send(self, command: Command) -> None:
        """Take a command; passes are run by :meth:`wait`, when what they need is there."""
        match command:
            case StopAt():
                self._stop = self._schedule.reachable_stop(command) or self._stop
                if self._ends.outputs is not None:
                    self._ends.outputs.send_stop(command)
            case Finish():
                self._pending = None
            case _:
                self._pending = command

    def wait(self) -> Event:
        """Run the pass that was commanded; what is heard before it can begin comes first."""
        if not self._has_begun:
            self._has_begun = True
            self._send_again()
            return ModuleUpdated(self._module.number, self._module.version)
        try:
            self._heed_stop()
            event = self._run()
        except _Heard as heard:
            return heard.event
        except NotFinite:
            return self._failed(NOT_FINITE, "")
        except ReadingFailed as failed:
            return self._failed(str(failed), failed.traceback)
        except Exception as error:
            return self._failed(failure_reason(error), traceback.format_exc())
        self._pending = None
        return event

    def _run(self) -> Event:
        match self._pending:
            case Forward(mini_batch=mini_batch):
                return self._forward(mini_batch)
            case Backward(mini_batch=mini_batch):
                return self._backward(mini_batch)
            case Step(mini_batch=mini_batch):
                return self._step(mini_batch)
        raise AssertionError(f"nothing is left to do for module {self._module.number}: a bug")

    def _failed(self, reason: str, text: str) -> PassFailed:
        assert isinstance(self._pending, (Forward, Backward, Step))
        number, mini_batch = self._module.number, self._pending.mini_batch
        self._pending = None
        if text:
            self.tracebacks[number] = text
        return PassFailed(number, mini_batch, reason)

    # ---------------------------------------------------------------- passes

    def _forward(self, mini_batch: int) -> Event:
        module, ends = self._module, self._ends
        self._meet_others(mini_batch)
        inputs: Payload | None = None
        batch: Any = None
        if ends.inputs is not None:
            received = self._take(ends.inputs, mini_batch, "forward")
            inputs, num_samples = self._on_device(received), received.num_samples
            if ends.batches is not None:
                labels = self._take(ends.batches, mini_batch, "forward")
                batch = self._samples.unpack(labels)
        else:
            started = time.perf_counter()
            batch, num_samples = self._samples.fetch(mini_batch)
            self._spent["loading"] += time.perf_counter() - started
            self._send_batch(mini_batch, batch, num_samples)
            batch = self._samples.on_device(batch)
        started = time.perf_counter()
        forwarded = module.forward(mini_batch, inputs, batch, num_samples)
        self._spent["forward"] += time.perf_counter() - started
        if forwarded.outputs is not None:
            self._send_outputs(mini_batch, forwarded.outputs, num_samples)
        return ForwardFinished(module.number, mini_batch, forwarded.version, forwarded.loss)

    def _backward(self, mini_batch: int) -> Event:
        module, ends = self._module, self._ends
        gradients: Payload | None = None
        num_samples = 0
        if ends.gradients is not None:
            received = self._take(ends.gradients, mini_batch, "backward")
            gradients, num_samples = self._on_device(received), received.num_samples
        started = time.perf_counter()
        given = module.backward(mini_batch, gradients)
        self._spent["backward"] += time.perf_counter() - started
        if given is not None and ends.input_gradients is not None:
            last = self._schedule.last_version(module.number - 1)
            if last is None or mini_batch < last:
                message = Message(mini_batch, num_samples, given)
                self._give(ends.input_gradients, message, "backward")
        return BackwardFinished(module.number, mini_batch, module.version)

    def _step(self, mini_batch: int) -> Event:
        module = self._module
        started = time.perf_counter()
        module.step(mini_batch)
        self._spent["step"] += time.perf_counter() - started
        self.rows.append(self._row(mini_batch))
        if self._ends.passed is not None:
            os.eventfd_write(self._ends.passed, 1)
        return ModuleUpdated(module.number, module.version)

    def _row(self, mini_batch: int) -> ModuleRow:
        module = self._module
        applied = module.last_update
        spent, self._spent = self._spent, dict.fromkeys(_SPENT, 0.0)
        return ModuleRow(
            module=module.number,
            mini_batch=mini_batch,
            time=self.now(),
            staleness=self._schedule.staleness(module.number, mini_batch),
            in_flight=module.in_flight,
            learning_rate=applied.learning_rate,
            factor=applied.factors[0],
            **spent,
        )

    # -------------------------------------------------------------- channels

    def resume(self, sent: Mapping[int, tuple[Payload | None, int]]) -> None:
        """Begin with what was in flight when the run was interrupted; before :meth:`start`.

        Args:
            sent: mini-batch -> outputs that the next module does not have, and number of samples,
                see :meth:`Module.restore`.
        """
        self._sent = dict(sent)

    def _send_again(self) -> None:
        """After an interruption, outputs and batches that the others had not taken yet."""
        version, total = self._module.version, self._schedule.num_mini_batches
        in_flight = range(version, version + (self._schedule.delay(1) if version else 0))
        for mini_batch in in_flight if self._ends.inputs is None else ():
            if self._ends.batches is not None and (total is None or mini_batch < total):
                batch, num_samples = self._samples.fetch(mini_batch)
                self._send_batch(mini_batch, batch, num_samples)
        for mini_batch in sorted(self._sent):
            outputs, num_samples = self._sent.pop(mini_batch)
            if outputs is not None:
                self._send_outputs(mini_batch, outputs, num_samples)

    def _send_outputs(self, mini_batch: int, outputs: Payload, num_samples: int) -> None:
        """Send outputs to the next module, once there is room, if it will take them."""
        ring = self._ends.outputs
        if ring is not None and self._is_taken(mini_batch, self._module.number + 1):
            self._give(ring, Message(mini_batch, num_samples, outputs), "forward")

    def _send_batch(self, mini_batch: int, batch: Any, num_samples: int) -> None:
        ring = self._ends.batches
        if ring is not None and self._is_taken(mini_batch, self._schedule.num_modules):
            tensors, rest = self._samples.pack(batch)
            self._give(ring, Message(mini_batch, num_samples, tensors, rest), "loading")

    def _is_taken(self, mini_batch: int, module: int) -> bool:
        """Whether a module downstream runs a mini-batch forward before it ends."""
        return self._stop is None or mini_batch < self._stop.version + self._schedule.delay(module)

    def _take(self, ring: Ring, mini_batch: int, account: str) -> Message:
        """The next message, waiting for it; ``account`` is of the pass that needs it."""
        while True:
            started = time.perf_counter()
            received = ring.take(mini_batch)
            if received is None:
                self._sleep((ring.filled,), _WAITING[account])
            elif isinstance(received, StopAt):
                raise _Heard(StopPassedOn(received.version, received.reason))
            else:
                self._spent[account] += time.perf_counter() - started
                return received

    def _give(self, ring: Ring, message: Message, account: str) -> None:
        """Send a message, once there is room; ``account`` is of the pass that made it."""
        while True:
            started = time.perf_counter()
            if ring.offer(message):
                self._spent[account] += time.perf_counter() - started
                return
            # A pass is over when its outputs are sent: no stop is heeded meanwhile.
            self._line.wait((ring.free,))
            self._spent["waiting_for_others"] += time.perf_counter() - started

    def _on_device(self, message: Message) -> Payload:
        return tuple(tensor.to(self._samples.device) for tensor in message.tensors)

    def _meet_others(self, mini_batch: int) -> None:
        """At a barrier, module 1 waits until all have finished the iteration before."""
        if mini_batch == 0:
            return
        for other, descriptor in self._ends.barrier.items():
            least = mini_batch - self._schedule.delay(other)
            if self._stop is not None:  # the others end there
                least = min(least, self._stop.version)
            while self._versions[other] < least:
                try:
                    self._versions[other] += os.eventfd_read(descriptor)
                except BlockingIOError:
                    self._sleep((descriptor,), "waiting_for_others")

    def _sleep(self, descriptors: tuple[int, ...], account: str) -> None:
        left = None
        if self._max_time is not None and self._may_stop():
            left = max(0.0, self._max_time - self.now())
        started = time.perf_counter()
        self._line.wait(descriptors, left)
        self._spent[account] += time.perf_counter() - started
        self._heed_stop()

    def _may_stop(self) -> bool:
        """Whether module 1 would heed a request now.

        Only before a backward pass: the version chosen is the same as before the forward pass that
        came first, and no other module can stand at a version that all have.
        """
        is_first = self._module.number == 1 and not self._has_reported_stop
        return is_first and isinstance(self._pending, Backward)

    def _heed_stop(self) -> None:
        """Whether module 1 is to end the run."""
        if not self._may_stop():
            return
        # The slowest module never sleeps, and would not hear what it is told.
        self._line.wait((), 0.0)
        reason = self._line.stop_reason
        if reason is None and self._max_time is not None and self.now() >= self._max_time:
            reason = MAX_TIME
        if reason is not None:
            self._has_reported_stop = True
            raise _Heard(StopRequested(reason))
