"""How one pass of a module is run: on which weights, with which random numbers, which buffers.

What a gradient belongs to is a matter of the method (:mod:`gruppetto.decoupled.methods`):

* ``graph-on-copy``: the forward pass runs on a copy of the weights, and its graph is kept. The
  backward pass then gives the gradient at the weights of the forward pass, whatever happened since.
* ``graph-on-live``: the graph refers to the live weights. Exact where they do not change between
  the passes (no delay); otherwise old activations meet new weights, as in DDG's published code.
* ``input``: the forward pass leaves only its input; the backward pass runs it forward again at the
  weights of now, with the same random numbers, and moves no buffer.

The live weights are views of the server's flat vector, which optimizers change without autograd
knowing; that is why nothing here may rely on autograd to notice a changed weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gruppetto.decoupled.memory import StageBytes
from gruppetto.decoupled.methods import Keeps, Method
from gruppetto.decoupled.replica import Payload, Replica, other_buffers, run_stage
from gruppetto.errors import InvalidSetting
from gruppetto.training.learner import NotFinite
from gruppetto.training.parameters import Flat
from gruppetto.training.randomness import Stream, seed_everything
from gruppetto.training.server import Server
from gruppetto.training.task import Task

__all__ = ["Flight", "Place", "StageRunner"]


@dataclass(frozen=True)
class Place:
    """Where a module stands in its network."""

    #: k = 1..K.
    number: int
    #: K.
    modules: int
    #: What one full mini-batch takes there.
    sizes: StageBytes = field(default_factory=StageBytes)
    #: Whether the module before it returns a tuple.
    takes_tuple: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it takes its inputs from the mini-batch itself."""
        return self.number == 1

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.number == self.modules


@dataclass(slots=True)
class Flight:
    """A mini-batch between its two passes."""

    version: int
    num_samples: int
    #: Leaves that take the input's gradient; None in the first module.
    inputs: Payload | None
    #: What the first module replays, where only inputs are kept.
    batch: Any = None
    #: The loss, or outputs, with their graph; None where only the input is kept.
    outputs: Any = None
    loss: float | None = None
    replica: Replica | None = None
    #: The live weights of the pass, where a graph on them cannot give them back.
    weights: Flat | None = None
    #: Buffers that decided what was computed, as they were before the pass.
    others: list[Tensor] = field(default_factory=list)

    def past(self, now: Flat) -> Flat:
        """The weights its gradient was computed on, where those are kept; else those of now."""
        if self.weights is not None:
            return self.weights
        return now if self.replica is None else self.replica.flat

    def tensors(self, *, with_weights: bool) -> dict[str, Tensor]:
        """What it takes to run its forward pass again; the first module's input is fetched."""
        parts: dict[str, Sequence[Tensor]] = {"input": self.inputs or (), "other": self.others}
        flat = self.weights
        if flat is None and self.replica is not None:
            flat = self.replica.flat
        if with_weights and flat is not None:
            parts["weights"] = flat.vectors
        return {f"{part}/{i}": t for part, tensors in parts.items() for i, t in enumerate(tensors)}


class StageRunner:
    """Runs the passes of one stage.

    Args:
        place: the module's number among how many.
        stage: takes a payload (the first one: the model's inputs), gives one.
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
        self._place = place
        self._stage = stage
        self._server = server
        self._task = task
        self._seed = seed
        self._device = device
        self.delay = method.delay(place.number)
        self.keeps: Keeps = "graph-on-live" if self.delay == 0 else method.keeps
        if server.needs_past and self.delay > 0 and self.keeps != "graph-on-copy":
            raise InvalidSetting(
                "decouple: compensation and modulations by distance need the weights of the "
                "forward pass; expected a method that keeps them (ddg, fdg), got one that does not"
            )
        slots = {slot.name: index for index, slot in enumerate(server.layout.slots)}
        self._slots = {
            id(p): slots[name] for name, p in server.model.named_parameters() if name in slots
        }
        live = {
            index: parameter
            for parameter in stage.parameters()
            if (index := self._slots.get(id(parameter))) is not None
        }
        self._live = [live[index] for index in range(len(slots))]
        # One that replays reads the live weights themselves.
        flat = server.weights if self.keeps == "input" else None
        self._replicas = [self._replica(flat) for _ in range(self._num_replicas)]
        self._ahead = method.leap(place.number)
        #: The weights one update before, for looking ahead.
        self._before = server.weights.clone() if self._ahead else None
        self._others = other_buffers(stage)

    @property
    def _num_replicas(self) -> int:
        if self.keeps == "graph-on-copy":
            return self.delay + 1
        return 1 if self.keeps == "input" else 0

    def _replica(self, flat: Flat | None) -> Replica:
        def slot_of(parameter: nn.Parameter) -> int | None:
            return self._slots.get(id(parameter))

        return Replica(self._stage, self._server.layout, slot_of, self._device, flat)

    def parameters(self, flight: Flight) -> Sequence[nn.Parameter]:
        """Where the gradients of a flight's graph arrive, in slot order."""
        return self._live if flight.replica is None else flight.replica.parameters

    # ---------------------------------------------------------------- passes

    def forward(self, mini_batch: int, flight: Flight, batch: Any) -> None:
        """The forward pass: leaves its outputs, or the loss, in the flight.

        Raises:
            NotFinite: the loss is infinite or not a number.
        """
        if self.delay > 0:
            self._choose_weights(mini_batch, flight)
        self._run(mini_batch, flight, batch, with_graph=self.keeps != "input")
        if flight.replica is not None:
            flight.replica.hand_back_buffers()

    def _choose_weights(self, mini_batch: int, flight: Flight) -> None:
        flight.others = [module.get_buffer(name).clone() for module, name in self._others]
        weights = self._server.weights
        if self.keeps == "graph-on-live":
            flight.weights = weights.clone()
        if self.keeps != "graph-on-copy":
            return
        replica = flight.replica = self._replicas[mini_batch % len(self._replicas)]
        replica.share_buffers()
        replica.flat.copy_(weights)
        if self._before is not None:
            moved = weights.clone()
            moved.add_(self._before, -1.0)
            replica.flat.add_(moved, self._ahead)

    def replay(self, mini_batch: int, flight: Flight) -> None:
        """The forward pass again, with a graph, at the weights of now; no buffer moves."""
        flight.replica = self._replicas[0]
        flight.replica.detach_buffers(flight.others)
        self._run(mini_batch, flight, flight.batch, with_graph=True)

    def make_again(self, mini_batch: int, flight: Flight, past: Flat) -> None:
        """The graph of a flight again as it was, after a resume; no buffer moves."""
        if self.keeps == "graph-on-copy":
            replica = self._replicas[mini_batch % len(self._replicas)]
            replica.flat.copy_(past)
        else:
            flight.weights = past
            # The live weights, in a stage whose buffers are its own.
            replica = self._replica(self._server.weights)
        flight.replica = replica
        replica.detach_buffers(flight.others)
        if flight.weights is None:
            self._run(mini_batch, flight, flight.batch, with_graph=True)
            return
        now = self._server.weights.clone()
        self._server.weights.copy_(flight.weights)
        try:
            self._run(mini_batch, flight, flight.batch, with_graph=True)
        finally:
            self._server.weights.copy_(now)

    def _run(self, mini_batch: int, flight: Flight, batch: Any, *, with_graph: bool) -> None:
        stage = self._stage if flight.replica is None else flight.replica.stage
        for tensor in flight.inputs or ():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.grad = None
                tensor.requires_grad_(True)
        if self._place.is_first:
            seed_everything(self._seed, Stream.FORWARD, mini_batch, self._device)
        else:
            number = (mini_batch << 16) + self._place.number
            seed_everything(self._seed, Stream.MODULE, number, self._device)
        with torch.set_grad_enabled(with_graph):
            if flight.inputs is None:
                flight.outputs = self._task.forward(stage, batch)
            else:
                as_tuple = self._place.takes_tuple
                flight.outputs = run_stage(stage, flight.inputs, as_tuple=as_tuple)
            if self._place.is_last:
                flight.outputs = self._task.compute_loss(flight.outputs, batch)
        if self._place.is_last:
            flight.loss = float(flight.outputs.item())
            if flight.loss - flight.loss != 0.0:
                raise NotFinite(f"loss {flight.loss}")

    # ------------------------------------------------------------ between

    def about_to_step(self) -> None:
        """The weights are about to change."""
        if self._before is not None:
            self._before.copy_(self._server.weights)

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers between passes, to be saved."""
        vectors = () if self._before is None else self._before.vectors
        return {f"before/{index}": vector for index, vector in enumerate(vectors)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`tensors` gave."""
        for name, vector in self.tensors().items():
            vector.copy_(tensors[name])
