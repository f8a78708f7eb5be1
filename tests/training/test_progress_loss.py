"""The loss on a fixed training sample: which samples, which loss, and that nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training_tools import CPU

import gruppetto as gp
from gruppetto.errors import TaskError
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.progress import SAMPLE_SIZE, ProgressLoss


def squares(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().mean()


class Numbers:
    """Sample i is i, with noise from all three global generators where asked for."""

    def __init__(self, count: int, noise: float = 0.0) -> None:
        self.count, self.noise = count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.randn(1) + float(np.random.randn()) + random.random()
        return float(index) + self.noise * noise


class Whole(Numbers):
    """Makes batches itself, and remembers how it was asked."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked: list[tuple[int, object]] = []

    def make_batch(self, indices: Tensor, generator: torch.Generator | None) -> Tensor:
        self.asked.append((len(indices), generator))
        return indices.to(torch.float32).unsqueeze(1)


class Counting(nn.Module):
    """Its outputs are its inputs; it counts, even in eval mode."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        assert not self.training
        return x * self.weight


def progress(data: Any, seed: int = 0, **fields: Any) -> ProgressLoss:
    task = gp.Task(
        model=Counting, train=data, loss=squares, inputs=lambda batch: (batch,), **fields
    )
    return ProgressLoss(task, Counting(), MiniBatches(task, 2, seed), seed, CPU)


def mean_square(indices: Tensor) -> float:
    return float(indices.double().square().mean())


@pytest.mark.parametrize(("count", "size"), [(44, 44), (1024, 1024), (1500, SAMPLE_SIZE)])
def test_the_sample_is_fixed_and_of_different_samples(count: int, size: int) -> None:
    measured = progress(Numbers(count), seed=3)
    again, other = progress(Numbers(count), seed=3), progress(Numbers(count), seed=4)
    assert len(set(measured.indices.tolist())) == len(measured.indices) == size
    assert torch.equal(measured.indices, again.indices)
    assert not torch.equal(measured.indices, other.indices)
    assert measured() == pytest.approx(mean_square(measured.indices), rel=1e-6)
    assert measured() == measured() == again()


def test_augmentation_is_the_same_each_time() -> None:
    measured = progress(Numbers(300, noise=1.0))
    assert measured() == measured()
    assert measured() != progress(Numbers(300))()


def test_a_sampler_chooses_what_there_is_to_measure() -> None:
    """Each of its indices counts once, however often it is drawn."""
    measured = progress(Numbers(300), sampler=lambda epoch: [7, 7, 7, 9])
    assert sorted(measured.indices.tolist()) == [7, 9]
    assert measured() == (49 + 81) / 2


def test_whole_batches_are_made_without_augmentation() -> None:
    data = Whole(600)
    measured = progress(data)
    assert measured() == pytest.approx(mean_square(measured.indices), rel=1e-6)
    assert data.asked == [(256, None), (256, None), (88, None)]


def test_plain_tensors() -> None:
    task = gp.Task(model=Counting, train=TensorDataset(torch.full((5, 1), 3.0), torch.zeros(5)),
                   loss=squares)  # fmt: skip
    measured = ProgressLoss(task, Counting(), MiniBatches(task, 2, 0), 0, CPU)
    assert measured() == 9.0


def test_everything_else_is_as_before() -> None:
    """Mode, buffers, and what the three global generators give next."""
    measured = progress(Numbers(40, noise=1.0))
    model: Any = measured._model.train()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    measured()
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert model.training and model.weight.grad is None
    assert model.calls.item() == 0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_none(value: float) -> None:
    measured = progress(Numbers(4))
    with torch.no_grad():
        next(measured._model.parameters()).fill_(value)
    assert measured() is None


def test_a_failure_is_one_sentence_and_leaves_the_model_as_it_was() -> None:
    class Damaged(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            raise ValueError(f"sample {index}\nis damaged")

    measured = progress(Damaged(3))
    measured._model.train()
    with pytest.raises(TaskError, match=r"on 3 training samples failed: ValueError: sample \d is"):
        measured()
    assert measured._model.training
