"""``gp.compare``: several runs side by side, everything but what is compared equal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppetto.errors import InvalidSetting, RunFailed
from gruppetto.runs.folder import new_folder
from gruppetto.runs.parts import Ingredients, build_parts, prepared_torch
from gruppetto.runs.settings import Settings, Target
from gruppetto.runs.start import start_run
from gruppetto.runs.train import plan_any
from gruppetto.training.task import Task

if TYPE_CHECKING:
    from gruppetto.runs.decoupled.settings import DecoupledSettings

__all__ = ["Comparison", "compare", "grid"]


@dataclass(frozen=True)
class Comparison:
    """Runs that have ended, in the order they were asked for.

    Attributes:
        folder: holds one folder per run.
        results: the summary of each; a failed one has ``error``.
        folders: where each run is.
    """

    folder: Path
    results: list[dict[str, Any]]
    folders: list[Path] = field(repr=False)


def grid(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of several values per option, the last option fastest.

    >>> grid({"protocol": ["hardsync", "async"], "seed": [0, 1]})[1]
    {'protocol': 'hardsync', 'seed': 1}
    """
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]


def compare(
    task: Task | str,
    runs: Sequence[Mapping[str, Any]],
    *,
    out: str | Path | None = None,
    progress: bool | None = None,
    target: str | None = None,
    **common: Any,
) -> Comparison:
    """Run a task several times; all settings are checked before the first run starts.

    Args:
        task: as for :func:`gruppetto.train`.
        runs: what differs: ``[{"protocol": "hardsync"}, {"protocol": "async"}]``.
        out: folder of the comparison. Default: a new one under ``runs/``.
        progress: show a bar per run on standard error.
        target: ``accuracy=0.95``: what runs will be compared by; they do not stop there.
        **common: what is the same for all, as for :func:`gruppetto.train`.

    Returns:
        The comparison. A run that fails (diverges, ...) is kept, with ``error`` in its result,
        and the others go on.

    Raises:
        UsageError: something given cannot work; nothing was written.
    """
    if not runs:
        raise InvalidSetting("compare: expected at least one run, got none")
    plans: list[tuple[Settings | DecoupledSettings, Ingredients]] = []
    loaded: dict[tuple[object, object], Task] = {}
    splits: dict[Any, Any] = {}
    for wanted in runs:
        values = {**common, **wanted}
        # Nothing takes cores from the learners of a comparison while its clock runs.
        if values.get("evaluate") is None and values.get("engine") != "virtual":
            values["evaluate"] = "deferred"
        key = values.get("model"), values.get("data")
        plans.append(plan_any(task, loaded=loaded.get(key), splits=splits, **values))
        loaded[key] = plans[-1][1].task
    for number, (settings, ingredients) in enumerate(plans):
        with prepared_torch(settings):
            metrics = _check(settings, ingredients, is_evaluated=target is not None and not number)
            if target is not None and metrics is not None:
                Target(target).is_reached(metrics)
    labels = [label_of(run, settings) for run, (settings, _) in zip(runs, plans, strict=True)]
    folder = new_folder(out, f"compare-{plans[0][1].task.name}")
    results: list[dict[str, Any]] = []
    folders: list[Path] = []
    for number, (label, (settings, ingredients)) in enumerate(zip(labels, plans, strict=True)):
        path = folder / f"{number:02d}-{_safe(label)}"
        folders.append(path)
        try:
            run = start_run(settings, ingredients, out=path, label=label, progress=progress)
            results.append(run.result)
        except RunFailed as error:
            results.append({**error.result, "error": str(error)})
        if results[-1].get("stopped_by") == "interrupted":
            break
    return Comparison(folder, results, folders[: len(results)])


def _check(
    settings: Settings | DecoupledSettings, ingredients: Ingredients, *, is_evaluated: bool
) -> dict[str, float] | None:
    """Build all parts of a run, and evaluate its initial weights if asked to.

    Raises:
        UsageError: whatever cannot work.
    """
    if isinstance(settings, Settings):
        server = build_parts(settings, ingredients).server
        return server.evaluate(0, settings.seed) if is_evaluated else None
    from gruppetto.runs.decoupled.parts import build_decoupled_parts

    parts = build_decoupled_parts(settings, ingredients)
    return parts.evaluate_initial() if is_evaluated else None


def label_of(run: Mapping[str, Any], settings: Settings | DecoupledSettings) -> str:
    """What tells a run from the others in words: ``async modulation=none``."""
    # A bound on staleness is written into the protocol.
    told = ("protocol", "decouple", "delays", "max_staleness", "on_stale", "cuts", "balance")
    others = [key for key in run if key not in told]
    name = settings.protocol if isinstance(settings, Settings) else settings.decouple
    cuts = [f"cut={','.join(run['cuts'])}"] if run.get("cuts") else []
    own = [f"{key}={getattr(settings, key, run[key])}" for key in others]
    return " ".join([name, *cuts, *own])


def _safe(label: str) -> str:
    return "".join(c if c.isalnum() or c in "._=-" else "-" for c in label)
