"""Tasks of milliseconds for networks in modules, and code that ends the process it runs in.

Given by name, as users do: ``decoupled_tasks.py:blocks:data=samples``. What fails does so in the
processes of a run only, never in the tests' own, which build and cut the same model.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import gruppetto as gp

FILE = Path(__file__).resolve()
SAMPLES, BATCH_SIZE, WIDTH, CLASSES = 44, 8, 12, 3
#: Five whole mini-batches and one of four samples.
PER_EPOCH = 6
#: At which modules 2 and 3 begin.
CUTS = ["1", "2"]


def name(function: str, **options: Any) -> str:
    """The task's name for ``gp.train``."""
    keys = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{FILE}:{function}" + (f":{keys}" if keys else "")


def _whole() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % CLASSES
    )


class Samples(Dataset[Any]):
    """Drawn under the global generator, so that a process must read them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = np.random.normal(0.0, 0.1, WIDTH).astype(np.float32)
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x + torch.from_numpy(noise), "y": index % CLASSES, "name": f"é{index}"}


class Made(Dataset[Any]):
    """Makes whole batches, which a thread reads."""

    def __len__(self) -> int:
        return SAMPLES

    def make_batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Any]:
        x = torch.ones(len(indices), WIDTH) * (indices[:, None] - 20) / 20
        return x + torch.randn(x.shape, generator=generator), {"y": indices % CLASSES}


def _block(inputs: int, outputs: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True), *more
    )


def _model(*more: nn.Module) -> nn.Module:
    return nn.Sequential(
        _block(WIDTH, 16, nn.Dropout(0.2)),
        _block(16, 16, nn.Dropout(0.2), *more),
        nn.Linear(16, CLASSES),
    )


def blocks(data: str = "tensors", epochs: float = 3.0) -> gp.Task:
    """Three blocks with BatchNorm and dropout; data in tensors, samples or made."""
    train: Any = {"tensors": _whole, "samples": Samples, "made": Made}[data]()
    key: Any = "x" if data == "samples" else 0

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        labels = batch["y"] if data == "samples" else batch[1]
        return nn.functional.cross_entropy(outputs, labels["y"] if data == "made" else labels)

    return gp.Task(
        model=_model,
        train=train,
        test=_whole() if data == "tensors" else None,
        inputs=lambda batch: (batch[key],),
        loss=loss,
        optimizer="sgd:lr=0.05,momentum=0.9",
        batch_size=BATCH_SIZE,
        epochs=epochs,
    )


class Thing:
    """What no ring carries."""

    def __init__(self, samples: list[Any]) -> None:
        self.x = torch.stack([x for x, _ in samples])
        self.y = torch.tensor([y for _, y in samples])


def wide(layers: int = 14, samples: int = 128, width: int = 4096) -> gp.Task:
    """Activations of 2 MiB, one kept by each layer, and small weights; an epoch is 20 updates."""
    num = 20 * samples
    return gp.Task(
        model=lambda: nn.Sequential(
            nn.Linear(1, width), *(nn.Tanh() for _ in range(layers)), nn.Linear(width, 2)
        ),
        train=TensorDataset(torch.ones(num, 1), torch.zeros(num, dtype=torch.long)),
        optimizer="sgd:lr=0.01",
        batch_size=samples,
        epochs=1,
    )


def things() -> gp.Task:
    """Batches that are objects of a class."""
    return gp.Task(
        model=_model,
        train=_whole(),
        collate_fn=Thing,
        inputs=lambda batch: (batch.x,),
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch.y),
        optimizer="sgd:lr=0.05",
        batch_size=BATCH_SIZE,
        epochs=1,
    )


#: Counts passes of one process, whatever copy of a trap runs them.
PASSES = itertools.count(1)


class Trap(nn.Module):
    """Lets everything through, until the n-th training pass of the process of a module."""

    def __init__(self, how: str, at: int) -> None:
        super().__init__()
        self.how = how
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        is_in_a_run = Path("/proc/self/comm").read_text().startswith("gp module")
        if self.training and is_in_a_run and next(PASSES) == self.at:
            return self.spring(x)
        return x

    def spring(self, x: Tensor) -> Tensor:
        match self.how:
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(0)
            case "sys-exit":
                sys.exit(3)
            case "raise":
                raise ValueError("this is damaged")
            case "nan":
                return x * float("nan")
        raise AssertionError(self.how)


def fails(how: str = "sigkill", at: int = 9, epochs: float = 40.0) -> gp.Task:
    """Something happens in module 2 of 3, in the at-th pass it runs."""
    return gp.Task(
        model=lambda: _model(Trap(how, at)),
        train=_whole(),
        optimizer="sgd:lr=0.05,momentum=0.9",
        batch_size=BATCH_SIZE,
        epochs=epochs,
    )
