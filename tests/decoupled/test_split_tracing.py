"""Models whose forward is code are traced, and cut where one value is alive."""

from __future__ import annotations

import re

import pytest
import torch
from split_models import TorchvisionLike, assert_same, names, pictures, seeded
from torch import Tensor, nn

from gruppetto.decoupled.chain import chain_of
from gruppetto.errors import InvalidSetting
from gruppetto.training.models import MODELS

BLOCKS = ["conv1", "bn1", "relu", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0",
          "avgpool", "fc"]  # fmt: skip


def rows(width: int = 8) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(3))


# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize(
    "begins", [[], ["layer2"], ["layer1", "layer2", "layer3"], ["relu", "layer1.1", "avgpool"],
               ["bn1", "fc"], ["layer1.0.conv1", "layer3.0"]],
)  # fmt: skip
def test_a_residual_network_gives_its_own_bits(begins: list[str]) -> None:
    chain = assert_same(seeded(TorchvisionLike), (pictures(),), begins)
    if begins:
        assert names(chain) == BLOCKS and all(block.traced for block in chain.blocks)


def test_a_chain_of_two_is_traced_for_more() -> None:
    class Normalise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    torch.manual_seed(0)
    model = nn.Sequential(Normalise(), TorchvisionLike()).train()
    example = (pictures(),)
    assert names(chain_of(model, example)) == ["0", "1"]
    chain = assert_same(model, example, ["1.layer2", "1.layer3"])
    assert names(chain) == ["0", *(f"1.{name}" for name in BLOCKS)]


def test_inputs_by_keyword_and_those_left_out() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(
            self, x: Tensor, scale: Tensor, mask: Tensor | None = None, n: int = 2
        ) -> Tensor:
            x = self.first(x) * scale
            if mask is not None:
                x = x * mask
            return self.second(x) * n

    example = {"scale": torch.full((5, 1), 2.0), "x": rows()}
    assert_same(seeded(Optional), example, ["second"])
    assert_same(seeded(Optional), tuple(example[k] for k in ("x", "scale")), ["second"])
    mask = torch.arange(40.0).reshape(5, 8)
    assert_same(seeded(Optional), {**example, "mask": mask}, ["second"])


def test_buffers_constants_and_parameters_used_in_code() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # In another order than they run, and one that nothing uses.
            self.last = nn.Linear(8, 2)
            self.unused = nn.Linear(3, 3)
            self.shift = nn.Parameter(torch.ones(8))
            self.register_buffer("mask", torch.arange(16.0), persistent=False)
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) + self.shift * torch.tensor([2.0])
            return self.last(x * self.mask[: x.shape[1]])

    model = seeded(Uses)
    example = (rows(),)
    chain = chain_of(model, example, ["last"])
    first, last = chain.stages(["last"])
    assert dict(first.named_parameters()).keys() == {"shift", "first.weight", "first.bias"}
    # Everything is somewhere: what is never used is in the last module.
    assert dict(last.named_parameters()).keys() == {"last.weight", "last.bias", "unused.weight",
                                                    "unused.bias"}  # fmt: skip
    assert first.state_dict().keys() | last.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(last(first(*example)), model(*example))
    with torch.no_grad():
        model.mask.add_(1)
    assert torch.equal(last(first(*example)), model(*example))


def test_code_that_cannot_be_traced_is_one_step() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.b(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch, self.head = nn.Linear(8, 8), Branch(), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.branch(torch.relu(self.stem(x))))

    chain = assert_same(seeded(Net), (rows(),), ["branch", "head"])
    assert names(chain) == ["stem", "branch", "head"]
    why = (
        "cut 'branch.a': it lies inside 'branch', which runs as one; the nearest valid cuts are "
        "'branch' before it and 'head' after it"
    )
    with pytest.raises(InvalidSetting, match=why):
        chain_of(seeded(Net), (rows(),), ["branch.a"])


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        ("layer2.0.conv2", "2 values are needed across it, as inside a skip connection; the "
                           "nearest valid cuts are 'layer2.0' before it and 'layer2.1' after it"),
        ("layer1.0.relu", "it runs more than once; the nearest valid cuts are 'layer1.0' before it "
                          "and 'layer1.1' after it"),
        ("layer3.0.downsample", "2 values are needed"),
        ("conv1", "the first module begins there anyway"),
        ("layer9", "no block of that name; valid: "),
    ],
)  # fmt: skip
def test_a_skip_connection_is_not_cut(cut: str, why: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(f"cut {cut!r}: ") + ".*" + re.escape(why)):
        chain_of(seeded(TorchvisionLike), (pictures(),), [cut])


def test_nor_one_inside_a_block_of_ours() -> None:
    model = seeded(MODELS["resnet8"].build, 3, 8, 10)
    with pytest.raises(InvalidSetting, match=r"cut 'blocks.2.norm1': 2 values .* the nearest valid "
                       r"cuts are 'blocks.2' before it and 'blocks.3' after it"):  # fmt: skip
        chain_of(model, (pictures(),), ["blocks.2.norm1"])
    with pytest.raises(InvalidSetting, match=r"valid: blocks.1, blocks.2, blocks.3, blocks.4"):
        chain_of(model, (pictures(),), ["block.2"])


def test_tied_weights_in_code() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.middle, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.middle(torch.relu(self.into(x)))
            return self.out(nn.functional.linear(x, self.into.weight))

    why = (
        "cut 'middle': the parameter 'into.weight' is used on both sides of it; the nearest valid "
        "cut is 'out' after it"
    )
    with pytest.raises(InvalidSetting, match=why):
        chain_of(seeded(Tied), (rows(),), ["middle"])
    assert_same(seeded(Tied), (rows(),), ["out"])


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.sum() > 0 else self.b(x)


class Drawing(nn.Module):
    """What it draws does not depend on its input, so tracing takes it for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + torch.rand(8))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (Deciding, r"its forward cannot be traced \(TraceError: .*control flow"),
        (Drawing, "its blocks compute something else than it does"),
    ],
)
def test_a_model_that_cannot_be_cut_says_what_to_do(build: type[nn.Module], why: str) -> None:
    model = seeded(build)
    with pytest.raises(InvalidSetting) as error:
        chain_of(model, (rows(),), at_least=2)
    beginning = f"the model {build.__name__} cannot be cut into modules: "
    assert re.match(beginning + why, str(error.value))
    assert "make it an nn.Sequential, or give it an attribute `blocks`" in str(error.value)
    # As it is, in one module, it can be trained all the same.
    (stage,) = chain_of(model, (rows(),)).stages([])
    assert stage is model


def test_tracing_leaves_no_traces() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.a(x) * torch.tensor([3.0])
            return self.b(self.seen)

    model = seeded(Keeps)
    attributes = set(vars(model))
    chain_of(model, None, ["b"])
    assert set(vars(model)) == attributes and model.seen is None
