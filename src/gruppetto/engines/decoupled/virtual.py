"""All modules in this process, in virtual time: the reference engine of decoupled backpropagation.

A pass is put on the :class:`Timeline` as soon as it is known when it begins, and is computed when
it *ends*, in the order of those ends; equal ends go in the order in which they became known, lower
modules first. What a module is told and has not computed yet can so be taken back. Payloads are
handed over as they are: nobody changes one in place, or else its sender's graph would be wrong too.
"""

from __future__ import annotations

import heapq
import itertools
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from gruppetto.decoupled.pass_times import PassTimes
from gruppetto.decoupled.schedule import Action, Schedule
from gruppetto.decoupled.timeline import Pass, Timeline
from gruppetto.engines.base import Engine
from gruppetto.engines.virtual import MAX_TIME, failure_reason
from gruppetto.errors import GruppettoError
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
    StopRequested,
)
from gruppetto.trace import ModuleRow
from gruppetto.training.learner import FetchesMiniBatches, NotFinite
from gruppetto.training.server import AppliedUpdate
from gruppetto.training.task import to_device

__all__ = ["PassTimes", "RunsPasses", "VirtualModules"]

_CPU: Final = torch.device("cpu")


class RunsPasses(Protocol):
    """What an engine needs of a module; :class:`gruppetto.decoupled.module.Module` is one."""

    number: int
    version: int

    @property
    def in_flight(self) -> int:
        """Mini-batches between their passes."""
        ...

    @property
    def last_update(self) -> AppliedUpdate:
        """What the last step did."""
        ...

    def forward(self, mini_batch: int, inputs: Any, batch: Any, num_samples: int) -> Any:
        """Outputs, loss and version."""
        ...

    def backward(self, mini_batch: int, gradients: Any) -> Any:
        """The gradient of the inputs; None from the first module."""
        ...

    def step(self, mini_batch: int) -> None:
        """Apply the gradient."""
        ...


@dataclass(slots=True)
class _Spent:
    """Where a module's time went since its last update."""

    forward: float = 0.0
    backward: float = 0.0
    for_inputs: float = 0.0
    for_gradients: float = 0.0
    for_others: float = 0.0

    def add(self, done: Pass) -> None:
        if done.action.kind == "F":
            self.forward += done.end - done.start
        else:
            self.backward += done.end - done.start
        self.for_inputs += done.for_inputs
        self.for_gradients += done.for_gradients
        self.for_others += done.for_others


class VirtualModules(Engine):
    """Runs a :class:`NetworkProgram`.

    Args:
        modules: 1..K, all at the same version.
        mini_batches: module 1 fetches them; the batch waits here for module K.
        schedule: of the network.
        pass_times: virtual seconds; see :meth:`PassTimes.of` for methods that replay.
        device: where modules compute.
        max_time: virtual seconds; the run is asked to stop when the next pass would end later.
        time: when it begins; above 0 for a run that goes on.

    Raises:
        InvalidSetting: not as many pass times as modules.
    """

    def __init__(
        self,
        modules: Sequence[RunsPasses],
        mini_batches: FetchesMiniBatches,
        schedule: Schedule,
        pass_times: PassTimes,
        *,
        device: torch.device = _CPU,
        max_time: float | None = None,
        time: float = 0.0,
    ) -> None:
        super().__init__()
        self._modules = {module.number: module for module in modules}
        self._mini_batches = mini_batches
        self._schedule = schedule
        self._device = device
        self._max_time = max_time
        self._time = time
        self._begun_at = modules[0].version
        self._timeline = Timeline(
            schedule, pass_times.forward, pass_times.backward, self._begun_at, time
        )
        #: Rows of updates, until the journal has taken them.
        self.rows: list[ModuleRow] = []
        self._wanted_stop: str | None = None
        self._has_told_stop = False
        self._has_told_max_time = False
        #: Events that are due now.
        self._due: deque[Event] = deque()
        #: module -> the pass it was told of, which is not on the timeline yet.
        self._told: dict[int, Action] = {}
        #: (end, number, pass): on the timeline, not computed yet.
        self._agenda: list[tuple[float, int, Pass]] = []
        self._count = itertools.count()
        #: The action whose pass has run and whose payload the neighbour has not taken.
        self._payloads: dict[Action, Any] = {}
        #: mini-batch -> batch on the device, and its samples, until module K has run it forward.
        self._batches: dict[int, tuple[Any, int]] = {}
        self._spent = {number: _Spent() for number in self._modules}
        #: (module, mini-batch) -> the version its forward pass ran at.
        self._versions: dict[tuple[int, int], int] = {}

    # -------------------------------------------------------- the four verbs

    def start(self) -> None:
        """All modules are ready at once."""
        for number in sorted(self._modules):
            self._due.append(ModuleUpdated(number, self._begun_at))

    def now(self) -> float:
        """Virtual seconds."""
        return self._time

    def request_stop(self, reason: str) -> None:
        """Told to the program once; it then runs every module to the same version."""
        if self._wanted_stop is None:
            self._wanted_stop = reason

    def wait(self) -> Event:
        """Jump to the end of the next pass, and compute it."""
        if self._due:
            return self._due.popleft()
        if self._wanted_stop is not None and not self._has_told_stop:
            self._has_told_stop = True
            return StopRequested(self._wanted_stop)
        self._begin_passes()
        if not self._agenda:
            raise GruppettoError(
                "nothing is left to happen although modules have not finished: the program waits "
                "for what cannot arrive"
            )
        end = self._agenda[0][0]
        is_told = self._has_told_stop or self._has_told_max_time
        if self._max_time is not None and end > self._max_time and not is_told:
            self._has_told_max_time = True
            self._time = max(self._time, self._max_time)
            return StopRequested(MAX_TIME)
        _, _, done = heapq.heappop(self._agenda)
        self._time = end
        self._spent[done.action.module].add(done)
        return self._compute(done.action)

    def send(self, command: Command) -> None:
        """Take a command in; passes are computed when they end."""
        match command:
            case Forward(module, mini_batch):
                self._told[module] = Action(module, "F", mini_batch)
            case Backward(module, mini_batch):
                self._told[module] = Action(module, "B", mini_batch)
            case Step(module, mini_batch):
                self._due.append(self._step(module, mini_batch))
            case StopAt(version):
                self._forget(version)
            case Finish():
                self._told.clear()
                self._agenda.clear()

    # --------------------------------------------------------------- resume

    def restore(self, sent: Mapping[int, Mapping[int, tuple[Any, int]]]) -> None:
        """Put back what was between the modules, which are restored already, when a run stopped.

        Args:
            sent: module k -> what its ``restore`` gave: mini-batch -> outputs that module k + 1 has
                not taken, and number of samples.
        """
        for number, outputs in sent.items():
            for mini_batch, (payload, _) in outputs.items():
                self._payloads[Action(number, "F", mini_batch)] = payload
        for number in self._modules:
            delay = self._schedule.delay(number)
            for mini_batch in range(self._begun_at, self._begun_at + delay):
                self._versions[number, mini_batch] = max(0, mini_batch - delay)

    # -------------------------------------------------------------- helpers

    def _begin_passes(self) -> None:
        """Put on the timeline what can be; one pass may make room for another."""
        has_begun = True
        while has_begun:
            has_begun = False
            for number in sorted(self._told):
                action = self._told[number]
                if self._timeline.ready(action) is not None:
                    del self._told[number]
                    done = self._timeline.run(action)
                    heapq.heappush(self._agenda, (done.end, next(self._count), done))
                    has_begun = True

    def _forget(self, version: int) -> None:
        """Modules that have the version of a stop do nothing more."""
        if self._timeline.stop is None or version < self._timeline.stop:
            self._timeline.stop = version
        there = {n for n, module in self._modules.items() if module.version == version}
        for number in there:
            self._told.pop(number, None)
        self._agenda = [entry for entry in self._agenda if entry[2].action.module not in there]
        heapq.heapify(self._agenda)

    def _compute(self, action: Action) -> Event:
        try:
            return self._forward(action) if action.kind == "F" else self._backward(action)
        except NotFinite:
            return PassFailed(action.module, action.mini_batch, NOT_FINITE)
        except Exception as error:
            self.tracebacks[action.module] = traceback.format_exc()
            return PassFailed(action.module, action.mini_batch, failure_reason(error))

    def _forward(self, action: Action) -> Event:
        number, mini_batch = action.module, action.mini_batch
        is_first, is_last = number == 1, number == len(self._modules)
        batch, num_samples = self._batch(mini_batch)
        inputs = None if is_first else self._payloads.pop(Action(number - 1, "F", mini_batch))
        forwarded = self._modules[number].forward(
            mini_batch, inputs, batch if is_first or is_last else None, num_samples
        )
        if is_last:
            del self._batches[mini_batch]
        else:
            self._payloads[action] = forwarded.outputs
        self._versions[number, mini_batch] = forwarded.version
        return ForwardFinished(number, mini_batch, forwarded.version, forwarded.loss)

    def _batch(self, mini_batch: int) -> tuple[Any, int]:
        """Module 1 fetches it; later modules of a resumed run may be the first to ask."""
        if mini_batch not in self._batches:
            self._batches[mini_batch] = self._fetch(mini_batch)
        return self._batches[mini_batch]

    def _fetch(self, mini_batch: int) -> tuple[Any, int]:
        batch, num_samples = self._mini_batches.fetch(mini_batch, self._device)
        if self._device.type != "cpu":  # datasets give CPU tensors
            batch = to_device(batch, self._device)
        return batch, num_samples

    def _backward(self, action: Action) -> Event:
        number, mini_batch = action.module, action.mini_batch
        is_last = number == len(self._modules)
        module = self._modules[number]
        gradients = None if is_last else self._payloads.pop(Action(number + 1, "B", mini_batch))
        upstream = module.backward(mini_batch, gradients)
        if number > 1:
            self._payloads[action] = upstream
        return BackwardFinished(number, mini_batch, module.version)

    def _step(self, number: int, mini_batch: int) -> Event:
        module = self._modules[number]
        version = module.version
        try:
            module.step(mini_batch)
        except NotFinite:
            return PassFailed(number, mini_batch, NOT_FINITE)
        except Exception as error:
            self.tracebacks[number] = traceback.format_exc()
            return PassFailed(number, mini_batch, failure_reason(error))
        spent, self._spent[number] = self._spent[number], _Spent()
        update = module.last_update
        self.rows.append(
            ModuleRow(
                module=number,
                mini_batch=mini_batch,
                time=self._time,
                staleness=version - self._versions.pop((number, mini_batch)),
                loading=0.0,
                forward=spent.forward,
                backward=spent.backward,
                step=0.0,
                waiting_for_inputs=spent.for_inputs,
                waiting_for_gradients=spent.for_gradients,
                waiting_for_others=spent.for_others,
                in_flight=module.in_flight,
                learning_rate=update.learning_rate,
                factor=update.factors[0],
            )
        )
        return ModuleUpdated(number, module.version)
