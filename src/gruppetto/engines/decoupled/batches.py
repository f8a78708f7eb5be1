"""A mini-batch as what a ring carries: its tensors, and the nest around them as plain values.

Nothing is pickled. A batch may nest tensors, NumPy arrays, texts, numbers, bytes and None in lists,
tuples and dicts (and in whatever else :mod:`torch.utils._pytree` knows how to write down); the nest
that the first mini-batch has is known to both sides, so it may also be of named tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gruppetto.engines.decoupled.rings import copied
from gruppetto.errors import TaskError

__all__ = ["BatchPacking", "copied_batch"]

_PLAIN: Final = (str, bool, int, float, bytes, type(None))
#: What stands for a leaf that travels as a tensor.
_TENSOR: Final = 0
_ARRAY: Final = 1


class _Rest(msgspec.Struct, array_like=True, frozen=True):
    #: None where the nest is that of the example.
    nest: str | None
    #: Per leaf: a tensor, an array, or a list of one plain value.
    leaves: list[Any]


class BatchPacking:
    """How batches travel; both sides have the same one.

    Args:
        example: a batch, whose nest need not travel.

    Raises:
        TaskError: it holds what cannot travel.
    """

    def __init__(self, example: Any) -> None:
        self._nest = pytree.tree_structure(example)
        self.pack(example)

    def pack(self, batch: Any) -> tuple[list[Tensor], bytes]:
        """Tensors, and all else.

        Raises:
            TaskError: it holds what cannot travel.
        """
        found, nest = pytree.tree_flatten(batch)
        tensors: list[Tensor] = []
        leaves: list[Any] = []
        for leaf in found:
            if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized:
                tensors.append(leaf.detach().resolve_conj().resolve_neg())
                leaves.append(_TENSOR)
            elif type(leaf) is np.ndarray and leaf.dtype.kind in "biufc":
                tensors.append(torch.from_numpy(np.array(leaf)))
                leaves.append(_ARRAY)
            elif type(leaf) in _PLAIN:
                leaves.append([leaf])
            else:
                raise _refused(leaf)
        text = None if nest == self._nest else _text(nest)
        try:
            return tensors, msgspec.msgpack.encode(_Rest(text, leaves))
        except OverflowError:
            raise TaskError(
                "a mini-batch holds a whole number beyond 64 bits, which cannot go from one "
                "module's process to another's; expected inputs= and collate_fn to give tensors"
            ) from None

    def unpack(self, tensors: Sequence[Tensor], rest: bytes) -> Any:
        """The batch again."""
        read = msgspec.msgpack.decode(rest, type=_Rest)
        remaining = iter(tensors)
        leaves: list[Any] = []
        for leaf in read.leaves:
            if isinstance(leaf, list):
                leaves.append(leaf[0])
            else:
                tensor = next(remaining)
                leaves.append(tensor if leaf == _TENSOR else tensor.numpy())
        nest = self._nest if read.nest is None else pytree.treespec_loads(read.nest)
        return pytree.tree_unflatten(leaves, nest)


def copied_batch(batch: Any) -> Any:
    """The batch with tensors in memory of its own, whatever becomes of the memory it lies in."""
    return pytree.tree_map(lambda leaf: copied(leaf) if type(leaf) is Tensor else leaf, batch)


def _text(nest: pytree.TreeSpec) -> str:
    try:
        text = pytree.treespec_dumps(nest)
        is_whole = pytree.treespec_loads(text) == nest
    except (NotImplementedError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise TaskError(
            "the nest of lists, tuples and dicts that holds a mini-batch differs from the first "
            "one's and cannot be written down for another process; expected collate_fn to give "
            "the same nest each time, or dicts with texts as keys"
        )
    return text


def _refused(leaf: Any) -> TaskError:
    return TaskError(
        f"a mini-batch holds a {type(leaf).__name__}, which cannot go from one module's process "
        "to another's; expected tensors, texts, numbers, bytes and None in lists, tuples and "
        "dicts: have inputs= and collate_fn give tensors, or use --engine virtual"
    )
