"""The models: sizes, layers, and what they compute."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn
from training_tools import same_bits, seeded

from gruppetto.errors import InvalidSetting
from gruppetto.training.models import MODELS
from gruppetto.training.models.resnet import ResidualBlock, ResNet
from gruppetto.training.models.rudra import LocalResponseNorm, Rudra, rudra_param_groups
from gruppetto.training.optimizers import build_optimizer, parse_optimizer


def build(name: str, channels: int = 3, size: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].build(channels, size, 10)


@pytest.mark.parametrize(
    ("name", "channels", "size", "count"),
    [
        ("resnet8", 3, 32, 75_290),
        ("resnet20", 3, 32, 269_722),
        ("resnet56", 3, 32, 853_018),
        ("resnet110", 3, 32, 1_727_962),
        ("rudra", 3, 32, 89_578),
        ("softmax", 1, 28, 7_850),
        ("softmax", 3, 32, 30_730),
        ("softmax", 1, 32, 10_250),
        ("cnn", 1, 28, 80_602),
        ("cnn", 3, 32, 103_930),
        ("resnet8", 1, 28, 75_002),
    ],
)
def test_parameters_and_shapes(name: str, channels: int, size: int, count: int) -> None:
    model = build(name, channels, size)
    assert sum(p.numel() for p in model.parameters()) == count
    x = torch.randn(2, channels, size, size, generator=seeded(1))
    scores = model(x)
    assert scores.shape == (2, 10)
    nn.functional.cross_entropy(scores, torch.tensor([0, 9])).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_says_what_it_is_and_can_be_built_again(name: str) -> None:
    assert MODELS[name].summary.endswith(".")
    parse_optimizer(MODELS[name].optimizer)
    left, right = build(name).state_dict(), build(name).state_dict()
    assert all(same_bits(left[key], right[key]) for key in left)


# ------------------------------------------------------------------------ ResNet


@pytest.mark.parametrize("depth", [8, 20])
def test_a_resnet_is_its_blocks_in_order(depth: int) -> None:
    model = ResNet(depth).eval()
    blocks = list(model.blocks)
    residual = [b for b in blocks if isinstance(b, ResidualBlock)]
    assert len(blocks) == (depth - 2) // 2 + 2
    assert residual == blocks[1:-1]
    x = torch.randn(2, 3, 32, 32, generator=seeded(1))
    y, shapes = x, []
    for block in blocks:
        y = block(y)
        shapes.append(tuple(y.shape[1:]))
    assert same_bits(y, model(x))
    n = (depth - 2) // 6
    assert shapes == [(16, 32, 32)] * (n + 1) + [(32, 16, 16)] * n + [(64, 8, 8)] * n + [(10,)]
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(layers) == depth


@pytest.mark.parametrize("depth", [2, 7, 18, 52])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(InvalidSetting, match=rf"a depth of 6n \+ 2 .*, got {depth}"):
        ResNet(depth)


@pytest.mark.parametrize(("size", "before", "width"), [(8, 4, 8), (7, 4, 8), (8, 3, 6), (5, 4, 4)])
def test_shortcuts_have_no_parameters(size: int, before: int, width: int) -> None:
    """Against option A written out element by element."""
    block = ResidualBlock(before, width).eval()
    x = torch.randn(2, before, size, size, generator=seeded(2))
    stride = 1 if before == width else 2
    small = -(-size // stride)
    expected = torch.zeros(2, width, small, small)
    for c in range(before):
        for i in range(small):
            for j in range(small):
                expected[:, c + (width - before) // 2, i, j] = x[:, c, i * stride, j * stride]
    assert torch.equal(block.shortcut(x), expected)
    assert not any("shortcut" in name for name, _ in block.named_parameters())
    # Without the convolutions' part, the block is its shortcut and a ReLU.
    nn.init.zeros_(block.norm2.weight)
    assert torch.equal(block(x), expected.clamp(min=0))


def test_initial_weights_are_those_of_he() -> None:
    model = build("resnet56")
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            assert float(module.weight.detach().std()) == pytest.approx(
                (2 / fan_in) ** 0.5, rel=0.15
            )
            assert module.bias is None
        elif isinstance(module, nn.Linear):
            assert not module.bias.any()


# ------------------------------------------------------------------------- Rudra


def naive_lrn(x: Tensor, size: int, alpha: float, beta: float) -> Tensor:
    """Caffe's WITHIN_CHANNEL, pixel by pixel."""
    y = torch.empty_like(x)
    reach = size // 2
    _, _, height, width = x.shape
    for i in range(height):
        for j in range(width):
            total = torch.zeros(x.shape[:2], dtype=x.dtype)
            for di in range(-reach, reach + 1):
                for dj in range(-reach, reach + 1):
                    if 0 <= i + di < height and 0 <= j + dj < width:
                        total += x[:, :, i + di, j + dj] ** 2
            y[:, :, i, j] = x[:, :, i, j] * (1 + alpha * total / size**2) ** -beta
    return y


@pytest.mark.parametrize(
    ("size", "alpha", "beta"), [(3, 5e-5, 0.75), (3, 0.7, 0.75), (5, 1.0, 2.0)]
)
def test_normalisation_within_a_map(size: int, alpha: float, beta: float) -> None:
    x = 30 * torch.randn(2, 3, 6, 7, generator=seeded(3), dtype=torch.float64)
    expected = naive_lrn(x, size, alpha, beta)
    torch.testing.assert_close(LocalResponseNorm(size, alpha, beta)(x), expected)
    assert not torch.allclose(expected, x, rtol=1e-6)


def test_rudra_is_caffes_network() -> None:
    """Layer by layer, pooling written out: windows end at the border, means are over the rest."""
    torch.manual_seed(0)
    model = Rudra().double()
    conv = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    fc = next(m for m in model.modules() if isinstance(m, nn.Linear))
    with torch.no_grad():
        for layer in (*conv, fc):
            layer.bias.normal_()
    x = 50 * torch.randn(2, 3, 32, 32, generator=seeded(4), dtype=torch.float64)

    def pool(y: Tensor, kind: str) -> Tensor:
        n = y.shape[-1] // 2
        rows = []
        for i in range(n):
            for j in range(n):
                window = y[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
                rows.append(window.amax((2, 3)) if kind == "max" else window.mean((2, 3)))
        return torch.stack(rows, 2).reshape(*y.shape[:2], n, n)

    y = naive_lrn(pool(conv[0](x), "max").clamp(min=0), 3, 5e-5, 0.75)
    assert y.shape == (2, 32, 16, 16)
    y = naive_lrn(pool(conv[1](y).clamp(min=0), "mean"), 3, 5e-5, 0.75)
    assert y.shape == (2, 32, 8, 8)
    y = pool(conv[2](y).clamp(min=0), "mean")
    assert y.shape == (2, 64, 4, 4)
    torch.testing.assert_close(model(x), fc(y.flatten(1)))
    torch.testing.assert_close(model(x), model.blocks(x))


def test_rudras_initial_weights() -> None:
    model = build("rudra")
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    for layer, deviation in zip(layers, (1e-4, 0.01, 0.01, 0.01), strict=True):
        assert float(layer.weight.detach().std()) == pytest.approx(deviation, rel=0.05)
        assert abs(float(layer.weight.detach().mean())) < deviation / 10
        assert layer.bias is not None
        assert not layer.bias.any()


def test_rudras_groups_follow_the_optimizers_rate() -> None:
    model = build("rudra")
    groups = rudra_param_groups(model)
    assert [len(g["params"]) for g in groups] == [3, 1, 4]
    assert [g["weight_decay"] for g in groups] == [0.004, 1.0, 0.0]
    assert [g.get("lr_scale", 1.0) for g in groups] == [1.0, 1.0, 2.0]
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    optimizer = build_optimizer(
        parse_optimizer("sgd:lr=0.001,momentum=0.9"), model, MODELS["rudra"].param_groups
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.001, 0.001, 0.002]
    assert [g["momentum"] for g in optimizer.param_groups] == [0.9] * 3
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.004, 1.0, 0.0]


def test_models_can_be_pickled() -> None:
    for name in ("resnet8", "rudra", "cnn", "softmax"):
        model = build(name).eval()
        x = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            assert same_bits(pickle.loads(pickle.dumps(model))(x), model(x))
