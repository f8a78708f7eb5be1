"""Mini-batch number -> samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate
from training_tools import CPU, class_data, make_task, same_bits

from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.training.mini_batches import MiniBatches


def indices(mini_batches: MiniBatches, epoch: int) -> list[int]:
    per = mini_batches.per_epoch
    return [i for b in range(epoch * per, (epoch + 1) * per) for i in mini_batches.indices(b)]


@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"),
    [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (9, 4, [4, 4, 1]), (5, 5, [5]), (3, 1, [1, 1, 1])],
)
def test_the_last_mini_batch_of_an_epoch_is_ragged(
    n: int, batch_size: int, sizes: list[int]
) -> None:
    mini_batches = MiniBatches(make_task(train=class_data(n)), batch_size, 0)
    assert mini_batches.per_epoch == len(sizes)
    assert mini_batches.samples_per_epoch == n
    for epoch in (0, 1):
        first = epoch * len(sizes)
        fetched = [mini_batches.fetch(first + i, CPU) for i in range(len(sizes))]
        assert [count for _, count in fetched] == sizes
        assert [len(batch[0]) for batch, _ in fetched] == sizes


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    mini_batches = MiniBatches(make_task(train=class_data(50)), 7, 0)
    orders = [indices(mini_batches, epoch) for epoch in range(4)]
    for order in orders:
        assert sorted(order) == list(range(50))
    assert len({tuple(o) for o in [*orders, list(range(50))]}) == 5
    other = MiniBatches(make_task(train=class_data(50)), 7, 1)
    assert indices(other, 0) != orders[0]
    # The order is the epoch's, however it is cut into mini-batches.
    assert indices(MiniBatches(make_task(train=class_data(50)), 3, 0), 2) == orders[2]


def test_an_old_epoch_is_the_same_after_many_others() -> None:
    """Late mini-batches reach back, further than orders are remembered."""
    mini_batches = MiniBatches(make_task(train=class_data(20)), 5, 0)
    first = [indices(mini_batches, epoch) for epoch in range(12)]
    assert [indices(mini_batches, epoch) for epoch in reversed(range(12))] == first[::-1]


def test_a_sampler_gives_the_order() -> None:
    asked = []

    def sampler(epoch: int) -> Any:
        asked.append(epoch)
        return np.array([3, 1, 1, 4, epoch])

    mini_batches = MiniBatches(make_task(sampler=sampler), 2, 0)
    assert mini_batches.samples_per_epoch == 5
    assert [list(mini_batches.indices(b)) for b in range(6)] == [
        [3, 1], [1, 4], [0], [3, 1], [1, 4], [1],
    ]  # fmt: skip
    assert asked == [0, 1]
    (x, _), count = mini_batches.fetch(1, CPU)
    data = class_data().tensors[0]
    assert count == 2
    assert same_bits(x, torch.stack([data[1], data[4]]))


def test_a_random_sampler_is_seeded_by_the_epoch() -> None:
    def sampler(epoch: int) -> list[int]:
        return torch.randperm(10).tolist()

    first = MiniBatches(make_task(sampler=sampler), 10, 0)
    orders = [indices(first, epoch) for epoch in (0, 1)]
    torch.manual_seed(12345)
    second = MiniBatches(make_task(sampler=sampler), 10, 0)
    assert [indices(second, epoch) for epoch in (1, 0)] == orders[::-1]
    assert orders[0] != orders[1]


def test_a_sampler_of_another_length_is_refused() -> None:
    mini_batches = MiniBatches(make_task(sampler=lambda epoch: range(5 + epoch)), 2, 0)
    mini_batches.fetch(2, CPU)
    with pytest.raises(TaskError, match="expected 5 indices as in epoch 0, got 6 for epoch 1"):
        mini_batches.fetch(3, CPU)


def test_an_empty_sampler_is_refused() -> None:
    with pytest.raises(TaskError, match="expected at least one index for epoch 0, got none"):
        MiniBatches(make_task(sampler=lambda epoch: []), 2, 0)


@pytest.mark.parametrize("batch_size", [0, 51])
def test_a_mini_batch_larger_than_the_data_is_refused(batch_size: int) -> None:
    with pytest.raises(InvalidSetting, match=f"expected 1 to 50 .*, got {batch_size}"):
        MiniBatches(make_task(), batch_size, 0)


def test_the_short_cut_for_tensor_datasets_gives_the_same_bits() -> None:
    """Against a dataset of the same rows that has no short cut."""
    tensors = (
        torch.randn(30, 2, 3),
        torch.randn(30, dtype=torch.float64),
        torch.arange(30),
        torch.randn(30, 4).to(torch.bfloat16),
        torch.arange(30) % 2 == 0,
    )
    fast = MiniBatches(make_task(train=TensorDataset(*tensors)), 7, 0)
    rows = [tuple(t[i] for t in tensors) for i in range(30)]
    slow = MiniBatches(make_task(train=rows), 7, 0)
    for number in range(10):
        (left, n), (right, m) = fast.fetch(number, CPU), slow.fetch(number, CPU)
        assert n == m
        assert type(left) is type(right) is list
        for a, b in zip(left, right, strict=True):
            assert same_bits(a, b)
        by_hand = default_collate([rows[i] for i in fast.indices(number)])
        assert all(same_bits(a, b) for a, b in zip(left, by_hand, strict=True))


def test_a_collate_function_takes_the_short_cuts_place() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"x": torch.stack([x for x, _ in samples]), "n": len(samples)}

    mini_batches = MiniBatches(make_task(collate_fn=collate), 7, 0)
    batch, count = mini_batches.fetch(7, CPU)
    assert (batch["n"], count) == (1, 1)
    assert batch["x"].shape == (1, 6)


def test_a_subclass_of_tensor_dataset_is_asked_for_its_samples() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
            return tuple(2 * t for t in super().__getitem__(index))

    data = Doubled(torch.arange(6.0), torch.arange(6))
    task = make_task(train=data, sampler=lambda epoch: range(6))
    (x, y), _ = MiniBatches(task, 3, 0).fetch(0, CPU)
    assert x.tolist() == [0.0, 2.0, 4.0]
    assert y.tolist() == [0, 2, 4]


def test_getitems_set_to_none_counts_as_absent() -> None:
    """As for torch's own loader: how a subclass switches an inherited one off."""

    class OneByOne(TensorDataset):
        __getitems__ = None

    task = make_task(train=OneByOne(torch.arange(6.0)), sampler=lambda epoch: range(6))
    (x,), _ = MiniBatches(task, 3, 0).fetch(1, CPU)
    assert x.tolist() == [3.0, 4.0, 5.0]


def test_getitems_is_used_where_there_is_one() -> None:
    class Many:
        asked: list[list[int]] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("one by one")

        def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
            self.asked.append(indices)
            return [(10 * i, i) for i in indices]

    mini_batches = MiniBatches(make_task(train=Many(), sampler=lambda epoch: range(6)), 4, 0)
    (x, y), count = mini_batches.fetch(1, CPU)
    assert Many.asked == [[4, 5]]
    assert (x.tolist(), y.tolist(), count) == ([40, 50], [4, 5], 2)


def test_a_subset_of_a_dataset() -> None:
    subset = Subset(class_data(20), [3, 5, 7, 11])
    mini_batches = MiniBatches(make_task(train=subset, sampler=lambda epoch: range(4)), 3, 0)
    (x, _), count = mini_batches.fetch(1, CPU)
    assert count == 1
    assert same_bits(x, class_data(20).tensors[0][11:12])


def test_named_tuples_stay_named() -> None:
    class Row(NamedTuple):
        x: float
        y: int

    data = [Row(float(i), i % 2) for i in range(4)]
    task = make_task(train=data, sampler=lambda epoch: range(4))
    batch, _ = MiniBatches(task, 2, 0).fetch(1, CPU)
    assert batch.x.tolist() == [2.0, 3.0]
    assert batch.y.tolist() == [0, 1]
