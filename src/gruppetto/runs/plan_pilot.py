"""Short training runs in virtual time that find out how many updates a choice needs to a target.

Runs live in a temporary folder and leave nothing behind.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppetto.delays import DELAYS, Delay, Empirical
from gruppetto.errors import Diverged
from gruppetto.protocols import PROTOCOLS
from gruppetto.runs.execute import INTERRUPTED, Run
from gruppetto.runs.journal import TARGET
from gruppetto.runs.progress import Progress
from gruppetto.runs.start import resume, start_run
from gruppetto.runs.train import plan_run
from gruppetto.staleness import RATE_SCALINGS, SqrtBatch
from gruppetto.theory.machines import Machines, RunTimes, UpdateTime
from gruppetto.theory.planner import Choice, center_and_band
from gruppetto.trace import Row, UpdateRow
from gruppetto.trace.metrics import is_lower_better, parse_target
from gruppetto.training.task import Task

__all__ = ["Entry", "Trainer", "rate_keywords"]


@dataclass
class Entry:
    """One choice in the race, and what is known of it."""

    choice: Choice
    machines: Machines
    update: UpdateTime
    #: When its updates are typically made.
    run_times: RunTimes
    #: Samples that a second of virtual time applies.
    samples_per_second: float
    #: Seed number -> updates to the target; a run that was stopped is not here.
    updates: dict[int, int] = field(default_factory=dict)
    #: Virtual seconds that the run with the first seed has come to, and the loss there.
    horizon: float = 0.0
    loss: float = math.inf
    #: How far the race took it: the horizon of the run that tells of it.
    depth: float = 0.0
    #: It was stopped without reaching the target: it takes longer than this.
    at_least: float | None = None
    #: Repeats that were stopped, and count as long as they took until then.
    num_cut: int = 0

    def take_over(self, other: Entry) -> None:
        """What pilot runs say of another entry that needs equally many updates."""
        slower = self.update.seconds / other.update.seconds
        self.updates, self.num_cut = dict(other.updates), other.num_cut
        self.loss, self.horizon = other.loss, slower * other.horizon
        self.depth = other.depth
        self.at_least = None if other.at_least is None else slower * other.at_least

    @property
    def times(self) -> list[float]:
        """Seconds to the target, of every seed: those that so many updates typically take."""
        return [self.run_times.at(updates) for _, updates in sorted(self.updates.items())]

    @property
    def center(self) -> float:
        """The typical one of these; infinite without any."""
        return center_and_band(self.times, 0.0)[0] if self.updates else math.inf

    @property
    def cost(self) -> float:
        """Samples to the target; infinite where that is not known."""
        if not self.updates:
            return math.inf
        return self.typical_updates * self.samples_per_second * self.update.seconds

    @property
    def typical_updates(self) -> float:
        """The geometric mean of updates to the target."""
        return math.exp(sum(map(math.log, self.updates.values())) / len(self.updates))


class Trainer:
    """Trains choices on the task; as :mod:`gruppetto.runs.plan_race` asks for it.

    Args:
        task: itself.
        name: by which settings know it.
        base: keywords for :func:`gruppetto.train` that all choices share.
        target: metric and value.
        seed: runs take seeds from here on.
        folder: temporary.
        budget: samples, all runs together.
        samples_per_epoch: of the task.
        bar: shows how much of it is spent.
        is_shown: somebody looks at it.
    """

    def __init__(
        self,
        task: Task,
        name: Task | str,
        base: Mapping[str, Any],
        target: str,
        seed: int,
        folder: Path,
        budget: float,
        samples_per_epoch: int,
        bar: Progress,
        is_shown: bool,
    ) -> None:
        self._task, self._name, self._base, self._target = task, name, dict(base), target
        self._metric = parse_target(target)[0]
        self._seed, self._folder, self._bar = seed, folder, bar
        self._is_shown = is_shown
        self.budget, self.samples_per_epoch = budget, samples_per_epoch
        self.spent = 0
        self._open: dict[tuple[Choice, int], Run] = {}
        self._laws: dict[Delay, str] = {}

    @property
    def left(self) -> float:
        """Samples."""
        return self.budget - self.spent

    def keywords(self, choice: Choice, machines: Machines) -> dict[str, Any]:
        """What :func:`gruppetto.train` is told for a choice."""
        return {
            **self._base,
            **rate_keywords(choice, machines.num_learners, self._base),
            "protocol": PROTOCOLS.format(choice.protocol),
            "learners": machines.num_learners,
            "batch_size": choice.batch_size,
            "delay": self._spec(machines.law),
            "delays": {learner: self._spec(law) for learner, law in machines.own.items()},
            "engine": "virtual",
            "target": self._target,
            "evaluate": "live",
        }

    def _spec(self, law: Delay) -> str:
        """Of a law, its values in a file where it is made of some."""
        if not isinstance(law, Empirical):
            return DELAYS.format(law)
        if law not in self._laws:
            path = self._folder / f"seconds-{len(self._laws)}.txt"
            path.write_text("\n".join(map(repr, law.seconds)), encoding="utf-8")
            self._laws[law] = f"empirical:file={path}"
        return self._laws[law]

    def train(self, entry: Entry, seed: int, limit: float) -> None:
        """Train to the target or to ``limit`` virtual seconds; a run that was shorter goes on."""
        key = (entry.choice, seed)
        before, run = self._open.pop(key, None), None
        started = 0 if before is None else int(before.result["samples"])
        try:
            run = self._go(entry, seed, limit, before)
        except Diverged as error:
            self._pay(int(str(error.result["samples"])) - started)
            self._forget(key)
            entry.at_least, entry.loss = math.inf, math.inf
            return
        result = run.result
        self._pay(int(result["samples"]) - started)
        if result["stopped_by"] == INTERRUPTED:
            raise KeyboardInterrupt
        if result["stopped_by"] == TARGET:
            entry.updates[seed] = int(result["updates"])
            entry.at_least = None
            self._forget(key)
            return
        self._open[key] = run
        if seed == 0:
            entry.horizon = entry.depth = entry.at_least = limit
            entry.loss = self._badness(result["metrics"])

    def _go(self, entry: Entry, seed: int, limit: float, before: Run | None) -> Run:
        keywords = self.keywords(entry.choice, entry.machines)
        settings, ingredients = plan_run(
            self._name, loaded=self._task, seed=self._seed + seed, max_time=limit, **keywords
        )
        if before is None:
            path = self._path((entry.choice, seed))
            return start_run(settings, ingredients, out=path, progress=False, on_event=self._show())
        return resume(
            before.folder.path,
            task=self._task,
            optimizer=ingredients.optimizer,
            schedule=ingredients.schedule,
            progress=False,
            max_time=limit,
        )

    def _show(self) -> Any:
        """A listener, where somebody looks: each row is written at once then."""
        if not self._is_shown:
            return None

        def tell(row: Row) -> None:
            if isinstance(row, UpdateRow):
                self._bar.advance(self.spent + row.samples, row.version, row.time)

        return tell

    def _pay(self, samples: int) -> None:
        self.spent += samples
        self._bar.advance(min(self.spent, int(self.budget)), 0, 0.0)

    def _path(self, key: tuple[Choice, int]) -> Path:
        choice, seed = key
        spec = PROTOCOLS.format(choice.protocol).replace(":", "-")
        return self._folder / f"{spec}-{choice.batch_size}-{choice.rate_factor:.6f}-{seed}"

    def _forget(self, key: tuple[Choice, int]) -> None:
        self._open.pop(key, None)
        shutil.rmtree(self._path(key), ignore_errors=True)

    def drop(self, entry: Entry, seed: int = 0) -> None:
        """A run will not go on."""
        self._forget((entry.choice, seed))

    def _badness(self, metrics: Mapping[str, float | None]) -> float:
        """The loss or, without one, the target's metric, so that less is better."""
        name = "loss" if metrics.get("loss") is not None else self._metric
        value = metrics.get(name)
        if value is None:
            return math.inf
        return value if is_lower_better(name) else -value


def rate_keywords(choice: Choice, num_learners: int, base: Mapping[str, Any]) -> dict[str, str]:
    """``scale_lr`` for a choice: Rudra's rule gives its rate for any optimizer, also a function.

    sqrt(μ' P/B) is the factor for B = P² μ/K, and for B P/K where the user's own rule has B.

    >>> from gruppetto.protocols import KSync
    >>> rate_keywords(Choice(KSync(2), 16, 0.5), 8, {"batch_size": 16})
    {'scale_lr': 'sqrt-batch:batch=512'}
    """
    own = base.get("scale_lr")
    if choice.rate_factor == 1.0 and own is None:
        return {}
    usual = int(base["batch_size"])
    reference = float(usual * num_learners)
    if own is not None:
        reference = float(RATE_SCALINGS.parse(own).batch)  # type: ignore[attr-defined]
    # What multiplies the rate is sqrt(μ' P/B); hardsync's is sqrt(μ P/reference).
    batch = reference * choice.batch_size / usual / choice.rate_factor**2
    return {"scale_lr": RATE_SCALINGS.format(SqrtBatch(batch=max(1, round(batch))))}
