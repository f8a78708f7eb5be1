"""What a module takes of memory: counted for one mini-batch, predicted for a run. No clock.

Counts are the same every time: they follow from shapes. How a process's memory is made of them is
said, with what was measured beside it, in ``docs/decoupled.md``, section "Memory".
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gruppetto.decoupled.methods import Keeps
from gruppetto.decoupled.stage import tensors_of

__all__ = ["ForwardCount", "StageBytes", "bytes_in_flight", "gaps", "process_bytes"]

#: What a pass has at once and does not keep, in tensors as large as the module's largest. Backward,
#: in a residual block: the gradients of its shortcut, of a normalisation and of a convolution's
#: input, and one more that a convolution reorders.
_PASSING: Final = 4
#: Vectors as long as the module's weights that an update needs beside them: gradients as they come
#: and in one piece, two of the optimizer's state (Adam's), one of the step itself.
_VECTORS: Final = 5
#: The GNU library leaves what is smaller to its small change, and maps what is larger for itself.
_SMALLEST, _LARGEST = 1 << 17, 1 << 25


@dataclass(frozen=True)
class StageBytes:
    """What one full mini-batch takes in one module, in bytes."""

    #: What lies between its passes: inputs, outputs and what autograd saves, each storage counted
    #: once; parameters and buffers not counted.
    graph: int = 0
    #: Left unused beside it, see :func:`gaps`.
    gaps: int = 0
    #: The largest tensor that the forward pass takes or makes.
    largest: int = 0
    #: What the module takes and gives.
    inputs: int = 0
    outputs: int = 0
    #: Samples and labels, in the modules that need them: the first and the last.
    batch: int = 0
    #: One copy of the module's trained weights.
    weights: int = 0


def bytes_in_flight(sizes: StageBytes, keeps: Keeps, delay: int) -> int:
    """What a module's mini-batches in flight take at most: at the start of a backward pass.

    (d + 1) graphs and copies of weights; or (d + 1) inputs and the one graph that is made again;
    or without a delay one graph.

    Args:
        sizes: of the module.
        keeps: between the passes of a mini-batch.
        delay: d of the module.

    >>> sizes = StageBytes(graph=100, inputs=10, weights=1)
    >>> [bytes_in_flight(sizes, "graph-on-copy", d) for d in (0, 1, 2)]
    [100, 202, 303]
    >>> [bytes_in_flight(sizes, "input", d) for d in (0, 1, 2)]
    [100, 120, 130]
    """
    if delay == 0:
        return sizes.graph
    if keeps == "input":
        return sizes.graph + (delay + 1) * sizes.inputs
    # Also where the graph is on the live weights: what a checkpoint makes it again from.
    return (delay + 1) * (sizes.graph + sizes.weights)


def process_bytes(
    sizes: StageBytes, keeps: Keeps, delay: int, ahead: int, *, leaves_gaps: bool
) -> int:
    """What a module's process takes at most beyond what it has when it is ready, rings not counted.

    To what is in flight come the gradient that was received, what the backward pass makes, what an
    update needs, and a mini-batch on its way in.

    Args:
        sizes, keeps, delay: see :func:`bytes_in_flight`.
        ahead: delay of the module less that of the next one: its outputs that the next module has
            not taken when both have applied as much.
        leaves_gaps: memory is managed by the C library, and not by CUDA's caching allocator.

    >>> sizes = StageBytes(graph=100, gaps=50, largest=20, inputs=10, outputs=10, weights=1)
    >>> process_bytes(sizes, "graph-on-copy", 1, 1, leaves_gaps=False) - (202 + 10 + 4 * 20 + 5)
    0
    >>> process_bytes(sizes, "graph-on-copy", 1, 1, leaves_gaps=True) - (302 + 10 + 4 * 20 + 5)
    0
    """
    replays = delay > 0 and keeps == "input"
    graphs = 1 if replays else delay + 1
    total = bytes_in_flight(sizes, keeps, delay)
    total += sizes.outputs + _PASSING * sizes.largest + _VECTORS * sizes.weights + sizes.batch
    if replays:
        total += ahead * sizes.outputs  # elsewhere they are part of the graph
    if leaves_gaps:
        total += graphs * sizes.gaps
        if replays:  # what a forward pass without a graph has used lies between what it keeps
            total += _PASSING * sizes.largest
    return total


def gaps(made: Iterable[tuple[int, bool]]) -> int:
    """Bytes that a pass leaves free between those it keeps, where the C library cannot use them.

    Torch asks for memory at multiples of 64 bytes, and for that the GNU library takes a piece that
    is a little larger and gives back both ends. So what was freed between two pieces that are kept
    never fits a tensor of the same size, only smaller ones; it is lost until its neighbours are
    free, too. Pieces of 32 MiB and more are mapped by themselves and leave nothing.

    Args:
        made: by the pass, in order: bytes, and whether it is kept.

    >>> mib = 2**20
    >>> gaps([(8 * mib, True), (8 * mib, False), (8 * mib, True)]) // mib
    8
    >>> gaps([(8 * mib, False), (4 * mib, True), (4 * mib, True)]) // mib
    4
    """
    free: list[int] = []
    for size, is_kept in made:
        if not _SMALLEST <= size < _LARGEST:
            continue
        place = bisect.bisect_right(free, size)
        if place < len(free):
            bisect.insort(free, free.pop(place) - size)
        if not is_kept:
            bisect.insort(free, size)
    return sum(free)


class ForwardCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the forward pass of a stage makes and keeps; a context to run it in.

    Args:
        not_counted: parameters and buffers.
        inputs: of the stage, which stay until the backward pass.
    """

    def __init__(self, not_counted: Iterable[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._not_counted = {p for t in not_counted if (p := _address(t))}
        #: Storages in the order in which they were seen; the newest at each address.
        self._sizes: list[int] = []
        self._newest: dict[int, int] = {}
        #: Those that are kept, and a tensor of each, so that no address is counted for two.
        self._kept: dict[int, Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)
        for tensor in inputs:
            self.keep(tensor)

    def __enter__(self) -> ForwardCount:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_address(tensor) for tensor in tensors_of([args, kwargs])}
        for tensor in tensors_of(result):
            address = _address(tensor)
            if address and address not in given:  # neither a view nor changed in place
                self._note(address, tensor)
        return result

    def keep(self, tensor: Tensor) -> Tensor:
        """It stays until the backward pass."""
        address = _address(tensor)
        if address and address not in self._not_counted:
            if address not in self._newest:
                self._note(address, tensor)
            self._kept[self._newest[address]] = tensor.detach()
        return tensor

    def _note(self, address: int, tensor: Tensor) -> None:
        self._newest[address] = len(self._sizes)
        self._sizes.append(tensor.untyped_storage().nbytes())

    @property
    def graph(self) -> int:
        """See :class:`StageBytes`."""
        return sum(self._sizes[index] for index in self._kept)

    @property
    def gaps(self) -> int:
        """See :class:`StageBytes`."""
        return gaps((size, index in self._kept) for index, size in enumerate(self._sizes))

    @property
    def largest(self) -> int:
        """See :class:`StageBytes`."""
        return max(self._sizes, default=0)


def _address(tensor: Tensor) -> int:
    """Of its storage; 0 where it has none of its own."""
    if tensor.layout != torch.strided:
        return 0
    return int(tensor.untyped_storage().data_ptr())
