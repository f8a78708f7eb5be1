"""How a decoupled run ended: its summary, and the exception for an ending that is a failure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, TypeAlias

from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.decoupled.timeline import period
from gruppetto.errors import Diverged, RunFailed
from gruppetto.protocols.messages import NOT_FINITE, PassFailed
from gruppetto.runs.accounts import fresh_fraction
from gruppetto.runs.decoupled.parts import DecoupledParts
from gruppetto.runs.decoupled.tally import Tally
from gruppetto.runs.divergence import describe, listed
from gruppetto.runs.folder import RunFolder

__all__ = ["FAILED", "Memory", "blocks_of", "divergence_of", "failure_of", "summarise"]

#: Why a run stopped whose pass failed, other than by numbers that are not finite.
FAILED: Final = RunFailed.stopped_by
#: Module -> bytes that its mini-batches in flight take at most: predicted, and seen; None where
#: that is not known.
Memory: TypeAlias = Mapping[int, tuple[int | None, int | None]]


def summarise(
    parts: DecoupledParts,
    tally: Tally,
    final: Mapping[int, Snapshot],
    metrics: Mapping[str, float | None],
    memory: Memory,
    folder: RunFolder,
) -> dict[str, Any]:
    """The numbers of the JSON output that follow from events and weights.

    Args:
        parts: of a run that has ended.
        tally: of its trace.
        final: snapshots with state at the end; empty where a pass failed.
        metrics: of its last evaluation; empty where there was none.
        memory: of its modules.
        folder: of the run.
    """
    settings, network = parts.settings, parts.network
    applied, dropped = tally.num_applied, tally.num_dropped
    total = parts.schedule.num_mini_batches or tally.num_begun
    per_module = tally.per_module()
    for each, stage, names in zip(per_module, network.stages, blocks_of(parts), strict=True):
        predicted, peak = memory.get(each["module"], (None, None))
        each.update(
            blocks=names,
            parameters=sum(p.numel() for p in stage.parameters()),
            predicted_bytes=predicted,
            peak_bytes=peak,
        )
    result = {
        "run": str(folder.path),
        "task": settings.task,
        "engine": settings.engine,
        "protocol": None,
        "decouple": settings.decouple,
        "modules": parts.method.modules,
        "tail": settings.tail,
        "begins": settings.begins,
        "modulation": settings.modulation,
        "compensation": settings.compensation,
        "learners": None,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "updates": applied,
        "samples": tally.samples,
        "epochs": tally.epoch,
        "time": tally.time,
        "mean_update_time": tally.time / applied if applied else None,
        "expected_update_time": _expected(parts, tally),
        "evaluation_time": None,
        "wall_time": None,
        "stopped_by": None,
        "train_loss": None,
        "test_loss": metrics.get("loss"),
        "test_accuracy": metrics.get("accuracy"),
        "metrics": dict(metrics),
        "mean_staleness": tally.staleness.mean,
        "max_staleness": tally.staleness.max,
        "fresh_fraction": fresh_fraction(tally.staleness),
        "gamma": None,
        "mini_batches_applied": applied,
        "mini_batches_cancelled": 0,
        "mini_batches_discarded": 0,
        "mini_batches_given_up": 0,
        "mini_batches_dropped": dropped,
        "mini_batches_left": total - applied - dropped,
        "learners_lost": 0,
        "learners_restarted": 0,
        "gradients_rejected": 0,
        "learners_without_contribution": [],
        "without_contribution_why": None,
        "per_learner": [],
        "per_module": per_module,
        "diverged": None,
        "target_reached_at": None,
        "threads": settings.threads,
        "weights_sha256": network.weights_sha256(final) if final else None,
        "state_sha256": network.state_sha256(final) if final else None,
        "events_sha256": tally.events.hexdigest(),
        "commands_sha256": tally.commands.hexdigest(),
    }
    if settings.engine != "virtual":
        result["cores"] = len(os.sched_getaffinity(0))
    return result


def _expected(parts: DecoupledParts, tally: Tally) -> float | None:
    """Seconds per mini-batch once under way, if only passes and steps take time."""
    forward, backward = [], []
    for sums in tally.modules.values():
        if not sums.updates:
            return None
        seconds = {key: value / sums.updates for key, value in sums.seconds.items()}
        forward.append(seconds["loading"] + seconds["forward"])
        backward.append(seconds["backward"] + seconds["step"])
    return period(parts.schedule, forward, backward)


def blocks_of(parts: DecoupledParts) -> list[list[str]]:
    """Names of the blocks of each module."""
    names = [block.name for block in parts.network.chain.blocks]
    starts = [0, *(names.index(name) for name in parts.settings.begins), len(names)]
    return [names[a:b] for a, b in pairwise(starts)]


def divergence_of(
    parts: DecoupledParts, tally: Tally, failure: PassFailed | None
) -> dict[str, Any]:
    """The state of a run at the moment it diverged; see :mod:`gruppetto.runs.divergence`.

    ``module`` and ``mini_batch`` are those of the pass that gave something not finite; None where
    losses ended the run.
    """
    watch, last = tally.watch, tally.last_update
    settings = parts.settings
    advice = ["a lower learning rate"]
    # See gruppetto.theory.largest_stable_rate: momentum pays with fresh gradients only.
    if any(parts.method.delays) and parts.network.momentum > 0.0:
        advice.append("less momentum")
    if settings.clip is None:
        advice.append("--clip norm:max=1")
    if any(parts.method.delays):
        advice.append("fewer modules")
    return {
        "cause": "loss" if failure is None else "not-finite",
        "module": None if failure is None else failure.module,
        "mini_batch": None if failure is None else failure.mini_batch,
        "loss": watch.loss,
        "start_loss": watch.start,
        "gradients": len(watch.recent),
        # Of module 1, which are the latest.
        "mean_staleness": watch.mean_staleness,
        "max_staleness": watch.max_staleness,
        "learning_rate": None if last is None else last.learning_rate,
        "effective_rate": None if last is None else last.effective_rate,
        "try": advice,
    }


def failure_of(
    reason: str,
    known: dict[str, Any] | None,
    failure: PassFailed | None,
    updates: int,
    folder: RunFolder,
) -> RunFailed | None:
    """The exception for an ending that is a failure.

    Args:
        reason: why the run stopped.
        known: what :func:`divergence_of` gave; None where it did not diverge.
        failure: the pass that failed, if one did.
        updates: made by all modules.
        folder: of the run.
    """
    where = f"the run is in {folder.path}"
    if known is not None and failure is None:
        return Diverged(f"{describe(known, updates)}; {where}")
    if failure is None:
        return None
    what = f"mini-batch {failure.mini_batch} in module {failure.module}"
    if known is None:
        return RunFailed(f"{what} failed after {updates} updates: {failure.reason}; {where}")
    loss = ""
    if known["loss"] is not None:
        loss = f"; the loss was {known['loss']:.4g} before (mean of {known['gradients']})"
    return Diverged(
        f"diverged after {updates} updates: the loss or a gradient of {what} was {NOT_FINITE}"
        f"{loss}; try {listed(known['try'])}; {where}"
    )
