"""Small models, data and hand-made gradients that the tests of training share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.protocols.messages import Contribution
from gruppetto.runs.execute import Run
from gruppetto.trace import UpdateRow
from gruppetto.training.learner import Gradient
from gruppetto.training.parameters import Layout
from gruppetto.training.server import Server, Updating
from gruppetto.training.task import Task

CPU = torch.device("cpu")


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bytes; unlike ``torch.equal``, -0.0 is not 0.0."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and bytes(left.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        == bytes(right.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    )


def seeded(seed: int) -> torch.Generator:
    """A generator of its own, apart from the global ones."""
    return torch.Generator().manual_seed(seed)


def class_data(n: int = 50, features: int = 6, classes: int = 3, seed: int = 0) -> TensorDataset:
    """Random points with random labels."""
    generator = seeded(seed)
    return TensorDataset(
        torch.randn(n, features, generator=generator),
        torch.randint(classes, (n,), generator=generator),
    )


def line_data(n: int = 50, features: int = 6, seed: int = 0) -> TensorDataset:
    """A noisy linear function, float64."""
    generator = seeded(seed)
    x = torch.randn(n, features, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True).tanh() + 0.1 * torch.randn(
        n, 1, generator=generator, dtype=torch.float64
    )
    return TensorDataset(x, y)


def mlp() -> nn.Module:
    """Six features, three classes; no size is a multiple of 64."""
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def make_task(model: Callable[[], nn.Module] = mlp, **given: Any) -> Task:
    """A task over :func:`class_data`."""
    return Task(**{"model": model, "train": class_data(), **given})


def make_server(
    model: Callable[[], nn.Module] = mlp,
    optimizer: Any = None,
    *,
    samples_per_epoch: int = 50,
    param_groups: Any = None,
    initial: Mapping[str, Tensor] | None = None,
    **updating: Any,
) -> Server:
    """A server without a run around it."""
    return Server(
        make_task(model, param_groups=param_groups),
        Updating(optimizer or gp.optimizer(torch.optim.SGD, lr=0.1), **updating),
        0,
        samples_per_epoch,
        CPU,
        initial,
    )


def hand_made(
    layout: Layout,
    values: Mapping[str, Tensor | None],
    num_samples: int = 1,
    news: dict[str, dict[str, Tensor]] | None = None,
) -> Gradient:
    """A gradient by parameter name; None, or no entry, is an absent one."""
    flat = layout.zeros(CPU)
    absent = set()
    for index, (slot, view) in enumerate(zip(layout.slots, layout.views(flat), strict=True)):
        value = values.get(slot.name)
        if value is None:
            absent.add(index)
        else:
            view.copy_(value)
    return Gradient(flat, frozenset(absent), news or {}, 0.0, num_samples)


def contribution(
    number: int = 0,
    num_samples: int = 1,
    factor: float | None = 1.0,
    *,
    version: int = 0,
    staleness: int = 0,
) -> Contribution:
    """What a coordinator says about a gradient."""
    return Contribution(number, version, staleness, num_samples, factor)


def apply(
    server: Server, gradients: Sequence[Gradient], factors: Sequence[float] | None = None
) -> None:
    """One update of fresh gradients."""
    factors = factors or [1.0] * len(gradients)
    server.apply(
        [
            contribution(i, g.num_samples, s)
            for i, (g, s) in enumerate(zip(gradients, factors, strict=True))
        ],
        gradients,
    )


def named(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's parameters."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def train(task: Task, folder: Path, rows: list[UpdateRow] | None = None, **given: Any) -> Run:
    """``gp.train`` into a folder, silently; update rows are collected in ``rows``."""

    def keep(row: object) -> None:
        if rows is not None and isinstance(row, UpdateRow):
            rows.append(row)

    given.setdefault("evaluate", "off")
    return gp.train(task, out=folder, progress=False, on_event=keep, **given, engine="virtual")
