"""Where a chain is cut: the exact optimum, and the same one although times are noisy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from gruppetto.decoupled import split as split_file
from gruppetto.decoupled.costs import BlockCost
from gruppetto.decoupled.split import SLACK, Split, choose_split, read_balance, split_model
from gruppetto.errors import InvalidSetting
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.task import Task
from gruppetto.training.tasks import load_task

CPU = torch.device("cpu")


def block(
    i: int, operations: float, seconds: float | None = None, parameters: int = 0
) -> BlockCost:
    passes = {} if seconds is None else {"forward": seconds / 4, "backward": 3 * seconds / 4}
    return BlockCost(str(i), parameters, 4 * parameters, 8, 100, operations, **passes)


def blocks(operations: Sequence[float], seconds: Sequence[float] | None = None) -> list[BlockCost]:
    times = seconds or [None] * len(operations)
    return [block(i, o, t) for i, (o, t) in enumerate(zip(operations, times, strict=True))]


def ways(n: int, modules: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, n), modules - 1))


def largest(sizes: Sequence[float], cuts: Sequence[int], shares: Sequence[float]) -> float:
    bounds = [0, *cuts, len(sizes)]
    parts = [sum(sizes[a:b]) for a, b in itertools.pairwise(bounds)]
    return max(part / share for part, share in zip(parts, shares, strict=True))


def cuts_of(split: Split) -> list[int]:
    return [int(name) for name in split.begins]


numbers = st.integers(0, 50).map(float)


@given(st.data(), st.lists(numbers, min_size=1, max_size=8))
def test_the_largest_module_is_the_smallest_possible(
    data: st.DataObject, sizes: list[float]
) -> None:
    modules = data.draw(st.integers(1, len(sizes)))
    shares = data.draw(st.lists(st.integers(1, 4), min_size=modules, max_size=modules))
    found = cuts_of(choose_split(blocks(sizes), modules, shares))
    best = min(largest(sizes, cuts, shares) for cuts in ways(len(sizes), modules))
    assert largest(sizes, found, shares) == best


@given(st.data(), st.lists(st.tuples(numbers, numbers), min_size=2, max_size=7))
def test_of_cuts_that_take_about_equally_long_the_best_by_operations(
    data: st.DataObject, sizes: list[tuple[float, float]]
) -> None:
    modules = data.draw(st.integers(1, len(sizes)))
    operations, seconds = [o for o, _ in sizes], [t for _, t in sizes]
    even = [1.0] * modules
    found = cuts_of(choose_split(blocks(operations, seconds), modules))
    all_ways = ways(len(sizes), modules)
    best = min(largest(seconds, cuts, even) for cuts in all_ways)
    if sum(seconds) < 0.005:
        limit = math.inf
    else:
        limit = best * (1 + SLACK) + 1e-9
    good = [cuts for cuts in all_ways if largest(seconds, cuts, even) <= limit]
    assert tuple(found) in good
    assert largest(operations, found, even) == min(largest(operations, c, even) for c in good)


@given(
    st.lists(st.floats(1.0, 100.0), min_size=6, max_size=12),
    st.integers(2, 5),
    st.randoms(use_true_random=False),
)
def test_noise_does_not_move_the_cut(sizes: list[float], modules: int, random: object) -> None:
    def measured() -> list[BlockCost]:
        noisy = [size * random.uniform(1.0, 1.14) for size in sizes]  # type: ignore[attr-defined]
        return blocks(sizes, noisy)

    found = {choose_split(measured(), modules).begins for _ in range(5)}
    assert found == {choose_split(blocks(sizes), modules).begins}


def test_times_below_five_milliseconds_say_nothing() -> None:
    operations, seconds = [1.0, 1.0, 1.0, 9.0], [9e-4, 1e-4, 1e-4, 1e-4]
    assert choose_split(blocks(operations, seconds), 2).begins == ("3",)
    longer = [1000 * t for t in seconds]
    # Cutting at 1 would take 9 and at 2 takes 10, as good as equal; operations prefer 2.
    assert choose_split(blocks(operations, longer), 2).begins == ("2",)


def test_by_parameters_and_operations_between_equals() -> None:
    costs = [
        block(i, o, 1.0, p) for i, (p, o) in enumerate([(0, 5), (10, 5), (0, 1), (0, 1), (10, 1)])
    ]
    # Any of 2, 3, 4 has ten parameters in each; 2 leaves the largest of operations smallest.
    assert choose_split(costs, 2, "parameters").begins == ("2",)
    assert choose_split(costs, 2, "parameters").parameters == (10, 10)


def test_shares() -> None:
    assert choose_split(blocks([1.0] * 8), 3, "1/1/2").begins == ("2", "4")
    assert choose_split(blocks([1.0] * 8), 3, (2, 1, 1)).begins == ("4", "6")
    assert read_balance("time", 2) == "time" and read_balance("1/2.5", 2) == (1.0, 2.5)


@pytest.mark.parametrize(
    ("balance", "why"),
    [
        ("tme", "expected time, parameters, or shares above 0 like 1/1/2, got 'tme'"),
        ("1/x", "shares above 0"),
        ("1/0", "shares above 0"),
        ("1/inf", "shares above 0"),
        ((), "shares above 0"),
        ("1/1/2", "expected 2 shares for 2 modules, got 3"),
    ],
)
def test_balances_that_are_none(balance: str, why: str) -> None:
    with pytest.raises(InvalidSetting, match=why):
        choose_split(blocks([1.0] * 8), 2, balance)


@pytest.mark.parametrize(("modules", "why"), [(0, "at least 1, got 0"), (9, "at most 8, .* got 9")])
def test_numbers_of_modules_that_are_none(modules: int, why: str) -> None:
    with pytest.raises(InvalidSetting, match=f"modules: expected {why}"):
        choose_split(blocks([1.0] * 8), modules)


def test_what_a_split_says() -> None:
    costs = [
        dataclasses.replace(block(i, 10.0 * (i + 1), s, p), shared_bytes=30 if i else 0)
        for i, (s, p) in enumerate([(4.0, 1), (4.0, 2), (8.0, 3)])
    ]
    split = Split(("2",), tuple(costs))
    assert split.num_modules == 2 and split.names == (("0", "1"), ("2",))
    assert split.parameters == (3, 3) and split.operations == (30.0, 30.0)
    assert split.forward == (2.0, 2.0) and split.backward == (6.0, 6.0)
    # What a block shares with the one before counts once, unless a cut is between them.
    assert split.saved_bytes == (170, 100) and split.output_bytes == (8, 0)
    assert split.shares == (0.5, 0.5) and split.imbalance == 1.0
    assert split.free_running_speedup == 2.0
    assert split.barrier_speedup == (4 + 12) / (4 + 6)
    uneven = Split(("1",), tuple(costs))
    assert uneven.shares == (0.25, 0.75) and uneven.imbalance == 1.5
    assert uneven.free_running_speedup == pytest.approx(4 / 3)
    counted = Split(("1",), tuple(blocks([1.0, 3.0])))
    assert counted.forward is None and counted.barrier_speedup is None
    assert counted.shares == (0.25, 0.75)


# ------------------------------------------------------------------ a task's model


def deep(width: int = 8, depth: int = 6) -> tuple[nn.Module, Task, MiniBatches]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, width, generator=generator), torch.arange(32) % 2)
    task = Task(model=lambda: nn.Identity(), train=data)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 2))
    return model.train(), task, MiniBatches(task, 8, 0)


def test_a_model_is_cut_by_time_or_where_one_says() -> None:
    model, task, mini_batches = deep()
    state = torch.get_rng_state()
    split = split_model(model, task, mini_batches, modules=2, device=CPU)
    assert split.is_measured and split.begins == ("3",)
    assert torch.equal(torch.get_rng_state(), state)
    named = split_model(model, task, mini_batches, modules=3, cuts=["1", "6"], device=CPU)
    assert named.begins == ("1", "6") and not named.is_measured
    by_size = split_model(model, task, mini_batches, modules=2, balance="parameters", device=CPU)
    assert not by_size.is_measured and abs(by_size.parameters[0] - by_size.parameters[1]) <= 72


def test_nothing_is_measured_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(split_file, "measure_costs", never)
    task = load_task("digits")
    torch.manual_seed(0)
    model, mini_batches = task.model().train(), MiniBatches(task, 16, 0)
    split = split_model(model, task, mini_batches, modules=3, device=CPU)
    assert split.begins == ("1", "2") and not split.is_measured
    with pytest.raises(AssertionError, match="measured"):
        split_model(model, task, mini_batches, modules=2, device=CPU)


def test_cuts_are_named_as_blocks_are() -> None:
    class Code(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) * 1)

    _, task, mini_batches = deep()
    split = split_model(Code().train(), task, mini_batches, modules=2, cuts=["b"], device=CPU)
    assert split.begins == ("b.0",)
    again = split_model(
        Code().train(), task, mini_batches, modules=2, cuts=split.begins, device=CPU
    )
    assert again == split


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"modules": 8}, "expected at most 7, the blocks of the model, got 8$"),
        ({"modules": 3, "cuts": ["1"]}, "cuts: expected 2 for 3 modules, got 1: 1"),
        ({"modules": 2, "cuts": ["7"]}, "cut '7': the model has no block of that name"),
        ({"modules": 2, "balance": "fast"}, "balance: expected time"),
        ({"modules": 0}, "modules: expected at least 1, got 0"),
    ],
)
def test_splits_that_are_none(asked: dict[str, object], why: str) -> None:
    model, task, mini_batches = deep()
    with pytest.raises(InvalidSetting, match=why):
        split_model(model, task, mini_batches, device=CPU, **asked)  # type: ignore[arg-type]


def test_too_few_blocks_say_why() -> None:
    model, task, mini_batches = deep(depth=3)
    model[2].weight = model[0].weight
    why = (
        "at most 2, the blocks of the model, got 3; no module can begin with '1': the parameter "
        "'0.weight' is used on both sides of it"
    )
    with pytest.raises(InvalidSetting, match=why):
        split_model(model, task, mini_batches, modules=3, device=CPU)
