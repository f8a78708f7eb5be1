"""Tasks for runs with real processes: awkward data, and code that ends the process it runs in.

Given by name, as users do: ``local_tasks.py:dies:how=sigkill``. What ends a process does so in the
processes of a run only, never in the tests', which replay these runs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import gruppetto as gp

FILE = Path(__file__).resolve()
SAMPLES, BATCH_SIZE = 24, 4
BATCHES_PER_EPOCH = SAMPLES // BATCH_SIZE
OPTIMIZER = "sgd:lr=0.05,momentum=0.9"


def name(function: str, **options: Any) -> str:
    """The task's name for ``gp.train``."""
    keys = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{FILE}:{function}" + (f":{keys}" if keys else "")


def _test_set() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(8, 5, generator=generator), torch.arange(8) % 3)


# ------------------------------------------------------------------ awkward data


class _Texts(Dataset[Any]):
    """Samples of texts, numbers of all kinds and nothing at all."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = np.random.normal(0.0, 0.1, 5 + index * 40).astype(np.float64)
        return {"text": "é" * index, "noise": noise, "label": index % 3, "none": torch.empty(0)}


class _Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SAMPLES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, lengths: Tensor, features: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(lengths.long()))
        scores: Tensor = self.head(hidden)
        return scores + features.mean(dim=1, keepdim=True).float()


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(s["noise"]) for s in samples)
    features = torch.zeros(len(samples), longest, dtype=torch.float64)
    for row, sample in zip(features, samples, strict=True):
        row[: len(sample["noise"])] = torch.from_numpy(sample["noise"])
    return {
        "texts": [s["text"] for s in samples],
        "numbers": {
            "lengths": torch.tensor([len(s["text"]) for s in samples], dtype=torch.int16),
            "features": features,
            "empty": torch.stack([s["none"] for s in samples]),
        },
        "labels": torch.tensor([s["label"] for s in samples]),
        "flags": np.array([True, False]),
    }


def texts() -> gp.Task:
    """Batches of dicts, texts, empty and odd tensors, of very different sizes."""
    return gp.Task(
        model=_Reads,
        train=_Texts(),  # type: ignore[arg-type]
        collate_fn=_collate,
        inputs=lambda batch: (batch["numbers"]["lengths"], batch["numbers"]["features"]),
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["labels"]),
        optimizer=OPTIMIZER,
        batch_size=BATCH_SIZE,
        epochs=2,
    )


class _Pictures(Dataset[Any]):
    """Pictures as decoders give them, colours last."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).random((12, 12, 3), dtype=np.float32), index % 3


def _permuted(samples: list[Any]) -> list[Tensor]:
    pixels = torch.from_numpy(np.stack([pixels for pixels, _ in samples]))
    return [pixels.permute(0, 3, 1, 2), torch.tensor([label for _, label in samples])]


def pictures() -> gp.Task:
    """Batches whose order in memory is not that of their dimensions."""
    return gp.Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(512, 3)
        ),
        train=_Pictures(),  # type: ignore[arg-type]
        collate_fn=_permuted,
        optimizer=OPTIMIZER,
        batch_size=BATCH_SIZE,
        epochs=2,
    )


def even(norm: bool = False) -> gp.Task:
    """Mini-batches of the same size, so that the order of two gradients in a sum is all one."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(SAMPLES, 5, generator=generator)
    return gp.Task(
        model=lambda: nn.Sequential(
            nn.Linear(5, 8),
            nn.BatchNorm1d(8) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Linear(8, 3),
        ),
        train=TensorDataset(features, torch.arange(SAMPLES) % 3),
        test=_test_set(),
        optimizer="sgd:lr=0.1",
        batch_size=BATCH_SIZE,
        epochs=3,
    )


def in_an_object() -> gp.Task:
    """What only pickling by value can carry: lambdas and local classes, down to the batches."""

    class Batch:
        def __init__(self, samples: list[Any]) -> None:
            self.x = torch.stack([x for x, _ in samples])
            self.y = torch.tensor([y for _, y in samples])

    data = [(torch.randn(5, generator=torch.Generator().manual_seed(i)), i % 3) for i in range(24)]
    return gp.Task(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3)),
        train=data,  # type: ignore[arg-type]
        collate_fn=Batch,
        inputs=lambda batch: (batch.x,),
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch.y),
        optimizer=OPTIMIZER,
        batch_size=BATCH_SIZE,
        epochs=2,
    )


# ----------------------------------------------------------- what ends processes


def _is_in_a_run() -> bool:
    return Path("/proc/self/comm").read_text().startswith("gp ")


def _first(folder: str, times: int) -> bool:
    """Whether this happens for the first so many times, counted over all processes."""
    for i in range(times):
        try:
            os.close(os.open(f"{folder}/{i}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False


def _end(how: str) -> None:
    match how:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "sys-exit":
            sys.exit(3)
        case "raise":
            raise ValueError("this is damaged")


def dies(
    how: str = "sigkill", where: str = "learner", marks: str = "", times: int = 1, sample: int = 9
) -> gp.Task:
    """A process ends at a sample: the learner's, in the loss, or its loader's.

    Args:
        how: sigkill, exit, sys-exit or raise.
        where: learner or loader.
        marks: a folder, for counting.
        times: how often; -1 for always.
        sample: at which; -1 for any.
    """

    def end_at(indices: list[int]) -> None:
        is_here = (sample in indices or sample < 0) and _is_in_a_run()
        if is_here and (times < 0 or _first(marks, times)):
            _end(how)

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            if where == "loader":
                end_at([index])
            generator = torch.Generator().manual_seed(index)
            noise = torch.from_numpy(np.random.normal(0.0, 0.1, 5).astype(np.float32))
            return torch.randn(5, generator=generator) + noise, index, index % 3

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        if where == "learner":
            end_at(batch[1].tolist())
        return nn.functional.cross_entropy(outputs, batch[2])

    return gp.Task(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        train=Samples(),  # type: ignore[arg-type]
        inputs=lambda batch: (batch[0],),
        loss=loss,
        optimizer=OPTIMIZER,
        batch_size=BATCH_SIZE,
        epochs=2,
    )


def dies_at_birth(nth: int = 2) -> gp.Task:
    """The nth process of a run ends in its first moment, and the next one starts after that."""
    count = 0

    def before() -> None:
        nonlocal count
        if Path("/proc/self/comm").read_text() == "gp template\n":
            count += 1
            if count == nth + 1:  # the one before has ended, and it may not be known yet
                until = time.monotonic() + 1.0
                asked = os.WEXITED | os.WNOWAIT | os.WNOHANG
                # Not for ever: where it is known already, nothing is left to wait for.
                while os.waitid(os.P_ALL, 0, asked) is None and time.monotonic() < until:
                    time.sleep(0.002)

    def after() -> None:
        if count == nth and Path("/proc/self/comm").read_text() == "gp template\n":
            os._exit(7)

    if not any(module == "pytest" for module in sys.modules):
        os.register_at_fork(before=before, after_in_child=after)
    return even()


def evaluates(how: str = "slow", folder: str = "") -> gp.Task:
    """An evaluation that is slow, that raises, or that waits for a file.

    Args:
        how: wait, raise, exit or die-late.
        folder: holds ``go`` when it is time to go on.
    """

    def evaluate(model: nn.Module, test: Any) -> dict[str, float]:
        if how == "wait":
            with Path(folder, "asked").open("a") as file:
                file.write("x")
            while not Path(folder, "go").exists():
                time.sleep(0.005)
        elif _is_in_a_run():
            if how == "raise":
                raise ValueError("nothing can be measured")
            _end(how)
        return {"norm": float(sum(p.detach().norm() for p in model.parameters()))}

    task = even()
    return gp.Task(
        model=task.model,
        train=task.train,
        evaluate=evaluate,
        optimizer="sgd:lr=0.1",
        batch_size=BATCH_SIZE,
        epochs=2,
    )
