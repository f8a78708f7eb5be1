"""Models that run in order are cut anywhere between their blocks, and compute the same bits."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from split_models import assert_same, names, pictures, seeded
from torch import Tensor, nn

from gruppetto.decoupled.chain import chain_of, model_inputs
from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.training.models import MODELS
from gruppetto.training.task import Task
from gruppetto.training.tasks import load_task


def vectors(n: int = 6, width: int = 64) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(2))


def sequential(*modules: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*modules).train()


# ------------------------------------------------------------------ the same bits


def test_the_digits_with_batch_norm_and_dropout() -> None:
    model = seeded(load_task("digits:batchnorm=true,dropout=0.4").model)
    for begins in ([], ["1"], ["3"], ["2", "4"], ["1", "2", "3", "4"]):
        assert names(assert_same(model, (vectors(),), begins)) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("model", "begins"),
    [
        ("cnn", ["3"]),
        ("cnn", ["1", "2", "6"]),
        ("resnet8", ["blocks.2"]),
        ("resnet8", ["blocks.1", "blocks.3", "blocks.4"]),
        ("softmax", ["1"]),
    ],
)
def test_the_models_of_the_image_tasks(model: str, begins: list[str]) -> None:
    built = seeded(MODELS[model].build, 3, 8, 10)
    chain = assert_same(built, (pictures(),), begins)
    assert not any(block.traced for block in chain.blocks)


def test_rudra_with_its_blocks_by_name() -> None:
    model = seeded(MODELS["rudra"].build, 3, 32, 10)
    chain = assert_same(model, {"x": pictures(2, size=32)}, ["blocks.1", "blocks.3"])
    assert names(chain) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_a_module_may_begin_with_an_operation_in_place() -> None:
    changing = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))
    model = sequential(
        nn.Linear(8, 8), changing, nn.Linear(8, 8), nn.Dropout(0.5, inplace=True), nn.Linear(8, 2)
    )
    for begins in (["1"], ["2"], ["3"], ["1", "2", "3", "4"]):
        assert_same(model, (vectors(width=8),), begins)


def test_the_model_itself_may_begin_so() -> None:
    model = sequential(nn.ReLU(inplace=True), nn.Linear(8, 2))
    example = vectors(width=8)
    (stage, _) = chain_of(model, (example,)).stages(["1"])
    before = example.clone()
    assert torch.equal(stage(example), before.relu()) and torch.equal(example, before)


def test_tuples_of_tensors_cross() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    class Join(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return torch.cat(pair, 1)

    assert_same(sequential(Both(), Join(), nn.Linear(12, 2)), (vectors(width=8),), ["1", "2"])


# ------------------------------------------------------------------ blocks


def nested() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)))
    return sequential(nn.Linear(8, 8), inner, nn.Linear(8, 2))


def test_a_nested_sequential_is_one_block_until_it_must_not_be() -> None:
    example = (vectors(width=8),)
    assert names(chain_of(nested(), example)) == ["0", "1", "2"]
    assert names(chain_of(nested(), example, at_least=4)) == ["0", "1.0", "1.1", "2"]
    assert names(chain_of(nested(), example, at_least=5)) == ["0", "1.0", "1.1.0", "1.1.1", "2"]
    assert names(assert_same(nested(), example, ["1.1"])) == ["0", "1.0", "1.1", "2"]
    assert names(assert_same(nested(), example, ["1.1.1", "2"]))[2:] == ["1.1.0", "1.1.1", "2"]
    # What was taken apart still begins where its first child does.
    chain = assert_same(nested(), example, ["1", "1.1", "1.1.1"])
    assert chain.positions(["1", "1.1", "1.1.1"]) == [1, 2, 3]


def test_blocks_that_are_not_all_of_the_model_are_no_chain() -> None:
    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(x))

    chain = assert_same(seeded(WithHead), (vectors(width=8),), ["head"])
    assert all(block.traced for block in chain.blocks)


def test_blocks_in_another_order_than_they_run_are_no_chain() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](self.blocks[1](self.blocks[2](x)))

    chain = chain_of(seeded(Backwards), (vectors(width=8),))
    # Not asked for more than one block, so it is not even traced.
    assert names(chain) == ["blocks.2", "blocks.1", "blocks.0"]
    assert all(block.traced for block in chain.blocks)


def test_without_an_example_modules_copy_what_they_receive() -> None:
    model = sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    _, second = chain_of(model, None).stages(["1"])
    received = -torch.ones(2, 8)
    second(received)
    assert received.eq(-1).all()


def test_a_replica_shares_nothing() -> None:
    model = seeded(MODELS["resnet8"].build, 3, 8, 10)
    stage = chain_of(model, (pictures(),)).stages(["blocks.2"])[1]
    replica = copy.deepcopy(stage)
    assert not {id(p) for p in replica.parameters()} & {id(p) for p in model.parameters()}
    for parameter in replica.parameters():
        parameter.data.zero_()
    features = torch.ones(2, 16, 8, 8)
    assert replica(features).eq(0).all() and not stage(features).eq(0).all()


def test_the_model_and_the_random_numbers_are_left_as_they_were() -> None:
    model = seeded(load_task("digits:batchnorm=true,dropout=0.4").model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    chain_of(model, (vectors(),)).stages(["2"])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_inputs_of_the_model_are_the_task_s() -> None:
    batch = [vectors(), torch.zeros(6, dtype=torch.int64)]
    task: dict[str, Any] = {"model": nn.Identity, "train": [0]}
    task["model"] = lambda: nn.Identity()
    positional = model_inputs(Task(**task), batch)
    assert isinstance(positional, tuple) and positional[0] is batch[0] and len(positional) == 1
    named = model_inputs(Task(**task, inputs=lambda b: {"x": b[0], "y": b[1]}), batch)
    assert isinstance(named, dict) and named["y"] is batch[1]


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("begins", "why"),
    [
        (["5"], "no block of that name; valid: 1, 2"),
        (["2", "1"], "order of the network, each once, got '1' after '2'"),
        (["1", "1"], "each once"),
        (["0"], "the first module begins there anyway; expected a later block; the nearest valid"
                " cut is '1' after it"),
    ],
)  # fmt: skip
def test_cuts_that_are_none(begins: list[str], why: str) -> None:
    model = sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    with pytest.raises(InvalidSetting, match=re.escape(why)):
        chain_of(model, (vectors(width=8),), begins)
    with pytest.raises(InvalidSetting, match=re.escape(why)):
        chain_of(model, (vectors(width=8),)).stages(begins)


def test_many_blocks_are_not_all_listed() -> None:
    model = sequential(*(nn.Linear(4, 4) for _ in range(30)))
    with pytest.raises(InvalidSetting, match=r"valid: .* and 21 others \(did you mean '29'\?\)"):
        chain_of(model, (vectors(width=4),), ["299"])


def tied() -> nn.Sequential:
    model = sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2].weight = model[0].weight
    return model


def test_tied_weights_are_not_cut_apart() -> None:
    example = (vectors(width=8),)
    assert names(chain_of(tied(), example)) == ["0", "3"]
    with pytest.raises(
        InvalidSetting,
        match=r"cut '1': the parameter '0.weight' is used on both sides of it; the nearest valid "
        r"cut is '3' after it",
    ):
        chain_of(tied(), example, ["1"])
    assert_same(tied(), example, ["3"])


def test_nor_is_a_buffer_that_two_blocks_have() -> None:
    norm = nn.BatchNorm1d(8, affine=False)
    model = sequential(nn.Linear(8, 8), norm, nn.Tanh(), norm, nn.Linear(8, 2))
    example = (vectors(width=8),)
    with pytest.raises(InvalidSetting, match=r"the buffer '1.running_mean' is used on both sides"):
        chain_of(model, example, ["3"])
    # A module without state may run anywhere.
    act = nn.Tanh()
    assert_same(sequential(nn.Linear(8, 8), act, nn.Linear(8, 8), act), example, ["1", "2", "3"])


@pytest.mark.parametrize(
    ("give", "what"),
    [
        (lambda x: {"x": x}, "a value of type dict"),
        (lambda x: x.argmax(1), "a tensor of torch.int64"),
        (lambda x: (x, 3), "a tuple of Tensor, int"),
    ],
)
def test_only_tensors_that_have_gradients_cross(give: Any, what: str) -> None:
    class Give(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return give(x)

    class Take(nn.Module):
        def forward(self, value: Any) -> Tensor:
            value = value["x"] if isinstance(value, dict) else value
            value = value[0] if isinstance(value, tuple) else value
            return torch.ones(6, 8) * value.float().mean()

    model = sequential(nn.Linear(8, 8), Give(), Take(), nn.Linear(8, 2))
    example = (vectors(width=8),)
    assert names(chain_of(model, example)) == ["0", "1", "3"]
    why = (
        f"cut '2': {what} crosses there; expected a tensor of floating-point numbers or a tuple of "
        "tensors with one of them; the nearest valid cuts are '1' before it and '3' after it"
    )
    with pytest.raises(InvalidSetting, match=why):
        chain_of(model, example, ["2"])


def test_a_model_that_fails_is_the_task_s_mistake() -> None:
    with pytest.raises(TaskError, match="the model fails on a mini-batch: RuntimeError"):
        chain_of(sequential(nn.Linear(8, 8), nn.Linear(9, 2)), (vectors(width=8),))
