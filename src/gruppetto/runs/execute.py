"""Runs an engine to its end and sums it up: what all engines, fresh and resumed runs share."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

from gruppetto.engines.base import Engine
from gruppetto.engines.virtual import LEARNERS_LOST
from gruppetto.errors import Diverged, LearnersLost, RunFailed, TooManyGivenUp
from gruppetto.protocols import Coordinator
from gruppetto.protocols.contributions import describe as describe_contributions
from gruppetto.protocols.contributions import without_contribution
from gruppetto.runs.accounts import fresh_fraction, measured_gamma, per_learner
from gruppetto.runs.divergence import describe, divergence_of, last_metrics
from gruppetto.runs.expected import expected_update_time
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.journal import Journal, Tally
from gruppetto.runs.parts import Parts
from gruppetto.trace import EvaluationRow, FailureRow, read_trace
from gruppetto.training.server import Server

__all__ = [
    "INTERRUPTED",
    "Run",
    "conclude",
    "failure_of",
    "history_of",
    "stopping_on_signals",
    "summarise",
]

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        folder: where its trace, checkpoints and settings are.
        result: the summary, as ``gruppetto train --json`` prints it.
        model: the trained model, in eval mode.
        history: one dict per evaluation: version, time, samples, epoch, train_loss, metrics.
        staleness: staleness -> number of gradients applied with it.
    """

    folder: RunFolder
    result: dict[str, Any]
    model: nn.Module
    history: list[dict[str, float | None]] = field(repr=False)
    staleness: dict[int, int] = field(repr=False)


def conclude(parts: Parts, engine: Engine, journal: Journal, folder: RunFolder) -> dict[str, Any]:
    """Run, evaluate, and write the last row.

    Returns:
        The summary, as ``gruppetto train --json`` prints it.

    Raises:
        RunFailed: the run ended without its goal; its folder holds what there is.
    """
    reason = engine.run(parts.coordinator, journal)
    metrics = last_metrics(journal.evaluations, finite=reason == Diverged.stopped_by)
    result = summarise(parts, journal.tally, metrics, folder)
    result.update(
        stopped_by=reason,
        train_loss=journal.train_loss,
        target_reached_at=journal.target_reached_at,
        gamma=measured_gamma(journal.gammas),
        wall_time=journal.wall_time,
    )
    if parts.settings.engine != "virtual":
        result["evaluation_time"] = journal.evaluation_time
        result["learners_restarted"] = engine.num_restarted
        result["cores"] = len(os.sched_getaffinity(0))
        result["expected_update_time"] = expected_update_time(parts, result, journal.rounds)
    journal.end(result)
    error = failure_of(reason, parts, folder)
    if error is not None:
        error.result = result
        raise error
    return result


def history_of(evaluations: Iterable[EvaluationRow]) -> list[dict[str, float | None]]:
    """One dict per evaluation, as :attr:`Run.history` shows them."""
    return [_history_row(row) for row in evaluations]


def summarise(
    parts: Parts, tally: Tally, metrics: Mapping[str, float | None], folder: RunFolder
) -> dict[str, Any]:
    """The numbers of the JSON output that follow from events and weights.

    Args:
        parts: of a run that has ended.
        tally: of its events.
        metrics: of its last evaluation; empty where there was none.
        folder: of the run.
    """
    coordinator: Coordinator = parts.coordinator
    ledger = coordinator.ledger
    server: Server = parts.server
    per_epoch = parts.mini_batches.samples_per_epoch
    return {
        "run": str(folder.path),
        "task": parts.settings.task,
        "engine": parts.settings.engine,
        "protocol": parts.settings.protocol,
        "modulation": parts.settings.modulation,
        "compensation": parts.settings.compensation,
        "learners": parts.settings.learners,
        "batch_size": parts.settings.batch_size,
        "seed": parts.settings.seed,
        "updates": coordinator.version,
        "samples": coordinator.num_samples_applied,
        "epochs": coordinator.num_samples_applied / per_epoch,
        "time": tally.time,
        "mean_update_time": tally.time / coordinator.version if coordinator.version else None,
        "expected_update_time": None,
        "evaluation_time": None,
        "wall_time": None,
        "stopped_by": coordinator.finished,
        "train_loss": None,
        "test_loss": metrics.get("loss"),
        "test_accuracy": metrics.get("accuracy"),
        "metrics": dict(metrics),
        "mean_staleness": coordinator.staleness.mean,
        "max_staleness": coordinator.staleness.max,
        "fresh_fraction": fresh_fraction(coordinator.staleness),
        "gamma": None,
        "mini_batches_applied": ledger.num_applied,
        "mini_batches_cancelled": coordinator.num_cancelled,
        "mini_batches_discarded": coordinator.num_discarded,
        "mini_batches_given_up": ledger.num_given_up,
        "mini_batches_dropped": ledger.num_dropped,
        "mini_batches_left": ledger.num_left,
        "learners_lost": coordinator.num_lost,
        "learners_restarted": 0,
        "gradients_rejected": coordinator.num_rejected,
        "learners_without_contribution": without_contribution(tally.account, coordinator.clocks.of),
        "without_contribution_why": describe_contributions(
            tally.account, coordinator.clocks.of, coordinator.protocol.bound.restarts
        ),
        "per_learner": per_learner(tally.account),
        "diverged": divergence_of(parts),
        "target_reached_at": None,
        "threads": parts.settings.threads,
        "weights_sha256": server.weights_sha256(),
        "state_sha256": server.state_sha256(),
        "events_sha256": tally.events.hexdigest(),
        "commands_sha256": tally.commands.hexdigest(),
    }


def failure_of(reason: str, parts: Parts, folder: RunFolder) -> RunFailed | None:
    """The exception for an ending that is a failure."""
    coordinator = parts.coordinator
    where = f"the run is in {folder.path}"
    if reason == Diverged.stopped_by:
        known = divergence_of(parts)
        assert known is not None
        return Diverged(f"{describe(known, coordinator.version)}; {where}")
    if reason == TooManyGivenUp.stopped_by:
        return TooManyGivenUp(
            f"{coordinator.ledger.num_given_up} mini-batch(es) failed "
            f"{parts.settings.max_attempts} times and were given up, "
            f"{parts.settings.max_given_up} allowed; {_last_failure(folder)}{where}"
        )
    if reason == LEARNERS_LOST:
        return LearnersLost(
            f"all learners are lost after {coordinator.version} updates and none returns; {where}"
        )
    return None


def _last_failure(folder: RunFolder) -> str:
    failures: list[FailureRow] = read_trace(folder.trace).failures
    if not failures:
        return ""
    last = failures[-1]
    return f"the last was mini-batch {last.mini_batch}: {last.traceback.strip().splitlines()[-1]}; "


def _history_row(row: EvaluationRow) -> dict[str, float | None]:
    return {
        "version": row.version,
        "time": row.time,
        "samples": row.samples,
        "epoch": row.epoch,
        "train_loss": row.train_loss,
        **{f"test_{name}": value for name, value in row.metrics.items()},
    }


@contextmanager
def stopping_on_signals(request_stop: Callable[[str], object], folder: RunFolder) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run cleanly; the second is an ordinary interrupt.

    Args:
        request_stop: told why.
        folder: of the run; a KeyboardInterrupt says where it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        request_stop(INTERRUPTED)
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = (str(folder.path),)
        raise
    finally:
        restore()
