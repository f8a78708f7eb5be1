"""Our side of ``decoupled.py``: real runs of the local engine, begun once, stopped between turns.

A run is stopped in mid-flight, as it happens to be, and goes on from there. So its mini-batches are
counted from one update of module 1 to another, without those that a stop fell into.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

import psutil
import torch
from decoupled_contenders import PATIENCE, Block, Contender, awake, pin, rest
from decoupled_peers import mini_batch
from torch import Tensor

import gruppetto as gp
from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.schedule import Schedule
from gruppetto.decoupled.timeline import simulate
from gruppetto.trace import ModuleRow
from gruppetto.training.models.resnet import ResNet

__all__ = ["Run", "predicted_period"]

OPTIMIZER = "sgd:lr=0.01,momentum=0.9,nesterov=true,weight_decay=0.0005"


class Pictures:
    """The one mini-batch of all contenders, whichever is asked for; no epoch of it ever ends.

    Args:
        batch_size: N.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch = mini_batch(batch_size)
        self._num_samples = 10_000 * batch_size

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[index % len(part)] for part in self._batch)

    def make_batch(
        self, indices: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Pictures [N, 3, 32, 32] and labels [N]."""
        return self._batch


class Run(Contender):
    """A run of ours, one process for each module.

    Args:
        name: in the table.
        method: and its keys, as for ``--decouple``.
        depth: of the residual network.
        batch_size: of a mini-batch.
        cuts: blocks at which modules 2, 3, ... begin.
        places: core of each module.
        folder: of the run.
    """

    def __init__(
        self,
        name: str,
        method: str,
        depth: int,
        batch_size: int,
        cuts: list[int],
        places: list[set[int]],
        folder: str,
    ) -> None:
        super().__init__(name)
        self._arguments = method, depth, batch_size, cuts, folder
        self._places = places
        self._process: multiprocessing.process.BaseProcess | None = None
        self._processes: list[psutil.Process] = []
        self._stopped = float("-inf")
        #: Seconds of this machine's clock less seconds of the run's, or a little more.
        self._offset = float("inf")

    def start(self) -> None:
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_train, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        for _ in self._places:  # all have begun when each has applied something
            self._hear()
        caller = psutil.Process(self._process.pid)
        self._processes = [caller, *caller.children(recursive=True)]
        for number, place in enumerate(self._places, start=1):
            pin(self._module(number).pid, place)
        rest(self._processes)
        self._stopped = time.perf_counter()

    def run_block(self, num_mini_batches: int) -> Block:
        assert self._process is not None
        begin, used = time.perf_counter(), self._cpu_seconds()
        # Rows of before the stop may be on the way. Turns of others lie between.
        old = (self._stopped + begin) / 2
        ends: list[float] = []
        rows: list[list[ModuleRow]] = [[] for _ in self._places]
        with awake(self._processes):
            while len(ends) <= num_mini_batches:
                row = self._hear()
                if row.time + self._offset > old:
                    rows[row.module - 1].append(row)
                    if row.module == 1:
                        ends.append(row.time)
        self._stopped = time.perf_counter()
        seconds = (ends[num_mini_batches] - ends[0]) / num_mini_batches
        share = (self._cpu_seconds() - used) / (self._stopped - begin)
        # The stop fell into a pass of each module's first row, or into its waiting.
        passes = [[(row.forward, row.backward, row.step) for row in of[1:]] for of in rows]
        return Block(seconds, share * seconds, passes)

    def stop(self) -> None:
        for process in self._processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process, self._processes = None, []

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def _hear(self) -> ModuleRow:
        """The next row of the trace.

        Raises:
            RuntimeError: the run has failed or does not answer.
        """
        if not self._pipe.poll(PATIENCE):
            raise RuntimeError(f"the run {self.name!r} does not answer")
        try:
            told, row = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the run {self.name!r} has ended") from None
        if isinstance(row, str):
            raise RuntimeError(f"the run {self.name!r} failed:\n{row}")
        self._offset = min(self._offset, told - row.time)
        assert isinstance(row, ModuleRow)
        return row

    def _module(self, number: int) -> psutil.Process:
        """The process of a module, which is named after it."""
        name = f"gp module {number}"
        (found,) = (process for process in self._processes if process.name() == name)
        return found


def _train(
    pipe: Connection, method: str, depth: int, batch_size: int, cuts: list[int], folder: str
) -> None:
    """A run without end, in a process of its own; tells of every update of every module."""

    def tell(row: object) -> None:
        if isinstance(row, ModuleRow):
            pipe.send((time.perf_counter(), row))

    try:
        gp.train(
            gp.Task(partial(ResNet, depth), Pictures(batch_size), name=f"resnet{depth}"),
            decouple=method,
            cuts=[f"blocks.{cut}" for cut in cuts],
            batch_size=batch_size,
            epochs=1e6,
            optimizer=OPTIMIZER,
            evaluate="off",
            out=folder,
            progress=False,
            on_event=tell,
        )
    except Exception:
        pipe.send((0.0, traceback.format_exc()))


def predicted_period(method: str, passes: Sequence[tuple[float, float]]) -> float:
    """Seconds per mini-batch by the timeline that the virtual engine runs on.

    Args:
        method: and its keys.
        passes: seconds of each module's forward pass, and of its backward pass and step.
    """
    wanted = METHODS.parse(method)
    schedule = Schedule(wanted.delays, barrier=wanted.schedule == "barrier")
    forward, backward = zip(*passes, strict=True)
    return simulate(schedule, forward, backward).period
