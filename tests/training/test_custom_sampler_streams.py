"""A sampler of the user's must not shift the random numbers of the samples it picks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.task import Task


class Augmented:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[float, int]:
        return float(np.random.random()), index


def test_augmentation_is_the_same_whether_the_epochs_order_is_known_or_not() -> None:
    def sampler(epoch: int) -> list[int]:
        return torch.randperm(12).tolist()

    task = Task(model=lambda: nn.Linear(1, 1), train=Augmented(), sampler=sampler)
    cpu = torch.device("cpu")
    fresh = MiniBatches(task, 4, seed=0).fetch(4, cpu)[0]
    warm = MiniBatches(task, 4, seed=0)
    warm.fetch(3, cpu)
    again = warm.fetch(4, cpu)[0]
    assert torch.equal(fresh[0], again[0])
    assert torch.equal(fresh[1], again[1])
