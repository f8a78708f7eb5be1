"""A parameter without a gradient is None to the optimizer: no momentum, no decay, no step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_tools import apply, hand_made, make_server, named, same_bits

import gruppetto as gp

ONES = {"w": torch.ones(3), "v": torch.ones(3)}


class Two(nn.Module):
    """Two parameters that lie next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.v = nn.Parameter(torch.tensor([4.0, 5.0, 6.0]))


MOVERS = [
    gp.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    gp.optimizer(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    gp.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    gp.optimizer(torch.optim.Adafactor, lr=0.1, weight_decay=0.5),
]


@pytest.mark.parametrize("optimizer", MOVERS, ids=lambda o: o.cls.__name__)
def test_absent_from_all_is_not_touched(optimizer: Any) -> None:
    server = make_server(Two, optimizer)
    apply(server, [hand_made(server.layout, ONES)])  # momentum is under way
    before = named(server.model)
    only_w = {"w": torch.ones(3), "v": None}
    apply(server, [hand_made(server.layout, only_w), hand_made(server.layout, only_w)])
    after = named(server.model)
    assert same_bits(after["v"], before["v"])
    assert (after["w"] != before["w"]).all()


@pytest.mark.parametrize("optimizer", MOVERS, ids=lambda o: o.cls.__name__)
def test_a_gradient_of_zero_is_not_an_absent_one(optimizer: Any) -> None:
    """The control of the test before: zeros do decay, and do use up momentum."""
    server = make_server(Two, optimizer)
    apply(server, [hand_made(server.layout, ONES)])
    before = named(server.model)
    apply(server, [hand_made(server.layout, {"w": torch.ones(3), "v": torch.zeros(3)})])
    assert (named(server.model)["v"] != before["v"]).all()


def test_absent_from_some_counts_as_zero_there() -> None:
    server = make_server(Two, gp.optimizer(torch.optim.SGD, lr=0.1))
    before = named(server.model)
    gradients = [
        hand_made(server.layout, {"w": torch.full((3,), 8.0), "v": torch.full((3,), 8.0)}, 3),
        hand_made(server.layout, {"w": torch.full((3,), 4.0), "v": None}, 1),
    ]
    apply(server, gradients)
    after = named(server.model)
    torch.testing.assert_close(after["w"], before["w"] - 0.1 * 7.0)
    torch.testing.assert_close(after["v"], before["v"] - 0.1 * 6.0)


def test_absent_from_different_ones_is_absent_from_none() -> None:
    server = make_server(Two, gp.optimizer(torch.optim.SGD, lr=1.0))
    before = named(server.model)
    gradients = [
        hand_made(server.layout, {"w": torch.ones(3)}),
        hand_made(server.layout, {"v": torch.ones(3)}),
    ]
    apply(server, gradients)
    for name, value in named(server.model).items():
        torch.testing.assert_close(value, before[name] - 0.5)


def test_absent_everywhere_still_counts_as_an_update() -> None:
    server = make_server(Two, MOVERS[0])
    before = named(server.model)
    apply(server, [hand_made(server.layout, {})])
    assert all(same_bits(v, before[n]) for n, v in named(server.model).items())
    assert server.state()[1]["samples_applied"] == 1


def test_momentum_goes_on_where_it_stopped() -> None:
    """SGD by hand with v absent at the second of three updates."""
    server = make_server(Two, gp.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9))
    v: Tensor = server.model.v.detach().clone()  # type: ignore[union-attr]
    for values in (ONES, {"w": torch.ones(3)}, ONES):
        apply(server, [hand_made(server.layout, values)])
    # Velocity 1 at the first step, 0.9 + 1 at the third; nothing in between.
    torch.testing.assert_close(server.model.v.detach(), v - 0.1 * 1.0 - 0.1 * 1.9)  # type: ignore[union-attr]
