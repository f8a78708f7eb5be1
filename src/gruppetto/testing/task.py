"""A task of milliseconds with everything in it that an engine can get wrong.

BatchNorm and dropout; augmentation that draws from numpy's global generator in ``__getitem__``;
a weight used twice, a frozen one, and a layer that only some mini-batches use; two groups of
parameters; an epoch whose last mini-batch is smaller. Other processes load it by reference:
``path/to/task.py:task``, or with options ``path/to/task.py:conformance_task:poison=fail``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from gruppetto.training.task import Task

__all__ = ["BATCHES_PER_EPOCH", "TASK_FILE", "Net", "conformance_task", "reference", "task"]

#: This file, for references.
TASK_FILE: Final = Path(__file__).resolve()

_SAMPLES, _FEATURES, _CLASSES, _BATCH_SIZE = 44, 6, 3, 8
#: Five whole mini-batches and one of four samples.
BATCHES_PER_EPOCH: Final = 6

Poison = Literal["none", "fail", "not-finite"]


def reference(poison: Poison = "none") -> str:
    """The task's name for :func:`gruppetto.train`, loadable in any process."""
    name = "task" if poison == "none" else f"conformance_task:poison={poison}"
    return f"{TASK_FILE}:{name}"


class _Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from numpy's global generator; one may be poisoned."""

    def __init__(self, features: Tensor, labels: Tensor, poison: Poison) -> None:
        self._features = features
        self._labels = labels
        self._poison = poison

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._poison == "fail" and index == 17:
            raise ValueError(f"sample {index} is damaged")
        noise = torch.from_numpy(np.random.normal(0.0, 0.1, _FEATURES).astype(np.float32))
        if self._poison == "not-finite":
            noise = noise * float("inf")
        return self._features[index] + noise, self._labels[index]


class Net(nn.Module):
    """A classifier of all the awkward parts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((_FEATURES,), 0.9), requires_grad=False)
        self.first = nn.Linear(_FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.middle.weight
        self.dropout = nn.Dropout(0.2)
        self.rare = nn.Linear(8, _CLASSES)
        self.head = nn.Linear(8, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores, shape [N, 3]."""
        hidden = torch.relu(self.norm(self.first(x * self.scale)))
        hidden = self.again(torch.relu(self.middle(hidden)))
        hidden = self.dropout(hidden)
        scores: Tensor = self.head(hidden)
        if float(x[:, 0].detach().mean()) > 0:
            scores = scores + 0.1 * self.rare(hidden)
        return scores


def _param_groups(model: nn.Module) -> list[dict[str, Any]]:
    assert isinstance(model, Net)
    heads = [*model.head.parameters(), *model.rare.parameters()]
    mine = {id(parameter) for parameter in heads}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in mine]
    return [{"params": heads, "lr_scale": 0.5, "weight_decay": 0.01}, {"params": rest}]


def conformance_task(poison: str = "none") -> Task:
    """The task.

    Args:
        poison: ``fail`` makes one sample raise whenever it is fetched; ``not-finite`` makes every
            loss infinite or not a number.
    """
    if poison not in ("none", "fail", "not-finite"):
        raise ValueError(f"poison: expected none, fail or not-finite, got {poison!r}")
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(_CLASSES, (_SAMPLES + 20,), generator=generator)
    centers = torch.randn(_CLASSES, _FEATURES, generator=generator)
    noise = torch.randn(_SAMPLES + 20, _FEATURES, generator=generator)
    features = centers[labels] + 0.5 * noise
    return Task(
        model=Net,
        train=_Samples(features[:_SAMPLES], labels[:_SAMPLES], poison),  # type: ignore[arg-type]
        test=TensorDataset(features[_SAMPLES:], labels[_SAMPLES:]),
        param_groups=_param_groups,
        optimizer="sgd:lr=0.05,momentum=0.9",
        batch_size=_BATCH_SIZE,
        epochs=2,
        name="conformance",
    )


#: Without poison; what ``path/to/task.py`` means.
task = conformance_task()
