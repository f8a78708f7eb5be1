"""The flat vector: all trained parameters of one dtype, one after the other.

Order: by optimizer group, then ``named_parameters`` order; tied weights once; frozen parameters
and those no group holds stay outside. Every parameter starts at a multiple of 64 elements: fused
kernels, matrix products and norms round differently depending on where a vector is cut or
aligned, and a segment may start at any parameter. The gaps are zero and stay zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = [
    "ALIGNMENT",
    "Flat",
    "Layout",
    "Slot",
    "hash_tensors",
    "squared_distance",
    "squared_norm",
]

#: Elements.
ALIGNMENT = 64
#: Elements, a multiple of it, that are summed at a time: they fit a processor's cache.
_CHUNK = 1 << 14


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Index of the optimizer group.
    group: int
    #: First element in the vector of its dtype.
    start: int
    #: Elements, without the gap behind.
    size: int

    @property
    def end(self) -> int:
        """First element of what follows, the gap included."""
        return self.start + -(-self.size // ALIGNMENT) * ALIGNMENT


class Flat:
    """One vector per dtype, in the layout's order of dtypes."""

    __slots__ = ("vectors",)

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        self.vectors = tuple(vectors)

    def clone(self) -> Flat:
        """A copy."""
        return Flat([v.clone() for v in self.vectors])

    def to(self, device: torch.device) -> Flat:
        """The same on a device; its vectors themselves where they are there already."""
        return Flat([v.to(device) for v in self.vectors])

    def copy_(self, other: Flat) -> None:
        """Take another's values."""
        for mine, theirs in zip(self.vectors, other.vectors, strict=True):
            mine.copy_(theirs)

    def add_(self, other: Flat, alpha: float) -> None:
        """self += alpha * other, one rounding per element where the CPU fuses."""
        for mine, theirs in zip(self.vectors, other.vectors, strict=True):
            mine.add_(theirs, alpha=alpha)

    def scaled(self, factor: float) -> Flat:
        """factor * self, as a new one."""
        return Flat([v * factor for v in self.vectors])

    def scale_(self, factor: float) -> None:
        """self *= factor."""
        for vector in self.vectors:
            vector.mul_(factor)

    def is_finite(self) -> bool:
        """Whether every element is finite."""
        for vector in self.vectors:
            # The sum is finite unless an element is not, or large ones overflow: a cheap first
            # look, ten times faster than looking at each element.
            if not math.isfinite(vector.sum().item()) and not bool(torch.isfinite(vector).all()):
                return False
        return True

    @property
    def num_bytes(self) -> int:
        """Memory."""
        return sum(v.numel() * v.element_size() for v in self.vectors)


class Layout:
    """The slots of a model's trained parameters, in flat order.

    Args:
        model: gives names and shapes.
        groups: the optimizer's parameter groups, as lists of the model's parameters.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Iterable[nn.Parameter]]) -> None:
        group_of = {id(p): index for index, group in enumerate(groups) for p in group}
        trained = [
            (group_of[id(p)], name, p)
            for name, p in model.named_parameters()
            if p.requires_grad and id(p) in group_of
        ]
        trained.sort(key=lambda entry: entry[0])  # stable: named_parameters order within a group
        ends: dict[torch.dtype, int] = {}
        slots = []
        for group, name, p in trained:
            start = ends.get(p.dtype, 0)
            slots.append(Slot(name, tuple(p.shape), p.dtype, group, start, p.numel()))
            ends[p.dtype] = slots[-1].end
        self.slots: tuple[Slot, ...] = tuple(slots)
        self.dtypes: tuple[torch.dtype, ...] = tuple(ends)
        #: Elements of each vector, gaps included.
        self.lengths: tuple[int, ...] = tuple(ends.values())

    def zeros(self, device: torch.device) -> Flat:
        """A flat vector of zeros."""
        return Flat(
            [
                torch.zeros(length, dtype=dtype, device=device)
                for dtype, length in zip(self.dtypes, self.lengths, strict=True)
            ]
        )

    def view(self, flat: Flat, slot: Slot) -> Tensor:
        """A parameter's part of a flat vector, in its shape."""
        vector = flat.vectors[self.dtypes.index(slot.dtype)]
        return vector[slot.start : slot.start + slot.size].view(slot.shape)

    def views(self, flat: Flat) -> list[Tensor]:
        """Every parameter's part, in slot order."""
        return [self.view(flat, slot) for slot in self.slots]

    def adopt(self, model: nn.Module, device: torch.device) -> Flat:
        """Make the model's trained parameters live in a new flat vector, values kept."""
        flat = self.zeros(device)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for slot, view in zip(self.slots, self.views(flat), strict=True):
                view.copy_(parameters[slot.name])
                parameters[slot.name].data = view
        return flat

    @property
    def num_parameters(self) -> int:
        """Trained numbers, gaps not counted."""
        return sum(slot.size for slot in self.slots)


def squared_norm(vector: Tensor) -> float:
    """Sum of squares in float64 over fixed blocks of 64, so that a cut vector has the same sum."""
    padded = -(-vector.numel() // ALIGNMENT) * ALIGNMENT
    if padded != vector.numel():
        vector = torch.nn.functional.pad(vector, (0, padded - vector.numel()))
    blocks = vector.double().square().view(-1, ALIGNMENT).sum(dim=1)
    return float(blocks.sum())


def squared_distance(left: Flat, right: Flat) -> float:
    """‖left − right‖² in float64 over fixed blocks; the gaps of a layout are equal in both."""
    total = 0.0
    for ours, theirs in zip(left.vectors, right.vectors, strict=True):
        for start in range(0, ours.numel(), _CHUNK):
            mine, other = ours[start : start + _CHUNK], theirs[start : start + _CHUNK]
            total += squared_norm(mine.double() - other.to(mine.device).double())
    return total


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over dtype, shape, name and little-endian bytes of each tensor, in order."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{value.dtype} {list(value.shape)} {name}\n".encode())
        # Reinterpreting as bytes works for every dtype, also those numpy does not know.
        digest.update(value.view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
