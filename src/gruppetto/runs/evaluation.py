"""When and where a run's weights are evaluated: at once, after the clock stops, or elsewhere.

* ``live`` in virtual time: at once, because time stands still meanwhile.
* ``live`` with real processes: in a process of its own (Rudra's statistics server), which takes a
  core while it works.
* ``deferred``: snapshots are kept, and evaluated after the clock has stopped.
"""

from __future__ import annotations

import math
import os
import socket
import time as clock
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from gruppetto.engines.local.memory import share
from gruppetto.engines.local.wire import receive_json, send_json
from gruppetto.errors import RunFailed, TaskError
from gruppetto.runs.parts import Parts
from gruppetto.training.packing import Packing

__all__ = [
    "AtOnce",
    "Deferred",
    "Due",
    "Elsewhere",
    "Evaluation",
    "Metrics",
    "Nowhere",
    "choose_evaluation",
    "evaluate_version",
    "evaluation_failed",
    "finite_or_none",
    "is_evaluated",
    "serve_evaluations",
]

Metrics: TypeAlias = dict[str, float | None]
#: Snapshots that may wait for an evaluator that falls behind.
_MAX_WAITING: Final = 16


@dataclass(frozen=True)
class Due:
    """A version to be evaluated, and where the run stood when it was published."""

    version: int
    #: Run time.
    time: float
    samples: int
    epoch: float
    train_loss: float | None


class Evaluation(ABC):
    """Evaluates versions of a run."""

    def __init__(self) -> None:
        #: Called with each result, in order of versions.
        self.done: Callable[[Due, Metrics], None] = lambda due, metrics: None
        #: Seconds that evaluations took.
        self.seconds = 0.0

    @abstractmethod
    def submit(self, due: Due) -> None:
        """Have the server's current weights evaluated.

        Raises:
            TaskError: the task's evaluation failed.
        """

    def finish(self) -> None:
        """The clock has stopped: return when everything submitted is done.

        Raises:
            TaskError: the task's evaluation failed.
        """
        return  # nothing is left where submitting does it all

    def waiting(self) -> list[Due]:
        """What is submitted and not done."""
        return []


class Nowhere(Evaluation):
    """No evaluation."""

    def submit(self, due: Due) -> None:
        pass


class AtOnce(Evaluation):
    """In this process, while everything waits."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts

    def submit(self, due: Due) -> None:
        started = clock.perf_counter()
        metrics = finite_or_none(evaluate_version(self._parts, due.version))
        self.seconds += clock.perf_counter() - started
        self.done(due, metrics)


class Deferred(Evaluation):
    """In this process, from snapshots, after the clock has stopped."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts
        self._snapshots: deque[tuple[Due, dict[str, Tensor]]] = deque()

    def submit(self, due: Due) -> None:
        self._snapshots.append((due, self._snapshot()))

    def finish(self) -> None:
        now = self._snapshot()
        try:
            while self._snapshots:
                due, tensors = self._snapshots[0]
                started = clock.perf_counter()
                self._parts.server.load_model(tensors)
                metrics = finite_or_none(evaluate_version(self._parts, due.version))
                self.seconds += clock.perf_counter() - started
                self._snapshots.popleft()
                self.done(due, metrics)
        finally:
            self._parts.server.load_model(now)

    def waiting(self) -> list[Due]:
        return [due for due, _ in self._snapshots]

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self._parts.server.model_tensors().items()}


class Elsewhere(Evaluation):
    """In the evaluator's process, one snapshot at a time, while the run goes on.

    Args:
        parts: of the run.
        channel: to the evaluator.
        warn: told when a snapshot gives way because the evaluator falls behind.
    """

    def __init__(self, parts: Parts, channel: socket.socket, warn: Callable[[str], object]) -> None:
        super().__init__()
        self._server = parts.server
        self._packing = Packing(parts.server.model_tensors())
        self._channel = channel
        self._warn = warn
        self._busy: Due | None = None
        self._waiting: deque[tuple[Due, int]] = deque()

    def submit(self, due: Due) -> None:
        descriptor, block = share(self._packing.num_bytes)
        views = self._packing.views(block)
        for name, tensor in self._server.model_tensors().items():
            views[name].copy_(tensor)
        self._waiting.append((due, descriptor))
        if len(self._waiting) > _MAX_WAITING:
            skipped, unread = self._waiting.popleft()
            os.close(unread)
            self._warn(
                f"evaluation falls behind: version {skipped.version} is skipped; evaluate less "
                "often, or deferred"
            )
        self._send_next()

    def fileno(self) -> int:
        """To wait on until :meth:`collect` has something to take."""
        return self._channel.fileno()

    def collect(self) -> None:
        """Take the result that can be read."""
        message, _ = receive_json(self._channel)
        if message is None or self._busy is None:
            raise TaskError("the process that evaluates is gone")
        if "error" in message:
            raise TaskError(message["error"])
        due, self._busy = self._busy, None
        self.seconds += message["seconds"]
        self._send_next()
        self.done(due, finite_or_none(message["metrics"]))

    def finish(self) -> None:
        while self._busy is not None:
            self.collect()

    def waiting(self) -> list[Due]:
        busy = [] if self._busy is None else [self._busy]
        return [*busy, *(due for due, _ in self._waiting)]

    def _send_next(self) -> None:
        if self._busy is None and self._waiting:
            self._busy, descriptor = self._waiting.popleft()
            try:
                send_json(self._channel, {"version": self._busy.version}, [descriptor])
            except OSError:  # it is gone, which collecting finds out
                pass
            finally:
                os.close(descriptor)


def serve_evaluations(parts: Parts, channel: socket.socket) -> None:
    """What the evaluator's process does until the server is gone."""
    packing = Packing(parts.server.model_tensors())
    while True:
        message, descriptors = receive_json(channel)
        if message is None:
            return
        _, block = share(packing.num_bytes, descriptors[0])
        os.close(descriptors[0])
        parts.server.load_model(packing.views(block))
        started = clock.perf_counter()
        answer: dict[str, Any]
        try:
            answer = {"metrics": evaluate_version(parts, message["version"])}
        except TaskError as error:
            # A message must not be longer than its reader takes.
            answer = {"error": str(error)[:8_000]}
        send_json(channel, {**answer, "seconds": clock.perf_counter() - started}, [])


def is_evaluated(parts: Parts) -> bool:
    """Whether there is anything to evaluate, and it is wanted."""
    task = parts.server.task
    return parts.settings.evaluate != "off" and (task.test is not None or task.evaluate is not None)


def choose_evaluation(parts: Parts, live: Callable[[], Evaluation]) -> Evaluation:
    """What the settings ask for; ``live`` makes the kind that the engine has for it."""
    if not is_evaluated(parts):
        return Nowhere()
    return Deferred(parts) if parts.settings.evaluate == "deferred" else live()


def evaluation_failed(
    error: TaskError, waiting: Sequence[Due], last_submitted: int, folder: Path
) -> RunFailed:
    """The task is at fault, but the run has begun: not bad usage.

    Args:
        error: what evaluating raised.
        waiting: evaluations that are not done; the first is the one that failed.
        last_submitted: version that failed where none waits.
        folder: of the run.
    """
    version = waiting[0].version if waiting else last_submitted
    return RunFailed(
        f"version {version} cannot be evaluated: {error}; the run is in {folder}",
        {"run": str(folder), "stopped_by": RunFailed.stopped_by},
    )


def finite_or_none(metrics: dict[str, float]) -> Metrics:
    """JSON knows no infinity and no not-a-number."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def evaluate_version(parts: Parts, version: int) -> dict[str, float]:
    """The task's metrics at the server's weights, as every evaluation of a run does it.

    Args:
        parts: of the run.
        version: of the weights, keys the random stream.
    """
    settings = parts.settings
    device = torch.device(settings.device)
    recalibration = [
        parts.mini_batches.fetch(number, device)[0] for number in range(settings.recalibrate_bn)
    ]
    return parts.server.evaluate(version, settings.seed, recalibration)
