"""``gp.train``: what a caller gives -> settings and objects -> a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppetto.delays import DELAYS, Delay
from gruppetto.engines.faults import FAULT_PLANS
from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.protocols import GUARDS, PROTOCOLS, WARMUPS, Protocol, with_bound
from gruppetto.runs.execute import Run
from gruppetto.runs.local import start_early
from gruppetto.runs.parts import Ingredients
from gruppetto.runs.seconds import load_delay
from gruppetto.runs.settings import Settings, read_settings
from gruppetto.runs.start import start_run
from gruppetto.spec import Registry
from gruppetto.staleness import (
    BATCH_SCALINGS,
    COMPENSATIONS,
    MODULATIONS,
    RATE_SCALINGS,
    Compensation,
    Modulation,
)
from gruppetto.trace import Row
from gruppetto.training.clipping import CLIPS
from gruppetto.training.optimizers import OptimizerFactory, OptimizerSpec, Schedule, parse_optimizer
from gruppetto.training.task import Task
from gruppetto.training.tasks import load_task, resolve_data, resolve_model, resolve_task

__all__ = ["SAFE_MODULATION", "plan_run", "train"]

#: What asynchronous protocols get unless told otherwise: plain stale gradients at a synchronous
#: rate are the most common way for asynchronous training to fail.
SAFE_MODULATION = "inverse-mean:cap=true"


def train(
    task: Task | str,
    *,
    protocol: Protocol | str = "hardsync",
    learners: int = 4,
    batch_size: int | None = None,
    epochs: float | None = None,
    optimizer: OptimizerFactory | str | None = None,
    modulation: Modulation | str | None = None,
    compensation: Compensation | str | None = None,
    delay: Delay | str | None = None,
    delays: Mapping[int, Delay | str] | None = None,
    schedule: Schedule | None = None,
    initial: Mapping[str, Tensor] | str | Path | None = None,
    on_event: Callable[[Row], object] | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Run:
    """Train a task under a protocol.

    Args:
        task: a :class:`Task`, a built-in task's name, or ``path/to/file.py[:name]``.
        protocol: who waits for whom: ``"k-batch-async:k=4"`` or ``KBatchAsync(k=4)``.
        learners: P.
        batch_size: samples of one mini-batch, per learner. Default: the task's, unless
            ``scale_batch`` is given.
        epochs: passes over the data. Default: the task's, unless ``updates`` or ``max_time`` is
            given.
        optimizer: ``"sgd:lr=0.1"``, ``gp.optimizer(torch.optim.SGD, lr=0.1)``, or a function of
            the model. Default: the task's.
        modulation: what a late gradient is worth. Default: ``inverse-mean:cap=true`` for
            asynchronous protocols, ``none`` for the others.
        compensation: how a late gradient is changed: ``"dc-asgd"`` or ``DelayCompensation()``.
            Default: not at all.
        delay: how long a mini-batch takes, in virtual seconds. Default: always 1.
        delays: learner -> a law of its own.
        schedule: learning-rate schedule, from :func:`gruppetto.schedule`.
        initial: weights to start from: a ``state_dict``, or a file of one.
        on_event: called with every row of the trace after it is written; return True to stop.
        out: the run's folder. Default: a new one under ``runs/``.
        progress: show a bar on standard error. Default: when that is a terminal. False also
            keeps back the line that says what runs.
        **settings: ``updates``, ``max_time``, ``target``, ``clip``, ``on_late``,
            ``max_attempts``, ``max_given_up``, ``max_staleness``, ``on_stale``, ``warmup``,
            ``scale_lr``, ``scale_batch``,
            ``guard``, ``measure_gamma``, ``faults``, ``evaluate``, ``evaluate_every``,
            ``recalibrate_bn``, ``seed``, ``threads``, ``device``, ``memory``; see
            :class:`Settings`.

    Returns:
        The run: ``model``, ``history``, ``staleness``, ``result``, ``folder``.

    Raises:
        UsageError: something given cannot work; nothing was written.
        RunFailed: the run ended without its goal; its folder holds what there is.
    """
    if settings.get("engine") in (None, "local"):
        start_early()
    wanted, ingredients = plan_run(
        task,
        protocol=protocol,
        learners=learners,
        batch_size=batch_size,
        epochs=epochs,
        optimizer=optimizer,
        modulation=modulation,
        compensation=compensation,
        delay=delay,
        delays=delays or {},
        schedule=schedule,
        initial=initial,
        **settings,
    )
    return start_run(wanted, ingredients, out=out, progress=progress, on_event=on_event)


def plan_run(
    task: Task | str,
    *,
    loaded: Task | None = None,
    schedule: Schedule | None = None,
    initial: Mapping[str, Tensor] | str | Path | None = None,
    **given: Any,
) -> tuple[Settings, Ingredients]:
    """Fill in defaults and write every object as its spec; see :func:`train`.

    ``loaded`` is the task behind its name, where the caller has loaded it already.

    Raises:
        UsageError: a value cannot be used.
    """
    values = {key: value for key, value in given.items() if value is not None}
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
    values["protocol"] = _protocol(values)
    if "modulation" not in values:
        cancels = PROTOCOLS.parse(values["protocol"]).cell.cancels
        values["modulation"] = "none" if cancels else SAFE_MODULATION
        values["modulation_is_default"] = True
    values.setdefault("guard", "loss")
    registries: list[tuple[str, Registry[Any]]] = [
        ("modulation", MODULATIONS),
        ("compensation", COMPENSATIONS),
        ("warmup", WARMUPS),
        ("scale_lr", RATE_SCALINGS),
        ("scale_batch", BATCH_SCALINGS),
        ("clip", CLIPS),
        ("guard", GUARDS),
        ("faults", FAULT_PLANS),
    ]
    for key, registry in registries:
        if key in values:
            values[key] = registry.format(registry.parse(values[key]))
    if "delay" in values:
        values["delay"] = DELAYS.format(load_delay(values["delay"]))
    values["delays"] = {
        learner: DELAYS.format(load_delay(law)) for learner, law in given["delays"].items()
    }
    factory = _optimizer(values.pop("optimizer", None), loaded)
    values["optimizer"] = _nameable(factory)
    values["has_schedule"] = schedule is not None
    if "scale_batch" in values:
        values["batch_size"] = _scaled_batch_size(values)
    elif "batch_size" not in values:
        if loaded.batch_size is None:
            raise InvalidSetting("a batch size is required for this task, like 32")
        values["batch_size"] = loaded.batch_size
    if not values.keys() & {"epochs", "updates", "max_time"}:
        if loaded.epochs is None:
            raise InvalidSetting("a run needs an end: give epochs, updates or max_time")
        values["epochs"] = loaded.epochs
    wanted = read_settings(Settings, values)
    return wanted, Ingredients(loaded, factory, schedule, _initial(initial))


def _protocol(values: dict[str, Any]) -> str:
    """The protocol's spec, with the bound that is given beside it; the bound's keys are taken."""
    protocol = PROTOCOLS.parse(values["protocol"])
    s, on_stale = values.pop("max_staleness", None), values.pop("on_stale", None)
    if s is not None and (isinstance(s, bool) or not isinstance(s, int)):
        raise InvalidSetting(f"max staleness: expected a whole number, got {s!r}")
    return PROTOCOLS.format(with_bound(protocol, s, on_stale))


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


def _scaled_batch_size(values: Mapping[str, Any]) -> int:
    """Samples of one learner's mini-batch, by the rule ``scale_batch``."""
    if "batch_size" in values:
        raise InvalidSetting(
            "scale batch: it computes the batch size; expected one of the two, got both"
        )
    learners = values.get("learners", Settings.model_fields["learners"].default)
    if not isinstance(learners, int) or learners < 1:
        raise InvalidSetting(f"learners: expected a whole number >= 1, got {learners!r}")
    return BATCH_SCALINGS.parse(values["scale_batch"]).batch_size(learners)


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
