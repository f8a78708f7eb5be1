"""Gradients that have arrived and are not applied yet: to a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gruppetto.engines.local.memory import Blocks, RunMemory
from gruppetto.training.learner import Gradient

__all__ = ["pack_held", "unpack_held"]


def pack_held(
    held: Mapping[int, tuple[int, Gradient]],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Gradients by lease, each with its block, as tensors by name and JSON values by lease."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for lease, (_, gradient) in held.items():
        plain[str(lease)] = {
            "absent": sorted(gradient.absent),
            "loss": gradient.loss,
            "num_samples": gradient.num_samples,
        }
        for i, vector in enumerate(gradient.flat.vectors):
            tensors[f"held/{lease}/flat/{i}"] = vector
        for module, news in gradient.news.items():
            tensors.update({f"held/{lease}/news/{module}/{n}": t for n, t in news.items()})
    return tensors, plain


def unpack_held(
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Mapping[str, Any]],
    memory: RunMemory,
    spaces: Blocks,
) -> dict[int, tuple[int, Gradient]]:
    """Take back what :func:`pack_held` gave, into blocks of a run's memory."""
    held = {}
    for text, numbers in plain.items():
        block = spaces.take()
        space = memory.gradient(block)
        for i, vector in enumerate(space.flat.vectors):
            vector.copy_(tensors[f"held/{text}/flat/{i}"])
        for module, news in space.news.items():
            for name, place in news.items():
                place.copy_(tensors[f"held/{text}/news/{module}/{name}"])
        absent, loss = frozenset(numbers["absent"]), numbers["loss"]
        gradient = Gradient(space.flat, absent, space.news, loss, numbers["num_samples"])
        held[int(text)] = block, gradient
    return held
