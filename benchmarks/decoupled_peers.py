"""Peers of ``decoupled.py``: PyTorch's own pipelines, and training without a pipeline.

All have the same modules on the same cores, one process and one thread each, and talk over gloo on
the loopback device. ``pipelining`` is given the shapes of what travels, so it infers nothing.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from gruppetto.training.models.resnet import ResNet

__all__ = ["SCHEDULES", "block_times", "cut", "one_process", "optimizer", "pipeline"]

#: What one process measures: begin, end (``time.perf_counter``) and each mini-batch's passes.
Taken = tuple[float, float, list[tuple[float, float, float]]]
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """That of the papers' experiments."""
    return torch.optim.SGD(
        module.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
    )


def network(depth: int) -> nn.Sequential:
    """The same weights in every process."""
    torch.manual_seed(1)
    return ResNet(depth).blocks


def mini_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Pictures [N, 3, 32, 32] and labels [N], the same in every process."""
    generator = torch.Generator().manual_seed(2)
    pictures = torch.randn(batch_size, 3, 32, 32, generator=generator)
    return pictures, torch.randint(10, (batch_size,), generator=generator)


def cut(times: list[float], num_modules: int) -> list[int]:
    """The blocks at which modules 2, 3, ... begin, so that the slowest module is as fast as can be.

    >>> cut([1.0, 1.0, 1.0, 3.0], 2)
    [3]
    >>> cut([1.0, 5.0, 1.0, 1.0], 3)
    [1, 2]
    """
    #: Number of blocks -> time of the slowest module, and the cuts; with ever more modules.
    best: dict[int, tuple[float, list[int]]] = {
        n: (sum(times[:n]), []) for n in range(1, len(times) + 1)
    }
    for parts in range(2, num_modules + 1):
        best = {
            n: min(
                (max(best[m][0], sum(times[m:n])), [*best[m][1], m]) for m in range(parts - 1, n)
            )
            for n in range(parts, len(times) + 1)
        }
    return best[len(times)][1]


def block_times(rank: int, depth: int, batch_size: int) -> Callable[[str, int], Taken]:
    """In a process of its own: forward, backward and step of each block of the network, alone."""
    torch.set_num_threads(1)
    blocks = [(block, optimizer(block)) if any(True for _ in block.parameters()) else (block, None)
              for block in network(depth)]  # fmt: skip
    pictures, labels = mini_batch(batch_size)

    def run(name: str, num_mini_batches: int) -> Taken:
        begin = time.perf_counter()
        runs = []
        for _ in range(num_mini_batches):
            ends: list[tuple[Tensor, Tensor, float]] = []
            x = pictures
            for number, (block, _) in enumerate(blocks):
                x = x.detach().requires_grad_(number > 0)
                now = time.perf_counter()
                y = block(x)
                if number == len(blocks) - 1:
                    y = nn.functional.cross_entropy(y, labels)
                ends.append((x, y, time.perf_counter() - now))
                x = y
            gradient = None
            passes = []
            for (_, stepper), (x, y, forward) in zip(blocks[::-1], ends[::-1], strict=True):
                now = time.perf_counter()
                y.backward(gradient)
                backward = time.perf_counter() - now
                gradient = x.grad
                now = time.perf_counter()
                if stepper is not None:
                    stepper.step()
                    stepper.zero_grad()
                passes.append((forward, backward, time.perf_counter() - now))
            runs.append(passes[::-1])
        # The fastest of several: whatever else ran on the machine only made them slower.
        return begin, time.perf_counter(), [min(of_block) for of_block in zip(*runs, strict=True)]

    return run


def one_process(
    rank: int, depth: int, batch_size: int, num_threads: int
) -> Callable[[str, int], Taken]:
    """The whole network in one process, as anybody would train it."""
    torch.set_num_threads(num_threads)
    module = network(depth)
    stepper = optimizer(module)
    pictures, labels = mini_batch(batch_size)

    def run(name: str, num_mini_batches: int) -> Taken:
        begin = time.perf_counter()
        for _ in range(num_mini_batches):
            stepper.zero_grad()
            nn.functional.cross_entropy(module(pictures), labels).backward()
            stepper.step()
        return begin, time.perf_counter(), []

    return run


def pipeline(
    rank: int, store: str, depth: int, batch_size: int, cuts: list[int], micro_batches: list[int]
) -> Callable[[str, int], Taken]:
    """One module of each pipeline; the names are those of :data:`SCHEDULES` with micro-batches
    (``1F1B/4``), and ``bp/gloo`` for whole mini-batches handed over."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    size = len(cuts) + 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    blocks = network(depth)
    pictures, labels = mini_batch(batch_size)
    edges = [0, *cuts, len(blocks)]
    module = blocks[edges[rank] : edges[rank + 1]]
    with torch.no_grad():
        blocks.eval()
        comes = blocks[: edges[rank]](pictures[:1]).shape[1:]
        goes = blocks[: edges[rank + 1]](pictures[:1]).shape[1:]
        blocks.train()
    runners: dict[str, Callable[[], tuple[float, float, float]]] = {
        "bp/gloo": HandOver(rank, size, copy.deepcopy(module), (batch_size, *comes),
                            (batch_size, *goes), pictures, labels).step
    }  # fmt: skip
    for name, schedule in SCHEDULES.items():
        for number in micro_batches:
            runners[f"{name}/{number}"] = torch_pipeline(
                schedule, number, rank, size, copy.deepcopy(module),
                (batch_size // number, *comes), (batch_size // number, *goes), pictures, labels,
            )  # fmt: skip

    def run(name: str, num_mini_batches: int) -> Taken:
        begin = time.perf_counter()
        passes = [runners[name]() for _ in range(num_mini_batches)]
        return begin, time.perf_counter(), passes

    return run


def torch_pipeline(
    schedule: Any,
    num_micro_batches: int,
    rank: int,
    size: int,
    module: nn.Module,
    comes: tuple[int, ...],
    goes: tuple[int, ...],
    pictures: Tensor,
    labels: Tensor,
) -> Callable[[], tuple[float, float, float]]:
    """A step of ``torch.distributed.pipelining`` and of the optimizer.

    Shapes that do not require a gradient would mean that none travels back: PyTorch takes both from
    the example tensors.
    """
    stage = PipelineStage(
        module,
        rank,
        size,
        torch.device("cpu"),
        input_args=(torch.empty(comes, requires_grad=rank > 0),),
        output_args=(torch.empty(goes, requires_grad=True),),
    )
    plan = schedule(stage, num_micro_batches, loss_fn=nn.functional.cross_entropy)
    stepper = optimizer(module)

    def step() -> tuple[float, float, float]:
        stepper.zero_grad()
        if rank == 0:
            plan.step(pictures)
        elif rank == size - 1:
            plan.step(target=labels)
        else:
            plan.step()
        stepper.step()
        return 0.0, 0.0, 0.0

    return step


class HandOver:
    """Backpropagation over several processes, one at a time: activations there, gradients back.

    Args:
        rank, size: which module of how many, from 0.
        module: of this process.
        comes, goes: shapes of what arrives and of what leaves.
        pictures, labels: the mini-batch.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        module: nn.Module,
        comes: tuple[int, ...],
        goes: tuple[int, ...],
        pictures: Tensor,
        labels: Tensor,
    ) -> None:
        self._rank, self._is_last = rank, rank == size - 1
        self._module, self._stepper = module, optimizer(module)
        self._input = torch.empty(comes)
        self._gradient = torch.empty(goes)
        self._pictures, self._labels = pictures, labels

    def step(self) -> tuple[float, float, float]:
        """A mini-batch: seconds of forward, backward and step, without those of waiting."""
        if self._rank > 0:
            dist.recv(self._input, self._rank - 1)
        begin = time.perf_counter()
        x = self._pictures if self._rank == 0 else self._input.detach().requires_grad_()
        y = self._module(x)
        if self._is_last:
            y = nn.functional.cross_entropy(y, self._labels)
        forward = time.perf_counter() - begin
        if not self._is_last:
            dist.send(y.detach(), self._rank + 1)
            dist.recv(self._gradient, self._rank + 1)
        begin = time.perf_counter()
        self._stepper.zero_grad()
        y.backward(None if self._is_last else self._gradient)
        backward = time.perf_counter() - begin
        if self._rank > 0:
            assert x.grad is not None
            dist.send(x.grad, self._rank - 1)
        begin = time.perf_counter()
        self._stepper.step()
        return forward, backward, time.perf_counter() - begin
