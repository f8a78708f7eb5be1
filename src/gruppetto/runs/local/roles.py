"""What the processes of a local run do: prepare once, then serve, learn or evaluate.

The template prepares: it loads the task, builds the model and maps the shared memory. The others
are forks of it and find everything ready, data included, without copying any.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import cloudpickle
import torch
from torch import nn

from gruppetto.engines.local.engine import LocalEngine
from gruppetto.engines.local.learner import work
from gruppetto.engines.local.memory import MemoryPlan, RunMemory
from gruppetto.engines.local.process import name_process
from gruppetto.engines.local.reader import open_reader
from gruppetto.errors import RunFailed, TaskError
from gruppetto.runs.evaluation import (
    Elsewhere,
    Evaluation,
    choose_evaluation,
    serve_evaluations,
)
from gruppetto.runs.execute import conclude
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.journal import Journal
from gruppetto.runs.measuring import measuring_of
from gruppetto.runs.parts import Ingredients, Parts, build_parts
from gruppetto.runs.progress import Progress
from gruppetto.runs.saved import read_saved
from gruppetto.runs.settings import CommonSettings, Settings, read_settings
from gruppetto.trace import Row, TraceWriter
from gruppetto.training.randomness import one_thread
from gruppetto.training.tasks import is_in_file, load_model, load_task

__all__ = [
    "EVALUATE",
    "LEARN",
    "PREPARE",
    "SERVE",
    "evaluate",
    "get_ready",
    "learn",
    "pack",
    "prepare",
    "serve",
    "unpack",
]

#: Names of the roles, for the template.
PREPARE: Final = f"{__name__}:prepare"
SERVE: Final = f"{__name__}:serve"
LEARN: Final = f"{__name__}:learn"
EVALUATE: Final = f"{__name__}:evaluate"

S = TypeVar("S", bound=CommonSettings)

#: Letters of an error's text; a message must not be longer than its reader takes.
_MAX_TEXT: Final = 8_000


@dataclass(frozen=True)
class Prepared:
    """What a template's children find."""

    settings: Settings
    ingredients: Ingredients
    memory: RunMemory
    #: None where a device must not be touched before forking.
    parts: Parts | None

    def build(self) -> Parts:
        """The parts of the run, for this process."""
        return self.parts or _build(self.settings, self.ingredients)


def get_ready() -> None:
    """Have the fork server load what torch only loads at the first step of an optimizer."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def pack(settings: CommonSettings, ingredients: Ingredients) -> bytes:
    """Settings and objects for the template.

    A task or a model in a file travels by its name, so that its classes are found where they are
    defined; what was given as objects, and built-in tasks with their data, as pickles.

    Raises:
        TaskError: something cannot be pickled.
    """
    task = ingredients.task
    is_file = settings.task_is_reference and is_in_file(settings.task)
    carried = ingredients.optimizer is task.optimizer
    if _has_model_file(settings):
        task = replace(task, model=_no_model)
    content = {
        "settings": settings.model_dump(),
        "task": None if is_file else task,
        "optimizer": None if carried else ingredients.optimizer,
        "schedule": ingredients.schedule,
        "initial": ingredients.initial,
    }
    try:
        data: bytes = cloudpickle.dumps(content)
    except Exception as error:
        raise TaskError(
            f"the task cannot be sent to other processes: {type(error).__name__}: {error}; make "
            "what cannot be pickled inside a function, or give the task as path/to/file.py:name"
        ) from error
    return data


def prepare(payload: bytes) -> Prepared:
    """Role of the template: see :func:`pack`."""
    name_process("template")
    # One thread: a pool of them would not survive the forks to come.
    torch.set_num_threads(1)
    settings, ingredients = unpack(payload, Settings)
    # Even for a run on another device: what is shared lies in the CPU's memory.
    parts = _build(settings.model_copy(update={"device": "cpu"}), ingredients)
    plan = MemoryPlan.for_run(settings.learners, parts.max_held, parts.updated.needs_past)
    memory = RunMemory(plan, parts.server.packings())
    return Prepared(settings, ingredients, memory, parts if settings.device == "cpu" else None)


def unpack(payload: bytes, kind: type[S]) -> tuple[S, Ingredients]:
    """What :func:`pack` packed; settings of a kind."""
    content = cloudpickle.loads(payload)
    settings = read_settings(kind, content["settings"])
    task = content["task"]
    if task is None:
        task = load_task(settings.task, model=settings.model, data=settings.data)
    elif settings.model is not None and _has_model_file(settings):
        task = replace(task, model=load_model(settings.model))
    optimizer = content["optimizer"]
    if optimizer is None:
        optimizer = task.default_optimizer()
    ingredients = Ingredients(task, optimizer, content["schedule"], content["initial"])
    return settings, ingredients


def _has_model_file(settings: CommonSettings) -> bool:
    return settings.model is not None and is_in_file(settings.model)


def _no_model() -> nn.Module:
    raise NotImplementedError("stands for a model that travels by name")


def _build(settings: Settings, ingredients: Ingredients) -> Parts:
    with one_thread():
        return build_parts(settings, ingredients, is_checked=True)


def learn(prepared: Prepared, descriptors: list[int], learner: int) -> None:
    """Role of a learner."""
    name_process(f"learner {learner}")
    parts = prepared.build()
    torch.set_num_threads(prepared.settings.threads)
    reader = open_reader(parts.mini_batches)
    with contextlib.closing(reader), socket.socket(fileno=descriptors[0]) as channel:
        work(channel, parts.learner, prepared.memory, reader)


def evaluate(prepared: Prepared, descriptors: list[int]) -> None:
    """Role of the evaluator."""
    name_process("evaluator")
    parts = prepared.build()
    torch.set_num_threads(prepared.settings.threads)
    with socket.socket(fileno=descriptors[0]) as channel:
        serve_evaluations(parts, channel)


def serve(
    prepared: Prepared, descriptors: list[int], folder: str, is_resumed: bool, is_heard: bool
) -> None:
    """Role of the server: the loop, the coordinator, the trace.

    Args:
        prepared: by the template.
        descriptors: sockets to the supervisor and, where evaluation is live, to the evaluator.
        folder: of the run.
        is_resumed: continue from the newest checkpoint.
        is_heard: the supervisor wants to know of every row at once.
    """
    name_process("server")
    parts = prepared.build()
    torch.set_num_threads(prepared.settings.threads)
    with contextlib.ExitStack() as stack:
        control, *evaluators = [
            stack.enter_context(socket.socket(fileno=descriptor)) for descriptor in descriptors
        ]
        engine = LocalEngine(
            parts.updated,
            prepared.memory,
            parts.delays if parts.has_delays else None,
            control,
            prepared.settings.learners,
            prepared.settings.max_time,
            measuring_of(parts, RunFolder(folder)),
        )
        stack.callback(engine.close)
        if parts.gamma is not None:
            parts.gamma.standing_still = engine.standing_still
        with _told_how_it_ends(engine):
            _serve(parts, engine, evaluators, RunFolder(folder), is_resumed, is_heard)


@contextlib.contextmanager
def _told_how_it_ends(engine: LocalEngine) -> Iterator[None]:
    try:
        yield
        engine.tell_supervisor({"ended": True})
    except RunFailed as error:
        text = str(error)[:_MAX_TEXT]
        told = {"failed": type(error).__name__, "message": text, "result": error.result}
        engine.tell_supervisor(told)


def _serve(
    parts: Parts,
    engine: LocalEngine,
    evaluators: list[socket.socket],
    folder: RunFolder,
    is_resumed: bool,
    is_heard: bool,
) -> None:
    def tell(row: Row) -> None:
        engine.nudge_supervisor()

    def live() -> Evaluation:
        return Elsewhere(
            parts, evaluators[0], lambda text: engine.tell_supervisor({"warning": text})
        )

    evaluation = choose_evaluation(parts, live)
    saved = read_saved(folder, folder.load_checkpoint(), parts) if is_resumed else None
    writer = TraceWriter(folder.trace, None if saved is None else saved.row)
    journal = Journal(
        parts,
        engine,
        folder,
        writer,
        Progress("", None, False),
        tell if is_heard else None,
        evaluation,
        engine.state,
    )
    if isinstance(evaluation, Elsewhere):
        collect: Callable[[], None] = evaluation.collect
        engine.watch(evaluation.fileno(), lambda: journal.take_evaluation(collect))
    if saved is not None:
        newest = saved.plain["newest"]
        engine.restore(saved.tensors, saved.plain, newest, saved.time, saved.alive(parts))
        journal.resume(saved.history, saved.evaluations, saved.gammas, saved.plain)
    try:
        conclude(parts, engine, journal, folder)
    finally:
        writer.close()
