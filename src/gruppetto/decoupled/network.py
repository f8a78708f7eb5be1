"""A model, its chain of blocks, and the modules it is cut into."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gruppetto.decoupled.chain import Chain, chain_of, model_inputs
from gruppetto.decoupled.memory import ForwardCount, StageBytes
from gruppetto.decoupled.methods import Method
from gruppetto.decoupled.module import Module, Place
from gruppetto.decoupled.replica import as_payload, run_stage
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.decoupled.stage import tensors_of
from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.training.building import build_model, build_scheduler, check_rate
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.optimizers import build_optimizer, momentum_of
from gruppetto.training.parameters import hash_tensors
from gruppetto.training.randomness import Stream, seed_everything
from gruppetto.training.server import Part, Server, Updating
from gruppetto.training.task import Task, to_device

__all__ = ["Network", "Probe", "build_chain"]


@dataclass(frozen=True)
class Probe:
    """What one full mini-batch leaves at each module, in bytes."""

    #: Crossing the cut behind module k = 1..K − 1.
    cuts: tuple[int, ...]
    #: What it takes in module k = 1..K.
    modules: tuple[StageBytes, ...]
    #: Whether a tuple crosses the cut behind module k = 1..K − 1.
    tuples: tuple[bool, ...]


def build_chain(
    task: Task,
    mini_batches: MiniBatches,
    seed: int,
    device: torch.device,
    initial: Mapping[str, Tensor] | None = None,
    cuts: Sequence[str] = (),
) -> tuple[nn.Module, Chain]:
    """The task's model, as every run of that seed builds it, and its chain.

    Args:
        task, seed, device, initial: of the run.
        mini_batches: the first one is an example of what the model takes.
        cuts: names of blocks to cut at, as far as they are known.

    Raises:
        TaskError: the model cannot be built.
        InvalidSetting: it cannot be cut.
    """
    model = build_model(task, seed, device, initial)
    batch, _ = mini_batches.fetch(0, device)
    return model, chain_of(model, model_inputs(task, to_device(batch, device)), cuts)


class Network:
    """A model in K modules.

    Args:
        task: builds the model.
        method: of decoupled backpropagation; says K.
        begins: names of the blocks at which modules 2..K begin.
        updating: optimizer, schedule, clipping, modulation, compensation, per module.
        seed: the run's.
        mini_batches: of the run.
        device: where it lives.
        initial: weights to start from, as a ``state_dict``.

    Raises:
        TaskError: the model cannot be built or trained.
        InvalidSetting: it cannot be cut there, or the optimizer cannot be used.
    """

    def __init__(
        self,
        task: Task,
        method: Method,
        begins: Sequence[str],
        updating: Updating,
        seed: int,
        mini_batches: MiniBatches,
        device: torch.device,
        initial: Mapping[str, Tensor] | None = None,
    ) -> None:
        if len(begins) != method.modules - 1:
            raise InvalidSetting(
                f"decouple: {method.modules} modules begin at {method.modules - 1} cuts; got "
                f"{len(begins)}"
            )
        self.task = task
        self.method = method
        self._updating = updating
        self._seed = seed
        self._mini_batches = mini_batches
        self._device = device
        self.model, self.chain = build_chain(task, mini_batches, seed, device, initial, begins)
        #: What evaluations load versions into, made before flat vectors tie storages together.
        self._evaluated = copy.deepcopy(self.model)
        self.stages = self.chain.stages(begins)
        self._names = [self._names_of(stage) for stage in self.stages]
        optimizer = build_optimizer(updating.optimizer, self.model, task.param_groups)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(p.requires_grad and id(p) in trained for p in self.model.parameters()):
            raise TaskError("the optimizer holds no parameter of the model that needs a gradient")
        # Modules build theirs later, perhaps in processes of their own.
        check_rate(optimizer, updating.modulation)
        #: Of the optimizer; 0 where it has none.
        self.momentum = momentum_of(optimizer)
        if updating.schedule is not None:
            build_scheduler(updating.schedule, optimizer, updating.rate_scale)
        self.probe = self._probe()
        if any(method.delays):
            _check_copies(self.model)

    @property
    def num_modules(self) -> int:
        """K."""
        return len(self.stages)

    def module(self, number: int) -> Module:
        """Module k = 1..K, which trains its part of :attr:`model` in place; ask once for each.

        Raises:
            InvalidSetting: optimizer, schedule, compensation or modulation cannot be used.
        """
        server = Server(
            self.task,
            self._updating,
            self._seed,
            self._mini_batches.samples_per_epoch,
            self._device,
            part=Part(self.model, self._names[number - 1]),
        )
        probe = self.probe
        place = Place(
            number,
            self.num_modules,
            # Trained weights only, in one vector.
            replace(probe.modules[number - 1], weights=server.weights.num_bytes),
            takes_tuple=number > 1 and probe.tuples[number - 2],
        )
        stage = self.stages[number - 1]
        return Module(place, stage, server, self.task, self.method, self._seed, self._device)

    def _names_of(self, stage: nn.Module) -> frozenset[str]:
        ids = {id(t) for t in (*stage.parameters(), *stage.buffers())}
        everything = (*self.model.named_parameters(), *self.model.named_buffers())
        return frozenset(name for name, tensor in everything if id(tensor) in ids)

    # ----------------------------------------------------------- versions

    def load(self, snapshots: Mapping[int, Snapshot]) -> nn.Module:
        """The whole model at a network version, in training mode; the same object every time.

        Args:
            snapshots: module -> its snapshot.
        """
        values = _merge(snapshots)
        named: dict[str, Tensor] = {
            f"parameter/{n}": p.data for n, p in self._evaluated.named_parameters()
        }
        named.update({f"buffer/{n}": b for n, b in self._evaluated.named_buffers()})
        for name, tensor in named.items():
            if name in values:
                tensor.copy_(values[name])
        return self._evaluated

    def weights_sha256(self, snapshots: Mapping[int, Snapshot]) -> str:
        """Hash of all parameters, frozen ones included, in ``named_parameters`` order."""
        return hash_tensors(dict(self.load(snapshots).named_parameters()))

    def state_sha256(self, snapshots: Mapping[int, Snapshot]) -> str:
        """Hash of parameters, buffers, and of each module's optimizer and compensation.

        Args:
            snapshots: with state.
        """
        model = self.load(snapshots)
        named: dict[str, Tensor] = dict(model.named_parameters())
        named.update({f"buffer {n}": b for n, b in model.named_buffers()})
        for number in sorted(snapshots):
            snapshot = snapshots[number]
            for name in sorted(snapshot.tensors):
                if name.startswith(("optimizer/", "compensation/")):
                    named[f"module {number} {name}"] = snapshot.tensors[name]
            server = snapshot.plain["server"]
            told = {key: server[key] for key in ("optimizer", "compensation")}
            named[f"module {number} {json.dumps(told, sort_keys=True)}"] = torch.zeros(0)
        return hash_tensors(named)

    # ------------------------------------------------------------- probing

    def _probe(self) -> Probe:
        """Run one mini-batch through the stages, and leave no trace of it."""
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        batch, _ = self._mini_batches.fetch(0, self._device)
        batch = to_device(batch, self._device)
        seed_everything(self._seed, Stream.FORWARD, 0, self._device)
        cuts: list[int] = []
        modules: list[StageBytes] = []
        tuples: list[bool] = []
        outputs: Any = None
        batch_bytes = _batch_bytes(batch)
        for number, stage in enumerate(self.stages, 1):
            weights = list(stage.parameters())
            count = ForwardCount((*weights, *stage.buffers()), outputs or ())
            with count:
                if number == 1:
                    outputs = self.task.forward(stage, batch)
                else:
                    outputs = run_stage(stage, outputs, as_tuple=tuples[-1])
                if number == self.num_modules:
                    outputs = self.task.compute_loss(outputs, batch)
            for tensor in tensors_of(outputs):
                count.keep(tensor)
            if number < self.num_modules:
                tuples.append(isinstance(outputs, (tuple, list)))
                _check_outputs(outputs, number)
                outputs = as_payload(outputs)
                cuts.append(sum(t.nbytes for t in outputs))
                outputs = tuple(t.requires_grad_() if t.is_floating_point() else t for t in outputs)
            needs_batch = number in (1, self.num_modules)
            modules.append(
                StageBytes(
                    graph=count.graph,
                    gaps=count.gaps,
                    largest=count.largest,
                    inputs=batch_bytes if number == 1 else cuts[number - 2],
                    outputs=cuts[number - 1] if number < self.num_modules else 0,
                    batch=batch_bytes if needs_batch else 0,
                    weights=sum(p.nbytes for p in weights),
                )
            )
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer  # it may have put another in its place
            buffer.copy_(value)
        return Probe(tuple(cuts), tuple(modules), tuple(tuples))


def _check_copies(model: nn.Module) -> None:
    """After a forward pass: modules with delays run on copies of their stages."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise TaskError(
                    f"the model keeps {'.'.join(filter(None, (name, key)))!r} of a forward pass "
                    "with its graph, and so cannot be copied for mini-batches in flight; detach "
                    "it, or use weight_norm and spectral_norm of torch.nn.utils.parametrizations"
                )


def _check_outputs(outputs: Any, number: int) -> None:
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if not all(isinstance(t, Tensor) for t in tensors):
        raise InvalidSetting(
            f"decouple: only tensors can cross a cut; expected module {number} to give one or a "
            f"tuple of them, got {[type(t).__name__ for t in tensors]}"
        )


def _merge(snapshots: Mapping[int, Snapshot]) -> dict[str, Tensor]:
    return {name: t for snapshot in snapshots.values() for name, t in snapshot.tensors.items()}


def _batch_bytes(batch: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(batch)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
