"""The parameter server's arithmetic: contributions -> one optimizer step. All of it is here.

Order of an update: modulate and compensate each contribution, combine them, clip, take one
optimizer step, move the buffers, step the schedule. Momentum, decay and schedules live here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gruppetto.errors import GruppettoError, TaskError
from gruppetto.protocols.messages import Contribution
from gruppetto.staleness import Compensation, Modulation
from gruppetto.staleness.modulation import ApplyTo
from gruppetto.training.buffers import BufferUpdate
from gruppetto.training.building import build_model, build_scheduler, check_rate, scale_rate
from gruppetto.training.clipping import Clip
from gruppetto.training.combining import combine
from gruppetto.training.compensation import build_compensator
from gruppetto.training.evaluating import evaluate_model
from gruppetto.training.learner import Gradient, Weights
from gruppetto.training.optimizers import OptimizerFactory, Schedule, build_optimizer, momentum_of
from gruppetto.training.packing import GradientsPacking, WeightsPacking
from gruppetto.training.parameters import Flat, Layout, hash_tensors, squared_distance
from gruppetto.training.ranges import OptimizerOnRanges
from gruppetto.training.task import Task

__all__ = ["AppliedUpdate", "Part", "Server", "Updating", "combine"]


@dataclass(frozen=True)
class Updating:
    """How the server updates: everything about it that a user chooses."""

    optimizer: OptimizerFactory
    schedule: Schedule | None = None
    clip: Clip | None = None
    modulation: Modulation | None = None
    compensation: Compensation | None = None
    #: Multiplies every group's learning rate once, at the start; schedules start from there.
    rate_scale: float = 1.0

    @property
    def apply_to(self) -> ApplyTo:
        """What modulation's factors scale."""
        return "learning-rate" if self.modulation is None else self.modulation.applies_to


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """What an update did, for the record."""

    #: Of the first parameter group, modulation included.
    learning_rate: float
    factors: tuple[float, ...]
    #: Of the first parameter group, before modulation.
    base_rate: float = 0.0
    #: α₀ Σ n_i s_i / Σ n_i: base rate times mean factor, whatever the factors scale.
    effective_rate: float = 0.0


@dataclass(frozen=True)
class Part:
    """Of a model that is built already, what one server of several takes care of."""

    model: nn.Module
    #: Names of its parameters and buffers.
    names: frozenset[str]


class Server:
    """Weights, buffers, optimizer and schedule of a run.

    Args:
        task: builds the model.
        updating: optimizer, schedule, clipping, modulation, compensation.
        seed: the run's; initial weights are drawn under it.
        samples_per_epoch: for schedules by epoch.
        device: where weights live.
        initial: weights to start from, as a ``state_dict``.
        part: of a model that others serve the rest of; such a server makes no replicas, and may
            have nothing to train. None for a model of its own.

    Raises:
        TaskError: the model cannot be built or trained (lazy modules, nothing to train).
        InvalidSetting: the optimizer or schedule cannot be used; ``initial`` does not fit.
    """

    def __init__(
        self,
        task: Task,
        updating: Updating,
        seed: int,
        samples_per_epoch: int,
        device: torch.device,
        initial: Mapping[str, Tensor] | None = None,
        part: Part | None = None,
    ) -> None:
        self._updating = updating
        self._samples_per_epoch = samples_per_epoch
        self._device = device
        self.task = task
        self._part = part
        self.model = build_model(task, seed, device, initial) if part is None else part.model
        optimizer = build_optimizer(updating.optimizer, self.model, task.param_groups)
        check_rate(optimizer, updating.modulation)
        scale_rate(optimizer, updating.rate_scale)
        owned = {id(p) for name, p in self.model.named_parameters() if self._owns(name)}
        groups = [[p for p in g["params"] if id(p) in owned] for g in optimizer.param_groups]
        self.layout = Layout(self.model, groups)
        if not self.layout.slots and part is None:
            raise TaskError("the optimizer holds no parameter of the model that needs a gradient")
        #: A replica for learners, made before the flat vector ties storages together.
        self._replica = copy.deepcopy(self.model) if part is None else None
        self.weights = self.layout.adopt(self.model, device)
        self._optimizer = OptimizerOnRanges(
            optimizer, dict(self.model.named_parameters()), self.layout, self.weights
        )
        self._compensator = build_compensator(updating.compensation, self.layout, self.weights)
        self._buffers = BufferUpdate(self.model)
        self._scheduler = None
        if updating.schedule is not None:
            self._scheduler = build_scheduler(updating.schedule, optimizer, updating.rate_scale)
        self._samples_applied = 0
        #: What the last update did.
        self.last_update = AppliedUpdate(0.0, ())

    # ------------------------------------------------------------- learners

    def replica(self) -> nn.Module:
        """A copy of the model as it was at the start, in training mode, for a learner."""
        if self._replica is None:
            raise GruppettoError("the server of a part has no replica of the whole: a bug")
        return copy.deepcopy(self._replica)

    def _owns(self, name: str) -> bool:
        return self._part is None or name in self._part.names

    def snapshot(self) -> Weights:
        """The current version, copied."""
        return Weights(self.weights.clone(), self._buffers.others())

    def publish_to(self, place: Weights) -> None:
        """Copy the current version to a place made by :meth:`packings`."""
        place.copy_(Weights(self.weights, self._buffers.others()))

    def packings(self) -> tuple[WeightsPacking, GradientsPacking]:
        """How versions and gradients of this model lie in memory that processes share."""
        return (
            WeightsPacking(self.layout, self._buffers.others()),
            GradientsPacking(self.layout, BufferUpdate(self.replica())),
        )

    # -------------------------------------------------------------- updates

    @property
    def modulation(self) -> Modulation | None:
        """What a late gradient is worth; None where all count fully."""
        return self._updating.modulation

    @property
    def needs_past(self) -> bool:
        """Whether :meth:`apply` needs the weights each gradient was computed on."""
        modulation = self._updating.modulation
        return self._compensator is not None or (
            modulation is not None and modulation.needs_distance
        )

    def apply(
        self,
        contributions: Sequence[Contribution],
        gradients: Sequence[Gradient],
        past: Sequence[Flat] = (),
    ) -> None:
        """Take one update.

        Args:
            contributions: in the order in which they are summed.
            gradients: theirs, in that order; the server's from now on, to be changed in place.
            past: the weights each gradient was computed on, in that order, where
                :attr:`needs_past`; versions that several share are given several times.
        """
        if self._device.type != "cpu":  # those of other processes come in the CPU's memory
            gradients = [g.to(self._device) for g in gradients]
        num_samples = [c.num_samples for c in contributions]
        factors = self._factors(contributions, past)
        self._compensate(contributions, gradients, past)
        combined, rate = combine(
            [g.flat for g in gradients], num_samples, factors, self._updating.apply_to
        )
        absent = frozenset.intersection(*(g.absent for g in gradients))
        if self._updating.clip is not None:
            self._updating.clip.apply(combined)
        base_rate = self._learning_rates()[0]
        learning_rate = base_rate * rate
        self._step(combined, absent, rate)
        newest = max(range(len(contributions)), key=lambda i: (contributions[i].version, i))
        self._buffers.combine([g.news for g in gradients], num_samples, newest)
        self._step_schedule(sum(num_samples))
        total = sum(n * s for n, s in zip(num_samples, factors, strict=True))
        effective_rate = base_rate * (total / sum(num_samples))
        self.last_update = AppliedUpdate(learning_rate, tuple(factors), base_rate, effective_rate)

    @property
    def momentum(self) -> float:
        """Of the optimizer; 0 where it has none."""
        return momentum_of(self._optimizer.optimizer)

    def _learning_rates(self) -> list[float]:
        """Of each parameter group, before modulation."""
        return [float(group["lr"]) for group in self._optimizer.optimizer.param_groups]

    def _factors(self, contributions: Sequence[Contribution], past: Sequence[Flat]) -> list[float]:
        modulation = self._updating.modulation
        if modulation is None or not modulation.needs_distance:
            return [_factor(c) for c in contributions]
        rate = self._learning_rates()[0]
        distances = {c.version: 0.0 for c in contributions if c.staleness == 0}
        factors = []
        for contribution, then in zip(contributions, past, strict=True):
            version = contribution.version
            if version not in distances:
                distances[version] = squared_distance(self.weights, then)
            factors.append(modulation.factor_at_distance(distances[version], rate))
        return factors

    def _compensate(
        self,
        contributions: Sequence[Contribution],
        gradients: Sequence[Gradient],
        past: Sequence[Flat],
    ) -> None:
        if self._compensator is None:
            return
        for contribution, gradient, then in zip(contributions, gradients, past, strict=True):
            then = then.to(self._device)
            self._compensator.compensate(gradient.flat, self.weights, then, contribution.staleness)

    def _step(self, combined: Flat, absent: frozenset[int], rate: float) -> None:
        if rate == 0.0:
            return  # every gradient was left out: momentum and moments keep still, too
        if self._compensator is None:
            self._optimizer.step(combined, absent, rate)
            return
        rates = self._learning_rates()
        self._compensator.before_step(self.weights)
        self._optimizer.step(combined, absent, rate)
        self._compensator.after_step(self.weights, rates, rate)

    def _step_schedule(self, num_samples: int) -> None:
        before, self._samples_applied = (
            self._samples_applied,
            self._samples_applied + num_samples,
        )
        if self._scheduler is None or self._updating.schedule is None:
            return
        steps = 1
        if self._updating.schedule.every == "epoch":
            per_epoch = self._samples_per_epoch
            steps = self._samples_applied // per_epoch - before // per_epoch
        for _ in range(steps):
            self._scheduler.step()

    # ---------------------------------------------------------- measurement

    def weights_sha256(self) -> str:
        """Hash of all parameters, frozen ones included, in ``named_parameters`` order."""
        return hash_tensors(dict(self.model.named_parameters()))

    def state_sha256(self) -> str:
        """Hash of parameters, buffers, optimizer state and what compensation remembers."""
        tensors, plain = self._optimizer.state()
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        named.update({f"buffer {n}": b for n, b in self.model.named_buffers()})
        named.update({f"optimizer {n}": t for n, t in tensors.items()})
        named[json.dumps(plain, sort_keys=True)] = torch.zeros(0)
        if self._compensator is not None:
            tensors, plain = self._compensator.state()
            named.update({f"compensation {n}": t for n, t in tensors.items()})
            named[f"compensation {json.dumps(plain, sort_keys=True)}"] = torch.zeros(0)
        return hash_tensors(named)

    def evaluate(
        self, version: int, seed: int, recalibration: Sequence[Any] = ()
    ) -> dict[str, float]:
        """The task's metrics at the current weights, under a random stream of its own.

        Args:
            version: of the weights, keys the random stream.
            seed: the run's.
            recalibration: batches over which BatchNorm's statistics are averaged anew, for this
                evaluation only.
        """
        return evaluate_model(
            self.task,
            self.model,
            self._device,
            version=version,
            seed=seed,
            recalibration=recalibration,
        )

    def arithmetic(self) -> dict[str, Any]:
        """What an update's bits depend on, besides versions: to be recorded."""
        optimizer = self._optimizer.optimizer
        return {
            "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "implementation": {key: optimizer.defaults.get(key) for key in ("foreach", "fused")},
            "elementwise": self._optimizer.is_elementwise,
            "dtypes": [str(dtype) for dtype in self.layout.dtypes],
            "lengths": list(self.layout.lengths),
            # First element of each segment of the flat vector; one server holds it whole.
            "segments": [0],
        }

    def release_model(self) -> nn.Module:
        """The trained model for its user: in eval mode, each parameter in its own memory."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        return self.model.eval()

    # ------------------------------------------------------- saving, loading

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resumed run needs of the server: tensors, and plain JSON values."""
        tensors, plain = self._optimizer.state()
        saved = {f"optimizer/{name}": t for name, t in tensors.items()}
        saved.update(self.model_tensors())
        compensation = None
        if self._compensator is not None:
            tensors, compensation = self._compensator.state()
            saved.update({f"compensation/{name}": t for name, t in tensors.items()})
        schedule = None
        if self._scheduler is not None:
            schedule = {k: v for k, v in self._scheduler.state_dict().items() if _is_plain(v)}
        return saved, {
            "optimizer": plain,
            "schedule": schedule,
            "compensation": compensation,
            "samples_applied": self._samples_applied,
            "state_dict": _state_dict_names(self.model),
        }

    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers themselves, not copies: all that an evaluation depends on."""
        parameters = self.model.named_parameters()
        tensors = {f"parameter/{n}": p.detach() for n, p in parameters if self._owns(n)}
        buffers = self.model.named_buffers()
        tensors.update({f"buffer/{n}": b for n, b in buffers if self._owns(n)})
        return tensors

    def load_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of what :meth:`model_tensors` gave, of this server or another."""
        for name, tensor in self.model_tensors().items():
            tensor.copy_(tensors[name])

    def load(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self.load_model(tensors)
        self._optimizer.load(_below("optimizer/", tensors), plain["optimizer"])
        if self._compensator is not None:
            self._compensator.load(_below("compensation/", tensors), plain["compensation"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(plain["schedule"])
        self._samples_applied = plain["samples_applied"]


def _factor(contribution: Contribution) -> float:
    if contribution.factor is None:
        raise GruppettoError(
            f"lease {contribution.lease}: the modulation leaves its factor to the server, which "
            "has no rule to compute it"
        )
    return contribution.factor


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _state_dict_names(model: nn.Module) -> dict[str, str]:
    """``state_dict`` key -> the name its tensor is saved under (tied weights share one)."""
    by_storage = {id(p): f"parameter/{n}" for n, p in model.named_parameters()}
    by_storage.update({id(b): f"buffer/{n}" for n, b in model.named_buffers()})
    with_ties = dict(model.named_parameters(remove_duplicate=False))
    with_ties.update(dict(model.named_buffers(remove_duplicate=False)))  # type: ignore[arg-type]
    return {key: by_storage[id(with_ties[key])] for key in model.state_dict() if key in with_ties}
