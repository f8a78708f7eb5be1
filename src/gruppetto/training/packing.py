"""Weights and gradients as blocks of bytes that several processes can map.

A block is plain memory, a uint8 tensor. A :class:`Packing` says where each named tensor lies in it;
the same model gives the same packing in every process, so only the number of a block has to travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gruppetto.errors import GruppettoError
from gruppetto.training.buffers import BufferUpdate
from gruppetto.training.parameters import Flat, Layout

__all__ = ["GradientSpace", "GradientsPacking", "Packing", "Weights", "WeightsPacking"]

#: Bytes; what torch's own memory starts at, and pages do.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of what a learner needs: trained parameters, and buffers without a rule."""

    flat: Flat
    others: dict[str, Tensor]

    def copy_(self, other: Weights) -> None:
        """Take another version's values."""
        self.flat.copy_(other.flat)
        for name, value in self.others.items():
            value.copy_(other.others[name])


class Packing:
    """Named tensors at fixed places of one block.

    Args:
        tensors: give names, shapes and dtypes; their values do not matter.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._places: dict[str, tuple[int, int, torch.dtype, torch.Size]] = {}
        end = 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            self._places[name] = end, end + size, tensor.dtype, tensor.shape
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        #: Size of a block; never 0, because memory of no bytes cannot be mapped.
        self.num_bytes = max(end, _ALIGNMENT)

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors in a block.

        Args:
            block: uint8, shape [num_bytes], aligned to 64 bytes.
        """
        return {
            name: block[start:end].view(dtype).view(shape)
            for name, (start, end, dtype, shape) in self._places.items()
        }


def _flat_tensors(layout: Layout) -> dict[str, Tensor]:
    return {
        f"flat/{i}": torch.empty(length, dtype=dtype, device="meta")
        for i, (dtype, length) in enumerate(zip(layout.dtypes, layout.lengths, strict=True))
    }


class WeightsPacking(Packing):
    """Blocks that hold one version each.

    Args:
        layout: of the flat vector.
        others: buffers without a rule.
    """

    def __init__(self, layout: Layout, others: Mapping[str, Tensor]) -> None:
        self._num_vectors = len(layout.dtypes)
        self._others = tuple(others)
        super().__init__({**_flat_tensors(layout), **{f"other/{n}": t for n, t in others.items()}})

    def weights(self, block: Tensor) -> Weights:
        """The version in a block, as views."""
        views = self.views(block)
        flat = Flat([views[f"flat/{i}"] for i in range(self._num_vectors)])
        return Weights(flat, {name: views[f"other/{name}"] for name in self._others})


@dataclass(frozen=True, slots=True)
class GradientSpace:
    """A block that one gradient at a time is written to."""

    flat: Flat
    #: Each parameter's part of the flat vector, in slot order.
    views: list[Tensor]
    #: uint8 [slots]: 1 where the slot had no gradient.
    absent: Tensor
    news: dict[str, dict[str, Tensor]]

    def write(self, absent: frozenset[int], news: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write what stands beside the flat vector.

        Raises:
            GruppettoError: a buffer rule reports other tensors than it did at the start.
        """
        self.absent.zero_()
        for index in absent:
            self.absent[index] = 1
        for module, tensors in self.news.items():
            for name, place in tensors.items():
                value = news[module].get(name)
                if value is None or value.shape != place.shape:
                    raise GruppettoError(
                        f"the buffer rule of {module or 'the model'} reported {name} of shape "
                        f"{tuple(place.shape)} at first and now "
                        f"{'nothing' if value is None else f'of shape {tuple(value.shape)}'}; "
                        "expected the same names and shapes every time"
                    )
                place.copy_(value)

    def read_absent(self) -> frozenset[int]:
        """Slots that had no gradient."""
        # Numpy finds them ten times as fast as torch, and a server waits for it at every push.
        return frozenset(np.flatnonzero(self.absent.numpy()).tolist())


class GradientsPacking(Packing):
    """Blocks that hold one gradient each.

    Args:
        layout: of the flat vector.
        buffers: of a replica of the model, to see what its pushes report.
    """

    def __init__(self, layout: Layout, buffers: BufferUpdate) -> None:
        self._layout = layout
        reported = buffers.example()
        self._news = {module: tuple(news) for module, news in reported.items()}
        tensors = _flat_tensors(layout)
        tensors["absent"] = torch.empty(len(layout.slots), dtype=torch.uint8, device="meta")
        for module, news in reported.items():
            tensors.update({f"news/{module}/{name}": t for name, t in news.items()})
        super().__init__(tensors)

    def space(self, block: Tensor) -> GradientSpace:
        """A block's tensors, as views."""
        views = self.views(block)
        flat = Flat([views[f"flat/{i}"] for i in range(len(self._layout.dtypes))])
        news = {
            module: {name: views[f"news/{module}/{name}"] for name in names}
            for module, names in self._news.items()
        }
        return GradientSpace(flat, self._layout.views(flat), views["absent"], news)
