"""What blocks cost: counted exactly, measured without touching the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from split_models import TorchvisionLike, pictures, seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gruppetto.decoupled.chain import Chain, chain_of
from gruppetto.decoupled.costs import (
    OPERATIONS_PER_BYTE,
    OPERATIONS_PER_COMPARISON,
    BlockCost,
    count_costs,
    measure_costs,
)
from gruppetto.training.task import Task

CPU = torch.device("cpu")


def task_of(*inputs: Tensor) -> tuple[Task, list[Tensor]]:
    n = len(inputs[0])
    data = TensorDataset(*inputs, torch.arange(n) % 2)
    return Task(model=lambda: nn.Identity(), train=data), [*data.tensors]


def small() -> tuple[nn.Module, Chain, Task, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)
    ).train()
    task, batch = task_of(torch.randn(4, 8))
    return model, chain_of(model, (batch[0],)), task, batch


def test_counts_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).train()
    task, batch = task_of(torch.randn(4, 8))
    first, relu, last = count_costs(chain_of(model, (batch[0],)), task, batch, CPU)
    assert (first.name, first.parameters, first.parameter_bytes) == ("0", 8 * 16 + 16, 4 * 144)
    assert (relu.parameters, last.parameters) == (0, 34)
    assert [c.output_bytes for c in (first, relu, last)] == [4 * 64, 4 * 64, 4 * 8]
    # The first layer keeps its input, the activation its output, which the last layer keeps as
    # well; and the loss its log-probabilities, the labels, and a total weight.
    assert (first.saved_bytes, first.shared_bytes) == (4 * 32, 0)
    assert (relu.saved_bytes, relu.shared_bytes) == (4 * 64, 0)
    assert (last.saved_bytes, last.shared_bytes) == (4 * 64 + 4 * 8 + 8 * 4 + 4, 4 * 64)
    # Forward 4x8x16, backward once more for the weights; the bytes that it touches besides.
    products = 2 * 4 * 8 * 16
    touched = first.operations - 2 * products
    assert 0 < touched < OPERATIONS_PER_BYTE * 4 * 40 * (8 + 16) and touched % 32 == 0
    # In the last layer also for the input.
    assert last.operations > 3 * 2 * 4 * 16 * 2


def test_max_pooling_weighs_what_it_compares() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten()).train()
    task, batch = task_of(torch.randn(2, 1, 8, 8))
    pooled, averaged, _ = count_costs(chain_of(model, (batch[0],)), task, batch, CPU)
    assert pooled.operations > OPERATIONS_PER_COMPARISON * 2 * 64 > averaged.operations


@pytest.mark.parametrize("traced", [False, True])
def test_counting_is_the_same_each_time_and_measuring_adds_seconds(traced: bool) -> None:
    if traced:
        model = seeded(TorchvisionLike)
        task, batch = task_of(pictures())
        chain = chain_of(model, (batch[0],), ["layer2"])
    else:
        model, chain, task, batch = small()
    counted = count_costs(chain, task, batch, CPU)
    measured = measure_costs(chain, task, batch, CPU, repeats=2)
    assert [dataclasses.replace(c, forward=None, backward=None) for c in measured] == [*counted]
    assert [c.name for c in counted] == [block.name for block in chain.blocks]
    assert all(c.forward is None and c.backward is None for c in counted)
    assert all((c.forward or 0) > 0 and (c.backward or 0) > 0 for c in measured)
    assert sum(c.parameters for c in counted) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("costs_of", [count_costs, measure_costs])
def test_model_and_random_numbers_are_left_as_they_were(costs_of: Any) -> None:
    model, chain, task, batch = small()
    kept = torch.ones(16, 8)
    model[0].weight.grad = kept
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state, inputs = torch.get_rng_state(), batch[0].clone()
    found: tuple[BlockCost, ...] = costs_of(chain, task, batch, CPU)
    assert len(found) == 5
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(batch[0], inputs)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model[0].weight.grad is kept and kept.eq(1).all() and model[4].weight.grad is None


def test_a_block_without_gradients_to_compute() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2)).train()
    model[1].bias.requires_grad_(False)
    task, batch = task_of(torch.randn(4, 2, 4))
    flat, linear = measure_costs(chain_of(model, (batch[0],)), task, batch, CPU, repeats=1)
    assert (flat.operations, flat.saved_bytes, flat.parameters) == (0, 0, 0)
    assert linear.operations > 0


class WithMask(nn.Module):
    """Takes and gives a tensor and the mask that belongs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        x, mask = pair if isinstance(pair, tuple) else (pair, pair > 0)
        return self.linear(x * mask), mask


class Sums(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return (pair[0] * pair[1])[:, :2]


def test_a_mask_that_comes_along_has_no_gradient() -> None:
    model = nn.Sequential(WithMask(), WithMask(), Sums()).train()
    task, batch = task_of(torch.randn(4, 8))
    first, second, _ = measure_costs(chain_of(model, (batch[0],)), task, batch, CPU, repeats=1)
    assert first.output_bytes == second.output_bytes == 4 * 32 + 32
    # Backward runs in all of them: one product more than forward and for the weights alone.
    assert second.operations > 3 * 2 * 4 * 8 * 8
    assert (second.backward or 0) > 0


def test_gradients_of_rows_alone_are_no_dense_ones() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2)).train()
    task, batch = task_of(torch.arange(8).reshape(4, 2))
    embedding, _, _ = measure_costs(chain_of(model, (batch[0],)), task, batch, CPU, repeats=1)
    assert embedding.output_bytes == 4 * 4 * 2 * 4
    assert embedding.operations >= OPERATIONS_PER_BYTE * embedding.output_bytes
