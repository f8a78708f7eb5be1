"""Clipping acts on the combined gradient, after combining and before the optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from training_tools import apply, hand_made, make_server, named, seeded

import gruppetto as gp
from gruppetto.errors import InvalidSetting
from gruppetto.training.clipping import CLIPS, ClipNorm, ClipValue
from gruppetto.training.parameters import Flat


class Four(nn.Module):
    """Weights at zero, so that a step is read off directly."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.v = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def step_of(clip: ClipNorm | ClipValue | None, *gradients: tuple[float, ...]) -> list[float]:
    """Where SGD with lr=1 goes from zero, with the sign turned."""
    server = make_server(Four, gp.optimizer(torch.optim.SGD, lr=1.0), clip=clip)
    made = [
        hand_made(server.layout, {"w": torch.tensor(g[:2]), "v": torch.tensor(g[2:]).double()})
        for g in gradients
    ]
    apply(server, made)
    return [-float(x) for p in named(server.model).values() for x in p]


def test_norm_over_all_parameters_and_dtypes() -> None:
    # The norm of (2, 4, 4, 8) is 10.
    assert step_of(ClipNorm(5.0), (2.0, 4.0, 4.0, 8.0)) == pytest.approx([1.0, 2.0, 2.0, 4.0])
    assert step_of(ClipNorm(10.5), (2.0, 4.0, 4.0, 8.0)) == [2.0, 4.0, 4.0, 8.0]
    assert step_of(ClipNorm(10.0), (2.0, 4.0, 4.0, 8.0)) == [2.0, 4.0, 4.0, 8.0]


def test_norm_is_that_of_the_combined_gradient() -> None:
    """Each alone is long, together they nearly cancel: nothing is to be clipped."""
    long, back = (100.0, 0.0, 0.0, 0.0), (-98.0, 0.0, 0.0, 0.0)
    assert step_of(ClipNorm(2.0), long, back) == [1.0, 0.0, 0.0, 0.0]
    # The control: clipped one by one, they would cancel to zero.
    assert step_of(ClipNorm(2.0), long) == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert step_of(ClipNorm(2.0), back) == pytest.approx([-2.0, 0.0, 0.0, 0.0])


def test_value_is_that_of_the_combined_gradient() -> None:
    assert step_of(ClipValue(1.5), (4.0, -4.0, 1.0, -9.0)) == [1.5, -1.5, 1.0, -1.5]
    assert step_of(ClipValue(1.5), (4.0, 0.0, 1.0, 0.0), (-2.0, 0.0, 1.0, 9.0)) == [
        1.0, 0.0, 1.0, 1.5,
    ]  # fmt: skip


def test_clipping_comes_before_the_rate_momentum_and_decay() -> None:
    """lr 0.5 at factor 0.5, decay on top of the clipped gradient, momentum after both."""
    server = make_server(
        lambda: nn.Linear(2, 1, bias=False),
        gp.optimizer(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1),
        clip=ClipValue(1.0),
    )
    with torch.no_grad():
        server.model.weight.fill_(2.0)  # type: ignore[union-attr]
    weight, velocity = 2.0, 0.0
    for gradient in (5.0, 0.25):
        apply(server, [hand_made(server.layout, {"weight": torch.full((1, 2), gradient)})], [0.5])
        velocity = 0.9 * velocity + min(gradient, 1.0) + 0.1 * weight
        weight -= 0.25 * velocity
        torch.testing.assert_close(
            server.model.weight.detach(),  # type: ignore[union-attr]
            torch.full((1, 2), weight),
        )


@pytest.mark.parametrize("largest", [0.5, 3.0, 1e4])
def test_norm_agrees_with_torch(largest: float) -> None:
    values = torch.randn(640, generator=seeded(0))
    parameter = nn.Parameter(torch.zeros(640))
    parameter.grad = values.clone()
    torch.nn.utils.clip_grad_norm_([parameter], largest)
    flat = Flat([values.clone()])
    ClipNorm(largest).apply(flat)
    expected: Tensor = parameter.grad
    torch.testing.assert_close(flat.vectors[0], expected, rtol=1e-5, atol=1e-6)


def test_a_float32_norm_is_measured_in_float64() -> None:
    """3e30 squared overflows float32; clipping must still bring it to its bound."""
    flat = Flat([torch.full((64,), 3e30)])
    ClipNorm(1.0).apply(flat)
    torch.testing.assert_close(flat.vectors[0], torch.full((64,), 1 / 8))


@pytest.mark.parametrize("text", ["norm:max=0", "value:max=-1", "norm:max=nan", "value:max=inf"])
def test_bounds_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="expected max > 0 and finite"):
        CLIPS.parse(text)


def test_names() -> None:
    assert CLIPS.parse("norm:max=2") == ClipNorm(2.0)
    assert CLIPS.parse("value:max=0.5") == ClipValue(0.5)
    assert math.isclose(CLIPS.parse("norm:max=1e-3").max, 1e-3)
    with pytest.raises(InvalidSetting, match="needs max="):
        CLIPS.parse("norm")
