"""Settings -> the parts of a decoupled run: network, mini-batches, schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from gruppetto.decoupled.memory import bytes_in_flight
from gruppetto.decoupled.methods import Method
from gruppetto.decoupled.network import Network
from gruppetto.decoupled.schedule import Schedule
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.errors import InvalidSetting
from gruppetto.runs.decoupled.settings import DecoupledSettings, write_method
from gruppetto.runs.parts import Ingredients, check_need, count_mini_batches, read_device
from gruppetto.runs.settings import Target
from gruppetto.staleness import COMPENSATIONS, MODULATIONS, NoCompensation
from gruppetto.training.clipping import CLIPS
from gruppetto.training.evaluating import evaluate_model
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.server import Updating
from gruppetto.training.task import Task

__all__ = [
    "DecoupledParts",
    "Mark",
    "build_decoupled_parts",
    "plan_schedule",
    "predict_bytes",
]

#: What a module hands in of a version.
Mark: TypeAlias = Literal["nothing", "weights", "state"]
#: Vectors as large as a module's weights: they themselves, its gradient, two of optimizer state
#: (Adam's), the model that evaluations load, a snapshot on its way.
_VECTORS: Final = 6


@dataclass(frozen=True)
class DecoupledParts:
    """Everything that engines and the collector need."""

    settings: DecoupledSettings
    task: Task
    network: Network
    mini_batches: MiniBatches
    schedule: Schedule
    target: Target | None
    device: torch.device

    @property
    def method(self) -> Method:
        """Of decoupled backpropagation."""
        return self.network.method

    @property
    def is_evaluated(self) -> bool:
        """Whether there is anything to evaluate, and it is wanted."""
        has_any = self.task.test is not None or self.task.evaluate is not None
        return self.settings.evaluate != "off" and has_any

    @property
    def last_version(self) -> int | None:
        """The last version that all modules come to; None in a run that something else ends."""
        return self.schedule.last_version(1)

    def samples_through(self, version: int) -> int:
        """Samples of the first so many mini-batches."""
        epochs, more = divmod(version, self.mini_batches.per_epoch)
        return epochs * self.mini_batches.samples_per_epoch + more * self.settings.batch_size

    def crosses(self, version: int, epochs: float) -> bool:
        """Whether the update that makes a version crosses a multiple of so many epochs."""
        every = epochs * self.mini_batches.samples_per_epoch
        samples = self.samples_through(version), self.samples_through(version - 1)
        return int(samples[0] / every) > int(samples[1] / every)

    def saves(self, version: int) -> bool:
        """Whether a network version is saved: at each epoch."""
        return self._is_of_network(version) and self.crosses(version, 1.0)

    def evaluates(self, version: int) -> bool:
        """Whether a network version is evaluated."""
        is_due = self._is_of_network(version) and self.is_evaluated
        return is_due and self.crosses(version, self.settings.evaluate_every)

    def marks(self, version: int) -> Mark:
        """What every module hands in when it has a version; besides, its state when it ends."""
        if self.saves(version):
            return "state"
        return "weights" if self.evaluates(version) else "nothing"

    def _is_of_network(self, version: int) -> bool:
        # With tail=drop some modules end earlier than others.
        return version > 0 and (self.last_version is None or version <= self.last_version)

    def evaluate(self, version: int, snapshots: dict[int, Snapshot]) -> dict[str, float]:
        """The task's metrics at a network version.

        Args:
            version: of all modules; keys the random stream.
            snapshots: module -> its snapshot.

        Raises:
            TaskError: the task's evaluation failed.
        """
        batches = range(self.settings.recalibrate_bn)
        return evaluate_model(
            self.task,
            self.network.load(snapshots),
            self.device,
            version=version,
            seed=self.settings.seed,
            recalibration=[self.mini_batches.fetch(n, self.device)[0] for n in batches],
        )

    def evaluate_initial(self) -> dict[str, float]:
        """The task's metrics at the weights that the run begins with, before it has begun.

        Raises:
            TaskError: the task's evaluation failed.
        """
        return evaluate_model(
            self.task, self.network.model, self.device, version=0, seed=self.settings.seed
        )

    def about(self) -> dict[str, Any]:
        """What an update's bits depend on, besides versions: to be recorded."""
        return {
            "modules": [sorted(n for n, _ in s.named_parameters()) for s in self.network.stages]
        }


def plan_schedule(settings: DecoupledSettings, num_per_epoch: int) -> Schedule:
    """The schedule of a run.

    Raises:
        InvalidSetting: a run that is over before the first module has applied anything.
    """
    method = settings.method
    total = None
    if settings.epochs is not None:
        total = count_mini_batches(settings.epochs, num_per_epoch)
    if settings.tail == "drop" and total is not None and total <= method.delay(1):
        raise InvalidSetting(
            f"tail drop: module 1 applies nothing in a run of {total} mini-batch(es), as "
            f"{method.delay(1)} are in flight at its end; expected a longer run, fewer modules or "
            "tail drain"
        )
    return Schedule(
        method.delays,
        total,
        settings.tail,
        barrier=method.schedule == "barrier",
        updates=settings.updates,
    )


def predict_bytes(network: Network, updating: Updating) -> int:
    """Bytes that all modules take at most, roughly: weights and what belongs to them, and what is
    in flight."""
    more = 0 if updating.compensation is None else updating.compensation.num_vectors
    method = network.method
    return sum(
        (_VECTORS + more) * sizes.weights + bytes_in_flight(sizes, method.keeps, delay)
        for sizes, delay in zip(network.probe.modules, method.delays, strict=True)
    )


def _check_past(updating: Updating, method: Method) -> None:
    modulation, compensation = updating.modulation, updating.compensation
    needed = [
        name
        for name, is_needed in (
            ("compensation", not isinstance(compensation, NoCompensation | None)),
            ("a modulation by distance", modulation is not None and modulation.needs_distance),
        )
        if is_needed
    ]
    if needed and any(method.delays) and method.keeps != "graph-on-copy":
        raise InvalidSetting(
            f"decouple: {' and '.join(needed)} needs the weights of the forward pass; expected a "
            f"method that keeps them (ddg, fdg), got {write_method(method)}"
        )


def build_decoupled_parts(
    settings: DecoupledSettings, ingredients: Ingredients, *, is_checked: bool = False
) -> DecoupledParts:
    """Build and check everything; nothing is written.

    Args:
        settings: the run's.
        ingredients: what they cannot write down.
        is_checked: another process has done what takes long and only checks.

    Raises:
        UsageError: whatever cannot work, in one sentence.
    """
    device = read_device(settings.device)
    task, method = ingredients.task, settings.method
    mini_batches = MiniBatches(task, settings.batch_size, settings.seed)
    schedule = plan_schedule(settings, mini_batches.per_epoch)
    updating = Updating(
        optimizer=ingredients.optimizer,
        schedule=ingredients.schedule,
        clip=None if settings.clip is None else CLIPS.parse(settings.clip),
        modulation=MODULATIONS.parse(settings.modulation),
        compensation=COMPENSATIONS.parse(settings.compensation),
    )
    network = Network(
        task,
        method,
        settings.begins,
        updating,
        settings.seed,
        mini_batches,
        device,
        ingredients.initial,
    )
    _check_past(updating, method)
    check_need(
        predict_bytes(network, updating),
        settings.memory,
        "weights and mini-batches in flight",
        "fewer modules, a smaller batch size or fr, which keeps inputs only",
    )
    parts = DecoupledParts(
        settings=settings,
        task=task,
        network=network,
        mini_batches=mini_batches,
        schedule=schedule,
        target=None if settings.target is None else Target(settings.target),
        device=device,
    )
    # A metric that does not exist is better known before the first epoch.
    if parts.target is not None and not is_checked:
        parts.target.is_reached(parts.evaluate_initial())
    return parts
