"""Starts planned decoupled runs and resumes interrupted ones, on their engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppetto.decoupled.methods import METHODS
from gruppetto.runs.decoupled.collector import Collector
from gruppetto.runs.decoupled.evaluation import choose_evaluation
from gruppetto.runs.decoupled.parts import DecoupledParts, build_decoupled_parts
from gruppetto.runs.decoupled.saved import Saved, read_saved
from gruppetto.runs.decoupled.settings import DecoupledSettings
from gruppetto.runs.decoupled.virtual import VirtualRun
from gruppetto.runs.execute import Run, history_of, stopping_on_signals
from gruppetto.runs.folder import RunFolder, new_folder
from gruppetto.runs.journal import Listener
from gruppetto.runs.parts import Ingredients, prepared_torch
from gruppetto.runs.progress import Progress, standard_error
from gruppetto.runs.saved import check_limits
from gruppetto.runs.settings import read_settings
from gruppetto.runs.tensorboard import TensorBoardLog, follow_log, require_tensorboard, tell_both
from gruppetto.trace import TraceWriter
from gruppetto.trace.folder import read_config

if TYPE_CHECKING:
    from gruppetto.runs.decoupled.local import LocalRun
    from gruppetto.training.optimizers import OptimizerFactory, Schedule
    from gruppetto.training.task import Task

__all__ = ["announce_decoupled", "resume_decoupled", "start_decoupled"]


def announce_decoupled(settings: DecoupledSettings) -> None:
    """Say what is about to run; nothing that changes the learning is hidden."""
    changed = ""
    if settings.compensation != "none":
        changed = f", compensation {settings.compensation}"
    cut = f", cut at {', '.join(settings.begins)}" if settings.begins else ""
    standard_error().print(
        f"{settings.task}: {settings.decouple}{cut}, mini-batches of {settings.batch_size}, "
        f"optimizer {settings.optimizer or 'as given'}, modulation {settings.modulation}{changed}",
        markup=False,
    )


def start_decoupled(
    settings: DecoupledSettings,
    ingredients: Ingredients,
    *,
    out: str | Path | None = None,
    label: str | None = None,
    progress: bool | None = None,
    on_event: Listener | None = None,
) -> Run:
    """Check everything, say what runs, make the folder, and run."""
    name = METHODS.name_of(settings.method)
    path = new_folder(out, f"{ingredients.task.name}-{name}-{settings.method.modules}")
    if settings.tensorboard:
        require_tensorboard()
    with prepared_torch(settings):
        parts = build_decoupled_parts(settings, ingredients)
        with _engine(parts, ingredients, None) as engine:
            folder = RunFolder.create(path, settings, parts.about())
            if progress is not False:
                announce_decoupled(settings)
            if ingredients.initial is not None:
                folder.save_initial(ingredients.initial)
            return _run(parts, engine, folder, None, label, progress, on_event)


def resume_decoupled(
    folder: RunFolder,
    *,
    task: Task | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Schedule | None = None,
    progress: bool | None = None,
    on_event: Listener | None = None,
    **limits: Any,
) -> Run:
    """Continue a run from its newest checkpoint; see :func:`gruppetto.resume`.

    Raises:
        RunFolderError: no checkpoint, or the run is complete.
        InvalidSetting: it has been at a new limit already.
    """
    from gruppetto.runs.start import recall

    changed = {key: value for key, value in limits.items() if value is not None}
    recorded = read_config(folder.path).settings
    settings = read_settings(DecoupledSettings, {**recorded, **changed})
    with prepared_torch(settings):
        ingredients = recall(folder, settings, task, optimizer, schedule)
        parts = build_decoupled_parts(settings, ingredients)
        saved = read_saved(folder, parts)
        check_limits(changed, recorded, updates=saved.version, time=saved.time)
        with _engine(parts, ingredients, saved) as engine:
            return _run(parts, engine, folder, saved, None, progress, on_event)


@contextmanager
def _engine(
    parts: DecoupledParts, ingredients: Ingredients, saved: Saved | None
) -> Iterator[VirtualRun | LocalRun]:
    """What runs the modules; before anything is written."""
    engine: VirtualRun | LocalRun
    if parts.settings.engine == "virtual":
        engine = VirtualRun(parts, saved)
    else:
        from gruppetto.runs.decoupled.local import LocalRun

        engine = LocalRun(parts, ingredients, saved)
    try:
        yield engine
    finally:
        engine.close()


def _run(
    parts: DecoupledParts,
    engine: VirtualRun | LocalRun,
    folder: RunFolder,
    saved: Saved | None,
    label: str | None,
    progress: bool | None,
    on_event: Listener | None,
) -> Run:
    settings = parts.settings
    total = None
    if settings.epochs is not None:
        total = settings.epochs * parts.mini_batches.samples_per_epoch
    bar = Progress(label or settings.decouple, total, progress)
    log: TensorBoardLog | None = None
    if settings.tensorboard:
        log = follow_log(folder, None if saved is None else saved.row)
    evaluation = choose_evaluation(parts, bar.warn)
    writer = TraceWriter(folder.trace, None if saved is None else saved.row)
    try:
        with bar, stopping_on_signals(engine.request_stop, folder):
            collector = Collector(
                parts,
                folder,
                writer,
                bar,
                tell_both(on_event, log),
                evaluation,
                engine.request_stop,
                saved,
            )
            reason, memory = engine.run(collector)
            result = collector.conclude(reason, memory)
    finally:
        evaluation.close()
        writer.close()
        if log is not None:
            log.close()
    model = parts.network.load(collector.newest)
    for parameter in model.parameters():
        parameter.grad = None
    return Run(
        folder=folder,
        result=result,
        model=model.eval(),
        history=history_of(collector.evaluations),
        staleness=dict(sorted(collector.tally.staleness.histogram.items())),
    )
