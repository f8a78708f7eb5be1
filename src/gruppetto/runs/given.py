"""What callers give -> values of settings and the objects beside them, for runs of all kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.protocols import GUARDS
from gruppetto.runs.parts import Ingredients
from gruppetto.spec import Registry
from gruppetto.staleness import COMPENSATIONS, MODULATIONS
from gruppetto.training.clipping import CLIPS
from gruppetto.training.optimizers import OptimizerFactory, OptimizerSpec, Schedule, parse_optimizer
from gruppetto.training.task import Task
from gruppetto.training.tasks import load_task, resolve_data, resolve_model, resolve_task

__all__ = ["refuse_decoupled", "take_objects", "take_task", "write_specs"]

#: What only decoupled runs are told.
_DECOUPLED = ("tail", "cuts", "balance", "pass_times")


def refuse_decoupled(values: Mapping[str, Any]) -> None:
    """Say what is missing beside options of decoupled runs.

    Raises:
        InvalidSetting: there is one.
    """
    for key in _DECOUPLED:
        if values.get(key) not in (None, ()):
            raise InvalidSetting(
                f"{key.replace('_', ' ')} is for decoupled runs; expected it with --decouple "
                "METHOD:modules=K"
            )


def take_task(task: Task | str, loaded: Task | None, values: dict[str, Any]) -> Task:
    """The task itself; its name, model and data among the values become those to be recorded.

    Args:
        task: an object, or a name.
        loaded: what is behind the name, where the caller has loaded it already.
        values: of the settings; changed.

    Raises:
        TaskError: it cannot be loaded, or takes no model or data.
    """
    if "model" in values:
        values["model"] = resolve_model(values["model"])
    if "data" in values:
        values["data"] = resolve_data(values["data"])
    if loaded is None:
        loaded = _find_task(task, values)
    if not isinstance(loaded, Task):
        raise TaskError(f"task: expected a Task or its name, got {type(loaded).__name__}")
    values["task"] = resolve_task(task) if isinstance(task, str) else loaded.name
    values["task_is_reference"] = isinstance(task, str)
    return loaded


def write_specs(values: dict[str, Any], registries: Sequence[tuple[str, Registry[Any]]]) -> None:
    """Write objects among the values as their specs: those of all runs, and of some registries.

    Raises:
        InvalidSetting: one cannot be read.
    """
    values.setdefault("guard", "loss")
    common: list[tuple[str, Registry[Any]]] = [
        ("modulation", MODULATIONS),
        ("compensation", COMPENSATIONS),
        ("clip", CLIPS),
        ("guard", GUARDS),
    ]
    for key, registry in [*common, *registries]:
        if key in values:
            values[key] = registry.format(registry.parse(values[key]))


def take_objects(
    task: Task,
    values: dict[str, Any],
    schedule: Schedule | None,
    initial: Mapping[str, Tensor] | str | Path | None,
) -> Ingredients:
    """The objects of a run; optimizer, batch size and length are filled in among the values.

    Raises:
        InvalidSetting: one is missing, or cannot be used.
    """
    factory = _optimizer(values.pop("optimizer", None), task)
    values["optimizer"] = _nameable(factory)
    values["has_schedule"] = schedule is not None
    if "batch_size" not in values:
        if task.batch_size is None:
            raise InvalidSetting("a batch size is required for this task, like 32")
        values["batch_size"] = task.batch_size
    if not values.keys() & {"epochs", "updates", "max_time"}:
        if task.epochs is None:
            raise InvalidSetting("a run needs an end: give epochs, updates or max_time")
        values["epochs"] = task.epochs
    return Ingredients(task, factory, schedule, _initial(initial))


def _find_task(task: Task | str, values: Mapping[str, Any]) -> Task:
    """The task itself; ``model`` and ``data`` among the values go into loading it.

    Raises:
        TaskError: it cannot be loaded, or takes no model or data.
    """
    model, data = values.get("model"), values.get("data")
    if isinstance(task, str):
        return load_task(task, model=model, data=data)
    if model is not None or data is not None:
        raise InvalidSetting(
            "model and data choose what a task's name loads; expected them with a name, got them "
            "with a Task object, which holds its own"
        )
    return task


def _optimizer(given: object, task: Task) -> OptimizerFactory:
    if given is None:
        given = task.default_optimizer()
    if isinstance(given, str):
        return parse_optimizer(given)
    if given is None:
        raise InvalidSetting(
            "an optimizer is required for this task, like sgd:lr=0.1 or "
            "gp.optimizer(torch.optim.SGD, lr=0.1)"
        )
    if isinstance(given, OptimizerSpec) or (callable(given) and not isinstance(given, type)):
        return given
    raise InvalidSetting(
        "optimizer: expected a spec like sgd:lr=0.1, gp.optimizer(...) or a function of the model, "
        f"got {given!r}"
    )


def _nameable(factory: OptimizerFactory) -> str | None:
    """The optimizer as a spec that reads back as the same one; None where there is none."""
    if isinstance(factory, OptimizerSpec):
        try:
            if parse_optimizer(str(factory)) == factory:
                return str(factory)
        except InvalidSetting:
            pass
    return None


def _initial(given: Mapping[str, Tensor] | str | Path | None) -> Mapping[str, Tensor] | None:
    if given is None or isinstance(given, Mapping):
        return given
    path = Path(given)
    if not path.is_file():
        raise InvalidSetting(f"initial weights: {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).split("\n")[0]
        raise InvalidSetting(f"initial weights: {path} cannot be read: {first}") from None
    if not isinstance(loaded, Mapping):
        raise InvalidSetting(f"initial weights: {path} holds no state_dict")
    return loaded
