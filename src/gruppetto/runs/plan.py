"""``gp.plan``: how machines behave -> which protocol, how many to wait for, and what it gains.

Times per update follow from the law of delays; updates to a target from short pilot runs in virtual
time. A plan trains nothing that is kept.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gruppetto.delays import Delay
from gruppetto.errors import InvalidSetting
from gruppetto.runs.plan_laws import Law, given_law, law_of_trace
from gruppetto.runs.plan_pilot import Entry, Trainer
from gruppetto.runs.plan_race import run_race
from gruppetto.runs.plan_result import Plan, PlanMaker
from gruppetto.runs.progress import Progress
from gruppetto.runs.settings import Settings, Target
from gruppetto.runs.train import plan_run
from gruppetto.theory.machines import RunTimes, UpdateTime, time_updates
from gruppetto.theory.planner import candidates
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.task import Task
from gruppetto.training.tasks import load_task

__all__ = ["plan"]

#: Epochs that all pilot runs may take together: those of so many runs of the task, but ...
_BUDGET: Final = 30
#: ... no more than this. Tasks that take long would take days.
_MAX_BUDGET: Final = 300.0
#: Seeds of pilot runs and simulations begin here: users' own are seldom so large.
_PILOT_SEEDS, _SIMULATED_SEEDS = 7_000_000, 8_000_000
#: Epochs between evaluations of pilot runs. Virtual time stands still meanwhile, and whole epochs
#: would be too coarse a clock: a target is often reached in two of them.
_EVALUATE_EVERY: Final = 0.1
#: Learners that Rudra's product is kept for: as many as a run has by default.
_USUAL_LEARNERS: Final = 4


def plan(
    task: Task | str | None = None,
    *,
    delay: Delay | str | None = None,
    delays: Mapping[int, Delay | str] | None = None,
    trace: str | Path | None = None,
    learners: int | None = None,
    target: str | None = None,
    batch_size: int | None = None,
    fixed_share: float = 1.0,
    budget: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **settings: Any,
) -> Plan:
    """Find the protocol, K and mini-batch that reach a target soonest.

    Args:
        task: as for :func:`gruppetto.train`. None takes that of a traced run; without one,
            choices are ranked by time and staleness alone.
        delay: how long a mini-batch takes.
        delays: learner -> its own law.
        trace: instead of laws, where they were measured: a run's folder, or a file of seconds.
        learners: P. Default: the traced run's, else 4.
        target: ``accuracy=0.95``. Default: the traced run's.
        batch_size: samples of one mini-batch, per learner; the delays are its. Default: the
            traced run's, else the task's.
        fixed_share: of a mini-batch's time, the part that does not depend on its size, from 0 to
            1. Other sizes are looked at only if it is below 1. Default: 1, as injected delays.
        budget: epochs of training, all pilot runs together. Default: 30 runs' of the task, at most
            300.
        seed: of everything random in here; pilot runs use none that a user would.
        progress: show how much of the budget is spent. Default: when standard error is a terminal.
        **settings: ``optimizer``, ``modulation``, ... as for :func:`gruppetto.train`. Only
            ``evaluate_every`` has another default, 0.1 epochs: a target counts as reached at the
            first evaluation that finds it so.

    Raises:
        UsageError: something given cannot work.
    """
    if not 0.0 <= fixed_share <= 1.0:
        raise InvalidSetting(f"fixed share: expected a number from 0 to 1, got {fixed_share}")
    if seed < 0:
        raise InvalidSetting(f"seed: expected a whole number >= 0, got {seed}")
    if budget is not None and not 0.0 < budget < math.inf:
        raise InvalidSetting(f"budget: expected epochs above 0, got {budget}")
    if (delay is None and not delays) == (trace is None):
        raise InvalidSetting("plan: expected either a delay or a trace to take delays from")
    run: Settings | None = None
    if trace is not None:
        law, run = law_of_trace(trace, learners, seed)
    else:
        law = given_law(delay, delays or {}, 4 if learners is None else learners)
    law.machines.check()
    name, loaded, base = _task(task, run, batch_size, target, settings)
    if target is None and run is not None:
        target = run.target
    if target is not None:
        Target(target)
    if loaded is None and target is not None:
        raise InvalidSetting(
            f"target {target}: only training a task can tell when it is reached; expected a task, "
            "or no target"
        )
    size = base.get("batch_size", batch_size)
    if size is None and fixed_share < 1.0:
        raise InvalidSetting("fixed share: expected a batch size that the delays belong to")
    if size is not None and size < 1:
        raise InvalidSetting(f"batch size: expected at least 1, got {size}")
    total = None
    if loaded is not None and loaded.batch_size is not None:
        total = loaded.batch_size * _USUAL_LEARNERS
    entries = _entries(law, size or 1, fixed_share, total, seed)
    named = name if isinstance(name, str) else None
    is_virtual = trace is None or (run is not None and run.engine == "virtual")
    told = dict(base)
    base.setdefault("evaluate_every", _EVALUATE_EVERY)
    # Pilot runs evaluate for nothing; machines of somebody's would work for it.
    maker = PlanMaker(law, entries, size, named, base if is_virtual else told, target, is_virtual)
    if target is None or loaded is None:
        return maker.by_time()
    per_epoch = MiniBatches(loaded, int(base["batch_size"]), seed).samples_per_epoch
    epochs = budget
    if epochs is None:
        epochs = min(_MAX_BUDGET, _BUDGET * float(loaded.epochs or _MAX_BUDGET))
    shown = sys.stderr.isatty() if progress is None else progress
    with (
        tempfile.TemporaryDirectory(prefix="gruppetto-plan-") as folder,
        Progress("plan", epochs * per_epoch, progress) as bar,
    ):
        trainer = Trainer(
            loaded, name if name is not None else loaded, base, target,
            _PILOT_SEEDS + 1000 * seed, Path(folder), epochs * per_epoch, per_epoch, bar, shown,
        )  # fmt: skip
        run_race(entries, trainer)
    return maker.by_target(epochs, trainer.spent / per_epoch)


def _task(
    task: Task | str | None,
    run: Settings | None,
    batch_size: int | None,
    target: str | None,
    settings: Mapping[str, Any],
) -> tuple[Task | str | None, Task | None, dict[str, Any]]:
    """The task's name or itself, the task, and what all its runs are told."""
    base: dict[str, Any] = {key: v for key, v in settings.items() if v is not None}
    if run is not None and task is None:
        base = {**_told(run), **base}
        if not run.task_is_reference and target is not None:
            raise InvalidSetting(
                f"the task {run.task!r} was given to the traced run as an object; expected the "
                "task beside the trace"
            )
        task = run.task if run.task_is_reference else None
    if run is not None and "batch_size" not in base:
        base["batch_size"] = run.batch_size
    if batch_size is not None:
        base["batch_size"] = batch_size
    if task is None:
        return None, None, base
    loaded: Task | None = None
    if isinstance(task, str):
        loaded = load_task(task, model=base.get("model"), data=base.get("data"))
    # Everything is checked before anything is simulated or trained.
    known, ingredients = plan_run(
        task, loaded=loaded, protocol="hardsync", delays={}, engine="virtual", updates=1, **base
    )
    base["batch_size"] = known.batch_size
    return task, ingredients.task, base


def _told(run: Settings) -> dict[str, Any]:
    """What a run was told about learning, as far as it differs from the defaults."""
    keys = (
        "model", "data", "optimizer", "modulation", "compensation", "clip", "on_late",
        "max_attempts", "max_given_up", "evaluate_every", "recalibrate_bn", "threads", "device",
        "memory", "scale_lr", "batch_size",
    )  # fmt: skip
    found = {}
    for key in keys:
        value = getattr(run, key)
        if value is not None and value != Settings.model_fields[key].default:
            found[key] = value
    if run.modulation_is_default:
        found.pop("modulation", None)
    return found


def _entries(
    law: Law, batch_size: int, fixed_share: float, total: int | None, seed: int
) -> list[Entry]:
    """All choices and their times per update."""
    p = law.machines.num_learners
    others = law.resampled(seed)
    simulated = _SIMULATED_SEEDS + 1000 * seed
    known: dict[tuple[Any, int], tuple[UpdateTime, RunTimes]] = {}
    found = []
    for choice in candidates(p, batch_size, fixed_share=fixed_share, total=total):
        share = fixed_share + (1.0 - fixed_share) * choice.batch_size / batch_size
        machines = law.machines.of_size(share)
        key = choice.protocol, choice.batch_size
        if key not in known:
            more = [other.of_size(share) for other in others]
            update = time_updates(choice.protocol, machines, more, seed=simulated)
            run_times = RunTimes(choice.protocol, machines, update.seconds, seed=simulated)
            known[key] = update, run_times
        update, run_times = known[key]
        samples = choice.protocol.num_to_wait(p) * choice.batch_size
        found.append(Entry(choice, machines, update, run_times, samples / update.seconds))
    return found
