"""Starts planned runs and resumes interrupted ones, on whichever engine they were planned for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gruppetto.engines.local.forkserver import Template
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.errors import RunFolderError
from gruppetto.runs.evaluation import AtOnce, choose_evaluation
from gruppetto.runs.execute import Run, conclude, history_of, stopping_on_signals
from gruppetto.runs.folder import RunFolder, new_folder
from gruppetto.runs.journal import Journal, Listener
from gruppetto.runs.measuring import measuring_of
from gruppetto.runs.parts import Ingredients, Parts, build_parts, prepared_torch
from gruppetto.runs.progress import Progress, announce
from gruppetto.runs.saved import Saved, check_limits, read_saved
from gruppetto.runs.settings import CommonSettings, Settings, read_settings
from gruppetto.runs.tensorboard import follow_log, require_tensorboard, tell_both
from gruppetto.runs.versions import pack_versions, unpack_versions
from gruppetto.trace import TraceWriter
from gruppetto.trace.folder import read_config
from gruppetto.training.optimizers import OptimizerFactory, Schedule, parse_optimizer
from gruppetto.training.task import Task
from gruppetto.training.tasks import load_task

if TYPE_CHECKING:
    from gruppetto.runs.decoupled.settings import DecoupledSettings

__all__ = ["recall", "resume", "start_run"]


def start_run(
    settings: Settings | DecoupledSettings,
    ingredients: Ingredients,
    *,
    out: str | Path | None = None,
    label: str | None = None,
    progress: bool | None = None,
    on_event: Listener | None = None,
) -> Run:
    """Check everything, say what runs, make the folder, and run."""
    if not isinstance(settings, Settings):
        from gruppetto.runs.decoupled.start import start_decoupled

        return start_decoupled(
            settings, ingredients, out=out, label=label, progress=progress, on_event=on_event
        )
    path = new_folder(out, f"{ingredients.task.name}-{settings.protocol}")
    if settings.tensorboard:
        require_tensorboard()
    with prepared_torch(settings):
        parts = build_parts(settings, ingredients)
        with _prepared(settings, ingredients) as template:
            folder = RunFolder.create(path, settings, parts.server.arithmetic())
            if progress is not False:
                announce(settings)
            if ingredients.initial is not None:
                folder.save_initial(ingredients.initial)
            return _run(parts, template, folder, None, label, progress, on_event)


def resume(
    run: str | Path,
    *,
    task: Task | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Schedule | None = None,
    progress: bool | None = None,
    on_event: Listener | None = None,
    **limits: Any,
) -> Run:
    """Continue a run from its newest checkpoint.

    In virtual time the bits are those of a run never interrupted. With real processes all learners
    are new, and what they had in hand is computed again. After an interruption nothing that was
    trained is lost; after a kill, what came after the last checkpoint.

    Args:
        run: its folder.
        task, optimizer, schedule: as given to the run, where they were objects.
        progress, on_event: see :func:`gruppetto.train`.
        **limits: ``updates``, ``max_time`` or ``target``, instead of the ones it stopped at.

    Raises:
        RunFolderError: no run there, no checkpoint, or the run is complete.
        InvalidSetting: it has been at a new limit already.
    """
    folder = RunFolder.open(run)
    if "decouple" in read_config(folder.path).settings:
        from gruppetto.runs.decoupled.start import resume_decoupled

        return resume_decoupled(
            folder,
            task=task,
            optimizer=optimizer,
            schedule=schedule,
            progress=progress,
            on_event=on_event,
            **limits,
        )
    changed = {key: value for key, value in limits.items() if value is not None}
    recorded = folder.settings().model_dump()
    settings = read_settings(Settings, {**recorded, **changed})
    checkpoint = folder.load_checkpoint()
    with prepared_torch(settings):
        ingredients = recall(folder, settings, task, optimizer, schedule)
        parts = build_parts(settings, ingredients)
        saved = read_saved(folder, checkpoint, parts)
        version = parts.coordinator.version
        check_limits(changed, recorded, updates=version, time=saved.time)
        with _prepared(settings, ingredients) as template:
            return _run(parts, template, folder, saved, None, progress, on_event)


def recall(
    folder: RunFolder,
    settings: CommonSettings,
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
        task = load_task(settings.task, model=settings.model, data=settings.data)
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


@contextmanager
def _prepared(settings: Settings, ingredients: Ingredients) -> Iterator[Template | None]:
    """For an engine with processes, the one that forks the others; before anything is written."""
    if settings.engine == "virtual":
        yield None
        return
    from gruppetto.runs.local.supervisor import prepare_processes

    template = prepare_processes(settings, ingredients)
    try:
        yield template
    finally:
        template.close()


def _run(
    parts: Parts,
    template: Template | None,
    folder: RunFolder,
    saved: Saved | None,
    label: str | None,
    progress: bool | None,
    on_event: Listener | None,
) -> Run:
    settings = parts.settings
    total = (
        None if settings.epochs is None else settings.epochs * parts.mini_batches.samples_per_epoch
    )
    bar = Progress(label or settings.protocol, total, progress)
    log = None
    if settings.tensorboard:
        log = follow_log(folder, None if saved is None else saved.row)
    try:
        with bar:
            listener = tell_both(on_event, log)
            if template is None:
                return _run_virtually(parts, folder, saved, bar, listener)
            from gruppetto.runs.local.supervisor import run_locally

            next_learner = None
            if saved is not None:
                next_learner = max([settings.learners - 1, *saved.joined()]) + 1
            return run_locally(parts, template, folder, bar, listener, next_learner)
    finally:
        if log is not None:
            log.close()


def _run_virtually(
    parts: Parts,
    folder: RunFolder,
    saved: Saved | None,
    bar: Progress,
    on_event: Listener | None,
) -> Run:
    settings = parts.settings
    engine = VirtualEngine(
        parts.updated,
        parts.learner,
        parts.delays,
        settings.learners,
        max_time=settings.max_time,
        faults=parts.faults,
        measuring=measuring_of(parts, folder),
    )

    def engine_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
        versions = engine.gradients.in_use()
        return pack_versions(versions), {"versions": list(versions)}

    # Virtual time stands still while the newest version is evaluated.
    evaluation = choose_evaluation(parts, lambda: AtOnce(parts))
    writer = TraceWriter(folder.trace, None if saved is None else saved.row)
    journal = Journal(parts, engine, folder, writer, bar, on_event, evaluation, engine_state)
    try:
        if saved is not None:
            numbers, device = saved.plain["versions"], torch.device(settings.device)
            versions = unpack_versions(numbers, saved.tensors, device)
            told = ((event, commands) for _, event, commands in saved.history)
            engine.restore(told, versions, saved.plain["newest"])
            journal.resume(saved.history, saved.evaluations, saved.gammas, saved.plain)
        with stopping_on_signals(engine.request_stop, folder):
            result = conclude(parts, engine, journal, folder)
    finally:
        writer.close()
    return Run(
        folder=folder,
        result=result,
        model=parts.server.release_model(),
        history=history_of(journal.evaluations),
        staleness=dict(sorted(parts.coordinator.staleness.histogram.items())),
    )
