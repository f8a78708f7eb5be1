"""When and where network versions are evaluated, from the snapshots that modules hand in.

* ``live`` in virtual time: at once, because time stands still meanwhile.
* ``live`` with real processes: in a thread of the caller, which has nothing else to do; no module
  ever waits for it, but it takes a core.
* ``deferred``: snapshots are kept, and evaluated after the clock has stopped.
"""

from __future__ import annotations

import time as clock
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeAlias

import torch

from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.runs.decoupled.parts import DecoupledParts
from gruppetto.runs.evaluation import Due, Metrics, finite_or_none

__all__ = ["AtOnce", "Deferred", "Evaluation", "InThread", "Nowhere", "choose_evaluation"]

Snapshots: TypeAlias = dict[int, Snapshot]
#: Versions that may wait for a thread that falls behind.
_MAX_WAITING: Final = 16


class Evaluation(ABC):
    """Evaluates network versions.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: DecoupledParts) -> None:
        self._parts = parts
        #: Called with each result, in order of versions, by who calls the methods below.
        self.done: Callable[[Due, Metrics], None] = lambda due, metrics: None
        #: Seconds that evaluations took.
        self.seconds = 0.0

    @abstractmethod
    def submit(self, due: Due, snapshots: Snapshots) -> None:
        """Have a version evaluated.

        Raises:
            TaskError: the task's evaluation failed.
        """

    def poll(self) -> None:
        """Take what has been done meanwhile.

        Raises:
            TaskError: the task's evaluation failed.
        """
        return  # nothing is ever under way where submitting does it all

    def finish(self) -> None:
        """The clock has stopped: return when everything submitted is done.

        Raises:
            TaskError: the task's evaluation failed.
        """
        return

    def waiting(self) -> list[Due]:
        """What is submitted and not done."""
        return []

    def close(self) -> None:
        """Nothing more is wanted."""
        return

    def _measure(self, due: Due, snapshots: Snapshots) -> tuple[Metrics, float]:
        started = clock.perf_counter()
        metrics = finite_or_none(self._parts.evaluate(due.version, snapshots))
        return metrics, clock.perf_counter() - started


def _weights(snapshots: Snapshots) -> Snapshots:
    """The same without what is only for a resume: it may be large, and wait for long."""
    return {
        number: replace(
            snapshot,
            tensors={
                name: tensor
                for name, tensor in snapshot.tensors.items()
                if name.startswith(("parameter/", "buffer/"))
            },
            plain={},
        )
        for number, snapshot in snapshots.items()
    }


class Nowhere(Evaluation):
    """No evaluation."""

    def submit(self, due: Due, snapshots: Snapshots) -> None:
        pass


class AtOnce(Evaluation):
    """While everything waits."""

    def submit(self, due: Due, snapshots: Snapshots) -> None:
        metrics, seconds = self._measure(due, snapshots)
        self.seconds += seconds
        self.done(due, metrics)


class Deferred(Evaluation):
    """After the clock has stopped."""

    def __init__(self, parts: DecoupledParts) -> None:
        super().__init__(parts)
        self._kept: deque[tuple[Due, Snapshots]] = deque()

    def submit(self, due: Due, snapshots: Snapshots) -> None:
        self._kept.append((due, _weights(snapshots)))

    def finish(self) -> None:
        while self._kept:
            due, snapshots = self._kept[0]
            metrics, seconds = self._measure(due, snapshots)
            self._kept.popleft()
            self.seconds += seconds
            self.done(due, metrics)

    def waiting(self) -> list[Due]:
        return [due for due, _ in self._kept]


class InThread(Evaluation):
    """In a thread of this process, one version at a time, while the run goes on elsewhere.

    Args:
        parts: of the run; nobody else may load versions into its network meanwhile.
        warn: told when a version gives way because evaluation falls behind.
    """

    def __init__(self, parts: DecoupledParts, warn: Callable[[str], object]) -> None:
        super().__init__(parts)
        self._warn = warn
        # A new thread has torch's own number of threads, and other bits with it.
        self._pool = ThreadPoolExecutor(
            1, "evaluator", torch.set_num_threads, (parts.settings.threads,)
        )
        self._busy: tuple[Due, Future[tuple[Metrics, float]]] | None = None
        self._kept: deque[tuple[Due, Snapshots]] = deque()

    def submit(self, due: Due, snapshots: Snapshots) -> None:
        self._kept.append((due, _weights(snapshots)))
        if len(self._kept) > _MAX_WAITING:
            skipped, _ = self._kept.popleft()
            self._warn(
                f"evaluation falls behind: version {skipped.version} is skipped; evaluate less "
                "often, or deferred"
            )
        self.poll()

    def poll(self) -> None:
        if self._busy is not None and self._busy[1].done():
            self._take()
        self._start_next()

    def finish(self) -> None:
        self._start_next()
        while self._busy is not None:
            self._take()
            self._start_next()

    def waiting(self) -> list[Due]:
        busy = [] if self._busy is None else [self._busy[0]]
        return [*busy, *(due for due, _ in self._kept)]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> None:
        assert self._busy is not None
        due, future = self._busy
        metrics, seconds = future.result()
        self._busy = None
        self.seconds += seconds
        self.done(due, metrics)

    def _start_next(self) -> None:
        if self._busy is None and self._kept:
            due, snapshots = self._kept.popleft()
            self._busy = due, self._pool.submit(self._measure, due, snapshots)


def choose_evaluation(parts: DecoupledParts, warn: Callable[[str], object]) -> Evaluation:
    """What the settings ask for, as it is done on the run's engine."""
    if not parts.is_evaluated:
        return Nowhere(parts)
    if parts.settings.evaluate == "deferred":
        return Deferred(parts)
    return AtOnce(parts) if parts.settings.engine == "virtual" else InThread(parts, warn)
