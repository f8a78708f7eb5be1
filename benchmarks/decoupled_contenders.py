"""Contenders of ``decoupled.py``: each has its processes from the start, and one runs at a time.

All others are stopped meanwhile (SIGSTOP), so that a contender has both cores for itself and all of
them meet the same machine within seconds of each other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

__all__ = ["Block", "Contender", "Lane", "Workers", "awake", "cores", "pin", "rest", "rounds"]

#: Seconds that a block of a contender may take before the benchmark gives up.
PATIENCE = 300.0


@dataclass(frozen=True)
class Block:
    """What some mini-batches in a row took.

    Attributes:
        seconds: per mini-batch.
        cpu_seconds: of all processes together, per mini-batch.
        passes: of each module and mini-batch (forward, backward, step) in seconds, where taken.
    """

    seconds: float
    cpu_seconds: float
    passes: list[list[tuple[float, float, float]]] = field(default_factory=list)


class Contender(ABC):
    """Somebody who trains the same network on the same cut.

    Args:
        name: in the table.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def start(self) -> None:
        """Have all processes ready and at rest; does nothing the second time."""

    @abstractmethod
    def run_block(self, num_mini_batches: int) -> Block:
        """Wake up, train, come to rest again.

        Raises:
            RuntimeError: a process has failed or does not answer.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all processes, also those that hang; does nothing the second time."""


def cores(num_modules: int) -> list[int]:
    """One core for each module.

    Raises:
        SystemExit: this process may use fewer.
    """
    found = sorted(os.sched_getaffinity(0))
    if len(found) < num_modules:
        raise SystemExit(
            f"decoupled: expected a core of its own for each of {num_modules} modules, got "
            f"{len(found)}; run it on a machine with more cores"
        )
    return found[:num_modules]


def pin(process: int, place: set[int]) -> None:
    """Keep a process on these cores, with all the threads it has now and will have."""
    for thread in os.listdir(f"/proc/{process}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), place)


def rest(processes: Sequence[psutil.Process]) -> None:
    """Stop processes, and return when all have stopped."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                time.sleep(0.001)


@contextlib.contextmanager
def awake(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Let stopped processes run for a while."""
    for process in processes:
        process.resume()
    try:
        yield
    finally:
        rest(processes)


class Workers:
    """Processes that carry out blocks together, each on a core of its own; at rest in between.

    Args:
        main: called in each process with its rank and its arguments; gives a function that runs a
            named block and returns begin and end (of ``time.perf_counter``) and what else it took.
        arguments: of every process.
        places: the cores of every process.
    """

    def __init__(
        self, main: Callable[..., Any], arguments: tuple[Any, ...], places: Sequence[set[int]]
    ) -> None:
        self._main, self._arguments, self._places = main, arguments, places
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._handles: list[psutil.Process] = []
        self._pipes: list[Connection] = []

    def start(self) -> None:
        """Start all, and return when all are ready."""
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        for rank, place in enumerate(self._places):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(theirs, rank, place, self._main, self._arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()
        self._handles = [psutil.Process(process.pid) for process in self._processes]
        rest(self._handles)

    def run(self, name: str, num_mini_batches: int) -> Block:
        """A block: from the first process's begin to the last one's end."""
        with awake(self._handles):
            for pipe in self._pipes:
                pipe.send((name, num_mini_batches))
            answers = self._answers()
        begins, ends, cpus, passes = zip(*answers, strict=True)
        return Block(
            (max(ends) - min(begins)) / num_mini_batches, sum(cpus) / num_mini_batches, list(passes)
        )

    def _answers(self) -> list[Any]:
        """One from each process.

        Raises:
            RuntimeError: one failed, ended or did not answer.
        """
        answers: dict[int, Any] = {}
        limit = time.monotonic() + PATIENCE
        while len(answers) < len(self._pipes):
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(missing), timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                raise RuntimeError(f"processes {sorted(missing.values())} do not answer")
            for pipe in ready:
                rank = missing[pipe]  # type: ignore[index]
                try:
                    answers[rank], failure = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise RuntimeError(f"process {rank} has ended") from None
                if failure is not None:
                    raise RuntimeError(f"process {rank} failed:\n{failure}")
        return [answers[rank] for rank in range(len(self._pipes))]

    def stop(self) -> None:
        """Kill all: a stopped process cannot end in order, and there is nothing to save."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._handles, self._pipes = [], [], []


def _work(
    pipe: Connection, rank: int, place: set[int], main: Callable[..., Any], arguments: Any
) -> None:
    """Life of a worker process."""
    os.sched_setaffinity(0, place)
    try:
        run_block = main(rank, *arguments)
        pipe.send((None, None))
        while True:
            name, num_mini_batches = pipe.recv()
            used = time.process_time()
            begin, end, passes = run_block(name, num_mini_batches)
            pipe.send(((begin, end, time.process_time() - used, passes), None))
    except EOFError:  # the benchmark is gone
        pass
    except Exception:
        pipe.send((None, traceback.format_exc()))


class Lane(Contender):
    """A contender that shares its processes with others, of which one runs at a time.

    Args:
        name: in the table, and of the block that the processes run.
        workers: the processes.
    """

    def __init__(self, name: str, workers: Workers) -> None:
        super().__init__(name)
        self._workers = workers

    def start(self) -> None:
        self._workers.start()

    def run_block(self, num_mini_batches: int) -> Block:
        return self._workers.run(self.name, num_mini_batches)

    def stop(self) -> None:
        self._workers.stop()


def rounds(
    contenders: Sequence[Contender],
    num_rounds: int,
    num_mini_batches: int,
    tell: Callable[[str], None],
) -> dict[str, list[Block]]:
    """Blocks of all contenders in turns, ``num_rounds`` of each, after one that does not count.

    A round begins with another contender each time. Whatever happens, all processes are ended.
    """
    found: dict[str, list[Block]] = {contender.name: [] for contender in contenders}
    try:
        for contender in contenders:
            contender.start()
            contender.run_block(2)
        for number in range(num_rounds):
            first = number % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                found[contender.name].append(contender.run_block(num_mini_batches))
            tell(
                f"round {number + 1} of {num_rounds}: "
                + "  ".join(f"{name} {blocks[-1].seconds:.3f}" for name, blocks in found.items())
            )
    finally:
        for contender in contenders:
            contender.stop()
    return found
