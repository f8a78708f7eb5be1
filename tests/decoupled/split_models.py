"""Models to cut, and the comparison of a cut model with the whole one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gruppetto.decoupled.chain import Chain, chain_of


class BasicBlock(nn.Module):
    """As in torchvision: a skip connection, one in-place ReLU that runs twice."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class TorchvisionLike(nn.Module):
    """Stages by name, and a functional flatten and dropout in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8))
        self.layer3 = nn.Sequential(BasicBlock(8, 16, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(nn.functional.dropout(x, 0.3, self.training))


def seeded(build: Any, *arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(*arguments).train()


def pictures(n: int = 4, channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(1))


def assert_same(model: nn.Module, example: Any, begins: Sequence[str], **how: Any) -> Chain:
    """A cut model gives the model's bits: outputs, every gradient, every buffer. Draws included."""
    chain = chain_of(model, example, begins, **how)
    stages = chain.stages(begins)
    # Nothing is copied, lost, twice or renamed, and the order is the model's.
    for kind in ("named_parameters", "named_buffers"):
        found = [entry for stage in stages for entry in getattr(stage, kind)()]
        assert [name for name, _ in found] == [name for name, _ in getattr(model, kind)()]
        assert all(a is b for (_, a), (_, b) in zip(found, getattr(model, kind)(), strict=True))
    whole, replicas = copy.deepcopy(model), [copy.deepcopy(stage) for stage in stages]
    torch.manual_seed(5)
    expected = call(whole, example)
    expected.square().sum().backward()
    torch.manual_seed(5)
    received: Any = None
    links: list[tuple[list[Tensor], list[Tensor]]] = []
    for i, stage in enumerate(replicas):
        before = [] if i == 0 else [t.detach().clone() for t in as_list(received)]
        outputs = call(stage, example) if i == 0 else stage(received)
        inputs = [] if i == 0 else as_list(received)
        # What was received is still what it was, so it can be kept, or be computed on again.
        assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
        links.append((inputs, as_list(outputs)))
        sent = [t.detach().contiguous().requires_grad_() for t in as_list(outputs)]
        received = tuple(sent) if isinstance(outputs, tuple) else sent[0]
    assert torch.equal(links[-1][1][0], expected)
    links[-1][1][0].square().sum().backward()
    for (inputs, _), (_, outputs) in zip(links[:0:-1], links[-2::-1], strict=True):
        # A module without parameters at the beginning has no gradients to compute.
        pairs = [(o, t.grad) for o, t in zip(outputs, inputs, strict=True) if o.requires_grad]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    mine = {name: p.grad for stage in replicas for name, p in stage.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert (mine[name] is None) == (parameter.grad is None), name
        assert parameter.grad is None or torch.equal(mine[name], parameter.grad), name
    moved = {name: b for stage in replicas for name, b in stage.named_buffers()}
    for name, buffer in whole.named_buffers():
        assert torch.equal(moved[name], buffer), name
    return chain


def as_list(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def call(module: nn.Module, example: Any) -> Any:
    if isinstance(example, dict):
        return module(**{name: value.clone() for name, value in example.items()})
    return module(*(value.clone() for value in example))


def names(chain: Chain) -> list[str]:
    return [block.name for block in chain.blocks]
