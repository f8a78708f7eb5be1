"""The weights of several versions as a few tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gruppetto.training.learner import Weights
from gruppetto.training.parameters import Flat

__all__ = ["pack_versions", "unpack_versions"]


def pack_versions(versions: Mapping[int, Weights]) -> dict[str, Tensor]:
    """Stack each vector and buffer over the versions, in their order. Shapes [versions, ...]."""
    packed: dict[str, Tensor] = {}
    every = list(versions.values())
    if every:
        for index in range(len(every[0].flat.vectors)):
            packed[f"versions/flat/{index}"] = torch.stack([w.flat.vectors[index] for w in every])
        for name in every[0].others:
            packed[f"versions/other/{name}"] = torch.stack([w.others[name] for w in every])
    return packed


def unpack_versions(
    numbers: Sequence[int], packed: Mapping[str, Tensor], device: torch.device
) -> dict[int, Weights]:
    """Take back what :func:`pack_versions` gave, versions named in the same order."""
    prefix = "versions/other/"
    num_vectors = sum(name.startswith("versions/flat/") for name in packed)
    return {
        number: Weights(
            Flat(
                [packed[f"versions/flat/{i}"][row].clone().to(device) for i in range(num_vectors)]
            ),
            {
                name[len(prefix) :]: stacked[row].clone().to(device)
                for name, stacked in packed.items()
                if name.startswith(prefix)
            },
        )
        for row, number in enumerate(numbers)
    }
