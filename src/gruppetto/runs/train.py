"""``gp.train`` and ``gp.resume``: configuration -> engine -> trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppetto.delays import DELAYS, Delay
from gruppetto.engines.faults import FAULT_PLANS
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.errors import InvalidSetting, RunFolderError, TaskError
from gruppetto.protocols import PROTOCOLS, Protocol
from gruppetto.protocols.messages import Command, Event
from gruppetto.runs.execute import Run, execute
from gruppetto.runs.folder import RunFolder, new_folder
from gruppetto.runs.journal import Journal
from gruppetto.runs.parts import Ingredients, Parts, build_parts, prepared_torch
from gruppetto.runs.progress import Progress, announce
from gruppetto.runs.settings import Settings, read_settings
from gruppetto.runs.versions import unpack_versions
from gruppetto.spec import Registry
from gruppetto.staleness import MODULATIONS, Modulation
from gruppetto.trace import EvaluationRow, Row, TraceWriter, read_trace
from gruppetto.training.clipping import CLIPS
from gruppetto.training.learner import Weights
from gruppetto.training.optimizers import OptimizerFactory, OptimizerSpec, Schedule, parse_optimizer
from gruppetto.training.task import Task
from gruppetto.training.tasks import load_task, resolve_task

__all__ = ["SAFE_MODULATION", "plan_run", "recall", "resume", "start_run", "train"]

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
        batch_size: samples of one mini-batch, per learner. Default: the task's.
        epochs: passes over the data. Default: the task's, unless ``updates`` or ``max_time`` is
            given.
        optimizer: ``"sgd:lr=0.1"``, ``gp.optimizer(torch.optim.SGD, lr=0.1)``, or a function of
            the model. Default: the task's.
        modulation: what a late gradient is worth. Default: ``inverse-mean:cap=true`` for
            asynchronous protocols, ``none`` for the others.
        delay: how long a mini-batch takes, in virtual seconds. Default: always 1.
        delays: learner -> a law of its own.
        schedule: learning-rate schedule, from :func:`gruppetto.schedule`.
        initial: weights to start from: a ``state_dict``, or a file of one.
        on_event: called with every row of the trace after it is written; return True to stop.
        out: the run's folder. Default: a new one under ``runs/``.
        progress: show a bar on standard error. Default: when that is a terminal. False also
            keeps back the line that says what runs.
        **settings: ``updates``, ``max_time``, ``target``, ``clip``, ``on_late``,
            ``max_attempts``, ``max_given_up``, ``faults``, ``evaluate``, ``evaluate_every``,
            ``recalibrate_bn``, ``seed``, ``threads``, ``device``, ``memory``; see
            :class:`Settings`.

    Returns:
        The run: ``model``, ``history``, ``staleness``, ``result``, ``folder``.

    Raises:
        UsageError: something given cannot work; nothing was written.
        RunFailed: the run ended without its goal; its folder holds what there is.
    """
    wanted, ingredients = plan_run(
        task,
        protocol=protocol,
        learners=learners,
        batch_size=batch_size,
        epochs=epochs,
        optimizer=optimizer,
        modulation=modulation,
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
    if loaded is None:
        loaded = load_task(task) if isinstance(task, str) else task
    if not isinstance(loaded, Task):
        raise TaskError(f"task: expected a Task or its name, got {type(loaded).__name__}")
    values = {key: value for key, value in given.items() if value is not None}
    values["task"] = resolve_task(task) if isinstance(task, str) else loaded.name
    values["task_is_reference"] = isinstance(task, str)
    values["protocol"] = PROTOCOLS.format(PROTOCOLS.parse(given["protocol"]))
    if "modulation" not in values:
        cancels = PROTOCOLS.parse(values["protocol"]).cell.cancels
        values["modulation"] = "none" if cancels else SAFE_MODULATION
        values["modulation_is_default"] = True
    registries: list[tuple[str, Registry[Any]]] = [
        ("modulation", MODULATIONS),
        ("delay", DELAYS),
        ("clip", CLIPS),
        ("faults", FAULT_PLANS),
    ]
    for key, registry in registries:
        if key in values:
            values[key] = registry.format(registry.parse(values[key]))
    values["delays"] = {
        learner: DELAYS.format(DELAYS.parse(law)) for learner, law in given["delays"].items()
    }
    factory = _optimizer(values.pop("optimizer", None), loaded)
    values["optimizer"] = _nameable(factory)
    values["has_schedule"] = schedule is not None
    if "batch_size" not in values:
        if loaded.batch_size is None:
            raise InvalidSetting("a batch size is required for this task, like 32")
        values["batch_size"] = loaded.batch_size
    if not values.keys() & {"epochs", "updates", "max_time"}:
        if loaded.epochs is None:
            raise InvalidSetting("a run needs an end: give epochs, updates or max_time")
        values["epochs"] = loaded.epochs
    wanted = read_settings(Settings, values)
    return wanted, Ingredients(loaded, factory, schedule, _initial(initial))


def start_run(
    settings: Settings,
    ingredients: Ingredients,
    *,
    out: str | Path | None = None,
    label: str | None = None,
    progress: bool | None = None,
    on_event: Callable[[Row], object] | None = None,
) -> Run:
    """Check everything, say what runs, make the folder, and run."""
    path = new_folder(out, f"{ingredients.task.name}-{settings.protocol}")
    with prepared_torch(settings):
        parts = build_parts(settings, ingredients)
        folder = RunFolder.create(path, settings, parts.server.arithmetic())
        if progress is not False:
            announce(settings)
        if ingredients.initial is not None:
            folder.save_initial(ingredients.initial)
        return _run(parts, folder, TraceWriter(folder.trace), None, label, progress, on_event)


def resume(
    run: str | Path,
    *,
    task: Task | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Schedule | None = None,
    progress: bool | None = None,
    on_event: Callable[[Row], object] | None = None,
    **limits: Any,
) -> Run:
    """Continue a run from its newest checkpoint; the bits are those of a run never interrupted.

    Args:
        run: its folder.
        task, optimizer, schedule: as given to the run, where they were objects.
        progress, on_event: see :func:`train`.
        **limits: ``updates``, ``max_time`` or ``target``, instead of the ones it stopped at.

    Raises:
        RunFolderError: no run there, no checkpoint, or the run is complete.
    """
    folder = RunFolder.open(run)
    changed = {key: value for key, value in limits.items() if value is not None}
    settings = read_settings(Settings, {**folder.settings().model_dump(), **changed})
    row, tensors, plain = folder.load_checkpoint()
    with prepared_torch(settings):
        parts = build_parts(settings, recall(folder, settings, task, optimizer, schedule))
        trace = read_trace(folder.trace, up_to=row)
        events = [(r.time, r.decode()) for r in trace.events]
        history = [(time, event, parts.coordinator.handle(event)) for time, event in events]
        if parts.coordinator.finished is not None:
            raise RunFolderError(f"{run} is complete ({parts.coordinator.finished})")
        parts.server.load(tensors, plain["server"])
        versions = unpack_versions(plain["versions"], tensors, torch.device(settings.device))
        saved = _Saved(plain, versions, history, trace.evaluations)
        writer = TraceWriter(folder.trace, continues_after=row)
        return _run(parts, folder, writer, saved, None, progress, on_event)


def recall(
    folder: RunFolder,
    settings: Settings,
    task: Task | None,
    optimizer: OptimizerFactory | None,
    schedule: Schedule | None,
) -> Ingredients:
    """The objects of a run that is run again: loaded by name, or given once more.

    Raises:
        RunFolderError: the run was started with objects that its folder cannot name.
    """
    if task is None:
        if not settings.task_is_reference:
            raise RunFolderError(
                f"the task {settings.task!r} was given to this run as an object; "
                "give it again: task=..."
            )
        task = load_task(settings.task)
    if optimizer is None:
        named = settings.optimizer
        optimizer = task.default_optimizer() if named is None else parse_optimizer(named)
        if optimizer is None:
            raise RunFolderError(
                "the optimizer was given to this run as an object; give it again: optimizer=..."
            )
    if settings.has_schedule and schedule is None:
        raise RunFolderError(
            "the schedule was given to this run as an object; give it again: schedule=..."
        )
    return Ingredients(task, optimizer, schedule, folder.load_initial())


@dataclass(frozen=True)
class _Saved:
    """Where an interrupted run was."""

    #: What the checkpoint holds beside tensors.
    plain: dict[str, Any]
    #: The weights of every version in use.
    versions: dict[int, Weights]
    #: (time, event, commands), in order.
    history: list[tuple[float, Event, list[Command]]]
    evaluations: list[EvaluationRow]


def _run(
    parts: Parts,
    folder: RunFolder,
    writer: TraceWriter,
    saved: _Saved | None,
    label: str | None,
    progress: bool | None,
    on_event: Callable[[Row], object] | None,
) -> Run:
    settings = parts.settings
    engine = VirtualEngine(
        parts.server,
        parts.learner,
        parts.delays,
        settings.learners,
        max_time=settings.max_time,
        faults=parts.faults,
    )
    total = (
        None if settings.epochs is None else settings.epochs * parts.mini_batches.samples_per_epoch
    )
    bar = Progress(label or settings.protocol, total, progress)
    journal = Journal(
        parts, engine, folder, writer, bar, on_event, lambda: engine.gradients.in_use()
    )
    try:
        with bar:
            if saved is not None:
                told = ((event, commands) for _, event, commands in saved.history)
                engine.restore(told, saved.versions, saved.plain["newest"])
                journal.resume(saved.history, saved.evaluations, saved.plain)
            return execute(parts, engine, journal, folder)
    finally:
        writer.close()


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
