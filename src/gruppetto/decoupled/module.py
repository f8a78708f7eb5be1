"""One module of a decoupled network: forward, backward and step, exactly. No processes, no clock.

What its passes are run on is said in :mod:`gruppetto.decoupled.passes`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gruppetto.decoupled.memory import bytes_in_flight, process_bytes
from gruppetto.decoupled.methods import Method
from gruppetto.decoupled.passes import Flight, Place, StageRunner
from gruppetto.decoupled.replica import Payload, as_payload
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.protocols.messages import Contribution
from gruppetto.staleness import NoModulation
from gruppetto.staleness.modulation import Factors, Situation
from gruppetto.training.learner import Gradient, NotFinite
from gruppetto.training.parameters import Flat
from gruppetto.training.server import AppliedUpdate, Server
from gruppetto.training.task import Task

__all__ = ["Forwarded", "Module", "Payload", "Place"]


class Forwarded(NamedTuple):
    """What a forward pass gave."""

    #: For the next module; None from the last.
    outputs: Payload | None
    #: Mean over the samples; from the last module only.
    loss: float | None
    #: The module's version at the pass.
    version: int


class Module:
    """One module: a stage of the model, and the server of its parameters.

    Args:
        place: its number among how many.
        stage: takes a payload (the first module: the model's inputs), gives one.
        server: of the stage's parameters.
        task: inputs and loss.
        method: of decoupled backpropagation.
        seed: the run's.
        device: where the stage is.

    Raises:
        InvalidSetting: compensation, or a modulation by distance, with a method that keeps no
            weights of the forward pass.
    """

    def __init__(
        self,
        place: Place,
        stage: nn.Module,
        server: Server,
        task: Task,
        method: Method,
        seed: int,
        device: torch.device,
    ) -> None:
        self.place = place
        self.number = place.number
        self.stage = stage
        self.server = server
        #: Mini-batches applied.
        self.version = 0
        self._runner = StageRunner(place, stage, server, task, method, seed, device)
        self._device = device
        self._delay = self._runner.delay
        self._keeps = self._runner.keeps
        self._shrink = method.shrink
        self._gathered = server.layout.zeros(device)
        self._views = server.layout.views(self._gathered)
        self._flights: dict[int, Flight] = {}
        #: The mini-batch that was run backward and not applied: its flight and absent slots.
        self._due: tuple[int, Flight, frozenset[int]] | None = None
        self._factors = Factors(server.modulation or NoModulation())
        # Outputs that the next module has not taken when this one has the same version: a snapshot
        # holds them, because what made them need not be here any more.
        self._next_delay = self._delay if place.is_last else method.delay(place.number + 1)
        ahead = self._delay - self._next_delay
        self._sent: deque[tuple[int, Payload, int]] = deque(maxlen=ahead)

    # ---------------------------------------------------------------- memory

    @property
    def in_flight(self) -> int:
        """Mini-batches between their forward and their backward pass."""
        return len(self._flights)

    @property
    def held_bytes(self) -> int:
        """Bytes that mini-batches in flight take now."""
        sizes = self.place.sizes
        if self._delay == 0:
            return self.in_flight * sizes.graph
        kept = sizes.inputs if self._keeps == "input" else sizes.graph + sizes.weights
        return self.in_flight * kept

    @property
    def predicted_bytes(self) -> int:
        """Bytes that mini-batches in flight take at most: at the start of a backward pass."""
        return bytes_in_flight(self.place.sizes, self._keeps, self._delay)

    @property
    def process_bytes(self) -> int:
        """Bytes that a process of its own takes for it at most, rings not counted."""
        ahead, leaves_gaps = self._delay - self._next_delay, self._device.type == "cpu"
        return process_bytes(
            self.place.sizes, self._keeps, self._delay, ahead, leaves_gaps=leaves_gaps
        )

    # ---------------------------------------------------------------- passes

    def forward(
        self, mini_batch: int, inputs: Payload | None, batch: Any, num_samples: int
    ) -> Forwarded:
        """Run a mini-batch forward and keep what its backward pass needs.

        Args:
            mini_batch: its number.
            inputs: of this module; None for the first, which takes them from the batch.
            batch: the whole mini-batch on the device, for the first and the last module.
            num_samples: in it.

        Raises:
            NotFinite: the loss is infinite or not a number.
            Exception: whatever the user's model or loss raises.
        """
        flight = Flight(self.version, num_samples, inputs, batch if self.place.is_first else None)
        self._runner.forward(mini_batch, flight, batch)
        outputs = None if self.place.is_last else as_payload(flight.outputs)
        if outputs is not None:
            self._sent.append((mini_batch, outputs, num_samples))
        self._keep(mini_batch, flight)
        return Forwarded(outputs, flight.loss, flight.version)

    def _keep(self, mini_batch: int, flight: Flight) -> None:
        if self._keeps == "input":
            flight.outputs = None
        else:
            flight.batch = None
        self._flights[mini_batch] = flight

    def backward(self, mini_batch: int, gradients: Payload | None) -> Payload | None:
        """Run a mini-batch backward; its gradient waits for :meth:`step`.

        Args:
            mini_batch: its number.
            gradients: of this module's floating outputs, in order; None for the last module.

        Returns:
            The gradient of the floating inputs, for the module before; None from the first.

        Raises:
            NotFinite: the gradient is not finite; nothing can be applied.
        """
        flight = self._flights.pop(mini_batch)
        if self._keeps == "input":
            self._runner.replay(mini_batch, flight)
        parameters = self._runner.parameters(flight)
        for parameter in parameters:
            parameter.grad = None
        self._backward(flight, gradients)
        flight.outputs = flight.batch = None  # the graph goes before anything else is made
        absent = self._gather(parameters)
        if not self._gathered.is_finite():
            raise NotFinite(f"gradient of mini-batch {mini_batch} in module {self.number}")
        self._due = mini_batch, flight, absent
        inputs, flight.inputs = flight.inputs, None
        if inputs is None:
            return None
        return self._input_gradients(inputs)

    def _backward(self, flight: Flight, gradients: Payload | None) -> None:
        if gradients is None:
            # A loss that depends on nothing raises here, as it does anywhere.
            flight.outputs.backward()
            return
        outputs = flight.outputs if isinstance(flight.outputs, (tuple, list)) else [flight.outputs]
        floating = [t for t in outputs if t.is_floating_point() or t.is_complex()]
        pairs = [(t, g) for t, g in zip(floating, gradients, strict=True) if t.requires_grad]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _input_gradients(self, inputs: Payload) -> Payload:
        given = []
        for tensor in inputs:
            if not tensor.requires_grad:
                continue
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            given.append(gradient if self._shrink == 1.0 else gradient * self._shrink)
        return as_payload(given)

    def _gather(self, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
        targets, sources, absent = [], [], []
        for index, (view, parameter) in enumerate(zip(self._views, parameters, strict=True)):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                absent.append(index)
                view.zero_()
                continue
            targets.append(view)
            sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        return frozenset(absent)

    @property
    def last_update(self) -> AppliedUpdate:
        """What the last step did."""
        return self.server.last_update

    def step(self, mini_batch: int) -> None:
        """Apply the gradient of the mini-batch that was just run backward."""
        assert self._due is not None
        number, flight, absent = self._due
        assert number == mini_batch
        self._due = None
        [factor] = self._factors.of([self._situation(self.version, flight.version)])
        staleness = self.version - flight.version
        contribution = Contribution(
            mini_batch, flight.version, staleness, flight.num_samples, factor
        )
        loss = 0.0 if flight.loss is None else flight.loss
        gradient = Gradient(self._gathered, absent, {}, loss, flight.num_samples)
        # A gradient that is not late was computed on the weights of now.
        past = [flight.past(self.server.weights)] if self.server.needs_past else []
        self._runner.about_to_step()
        self.server.apply([contribution], [gradient], past)
        self.version += 1

    def _situation(self, now: int, then: int) -> Situation:
        mean = float(self._delay)
        return Situation(now - then, mean, self.place.modules, now)

    # ------------------------------------------------------- saving, loading

    def snapshot(self, *, with_state: bool) -> Snapshot:
        """A copy of what the module is now.

        Args:
            with_state: what a resumed run needs, too: optimizer, and mini-batches in flight.
        """
        if not with_state:
            tensors, plain = self.server.model_tensors(), {}
        else:
            tensors, server = self.server.state()
            tensors.update(self._runner.tensors())
            plain = {"server": json.loads(json.dumps(server)), "flights": {}, "sent": {}}
            for mini_batch, flight in self._flights.items():
                kept = flight.tensors(with_weights=self._keeps != "input")
                tensors.update({f"flight/{mini_batch}/{n}": t for n, t in kept.items()})
                plain["flights"][str(mini_batch)] = [flight.version, flight.num_samples]
            for mini_batch, outputs, num_samples in self._sent:
                if mini_batch < self.version + self._next_delay:  # of the tail, and taken
                    continue
                plain["sent"][str(mini_batch)] = num_samples
                tensors.update({f"sent/{mini_batch}/{i}": t for i, t in enumerate(outputs)})
        copied = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        if with_state:
            plain["strides"] = _strides(copied)
        return Snapshot(self.number, self.version, copied, plain)

    def restore(
        self, snapshot: Snapshot, fetch: Callable[[int], tuple[Any, int]]
    ) -> dict[int, tuple[Payload, int]]:
        """Become what a snapshot with state shows; make the graphs of what was in flight again.

        Args:
            snapshot: of this module.
            fetch: a mini-batch on the device, and its number of samples; asked by the first
                module only.

        Returns:
            Mini-batch -> outputs that the next module has not taken, and its number of samples.
        """
        self.server.load(snapshot.tensors, snapshot.plain["server"])
        self._runner.load(snapshot.tensors)
        self.version = snapshot.version
        for number in range(snapshot.version):  # what the mean of all factors so far comes from
            self._factors.of([self._situation(number, max(0, number - self._delay))])
        self._flights.clear()
        for text, (version, num_samples) in snapshot.plain["flights"].items():
            mini_batch = int(text)
            flight = Flight(version, num_samples, None)
            if self.place.is_first:
                flight.batch, _ = fetch(mini_batch)
            else:
                flight.inputs = self._saved(snapshot, f"flight/{mini_batch}/input/")
            flight.others = list(self._saved(snapshot, f"flight/{mini_batch}/other/"))
            if self._keeps != "input":
                past = Flat(self._saved(snapshot, f"flight/{mini_batch}/weights/"))
                self._runner.make_again(mini_batch, flight, past)
            self._keep(mini_batch, flight)
        self._sent.clear()
        for text, num_samples in snapshot.plain["sent"].items():
            outputs = self._saved(snapshot, f"sent/{text}/")
            self._sent.append((int(text), outputs, num_samples))
        return {mini_batch: (outputs, samples) for mini_batch, outputs, samples in self._sent}

    def _saved(self, snapshot: Snapshot, prefix: str) -> Payload:
        names = [name for name in snapshot.tensors if name.startswith(prefix)]
        names.sort(key=lambda name: int(name[len(prefix) :]))
        strides = snapshot.plain["strides"]
        found = []
        for name in names:
            tensor = snapshot.tensors[name].to(self._device)
            if name in strides:
                laid = torch.empty_strided(tensor.shape, strides[name], dtype=tensor.dtype)
                tensor = laid.to(self._device).copy_(tensor)
            found.append(tensor)
        return tuple(found)


def _strides(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Of what was received or sent, where files would lay it out otherwise: kernels choose, and
    round, by the order of elements in memory."""
    return {
        name: list(tensor.stride())
        for name, tensor in tensors.items()
        if name.startswith(("flight/", "sent/"))
        and tensor.stride() != torch.empty(tensor.shape, device="meta").stride()
    }
