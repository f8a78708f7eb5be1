"""A model as a chain of blocks, between which it can be cut into modules.

Three ways are tried, and the first whose blocks compute exactly what the model does is taken:

* an ``nn.Sequential`` is its own chain. A Sequential directly in it stays one block, unless more
  blocks are wanted than there are, or a cut names something inside it;
* a model whose attribute ``blocks`` is an ``nn.Sequential`` that is all of it in order;
* torch.fx traces the model, and a block begins wherever a submodule does and exactly one value is
  alive (:mod:`gruppetto.decoupled.tracing`).

A cut is named by the block that begins the next module, with its name in ``named_modules()``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gruppetto.decoupled.pieces import Pieces, WholePieces, sequential_pieces
from gruppetto.decoupled.stage import Inputs, Stage, map_tensors, tensors_of
from gruppetto.decoupled.tracing import CannotTrace, trace
from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.training.randomness import keep_global_randomness
from gruppetto.training.task import Task

__all__ = ["Block", "Chain", "chain_of", "keep_buffers", "model_inputs"]

#: Names that a message lists at most.
_LISTED = 8


@dataclass(frozen=True)
class Block:
    """One link of a chain.

    Args:
        name: of the submodule it begins with, as in ``named_modules()``.
        module: computes it, from what the block before gives.
        traced: a range of a traced graph, not a submodule of the model.
    """

    name: str
    module: nn.Module
    traced: bool = False


class Chain:
    """A model as blocks, one after the other.

    Args:
        pieces: the finest ones.
        walls: why there is no cut before a piece, besides what the pieces say themselves.
        edited: pieces whose input is changed in place by what follows; None if that is unknown.
    """

    def __init__(
        self, pieces: Pieces, walls: dict[int, str], edited: frozenset[int] | None = None
    ) -> None:
        self._pieces = pieces
        self._edited = edited
        self._walls = {i: why for i in range(1, len(pieces)) if (why := pieces.wall(i))}
        self._walls = walls | self._walls
        #: First piece of each block, and the number of pieces.
        self._starts = [i for i in range(len(pieces)) if i not in self._walls]
        bounds = [*self._starts, len(pieces)]
        #: The links, in order.
        self.blocks: tuple[Block, ...] = tuple(
            Block(pieces.name_of(a, b), pieces.build(a, b), pieces.is_traced)
            for a, b in pairwise(bounds)
        )

    @property
    def why_not_more(self) -> str | None:
        """Why there are not more blocks, where a cut between two pieces is impossible."""
        if not self._walls:
            return None
        piece, why = min(self._walls.items())
        return f"no module can begin with {self._pieces.name_of(piece, piece + 1)!r}: {why}"

    def start_of(self, block: int) -> int:
        """The piece that a block begins with."""
        return self._starts[block]

    def has_piece(self, name: str) -> bool:
        """Whether one of its pieces begins there; perhaps no module can."""
        return name in self._pieces.begins

    def has(self, name: str) -> bool:
        """Whether the submodule is part of it, even if no piece begins there."""
        return name in self._pieces.begins or self._pieces.find(name) is not None

    def positions(self, begins: Sequence[str]) -> list[int]:
        """Block numbers, from 0, of the named ones.

        Args:
            begins: the block with which each module but the first begins, in order.

        Raises:
            InvalidSetting: an unknown name, a place that cannot be cut, or another order.
        """
        found: list[int] = []
        for before, name in zip(("", *begins), begins, strict=False):
            position = self._position(name)
            if found and position <= found[-1]:
                raise InvalidSetting(
                    f"cuts: expected names in the order of the network, each once, got {name!r} "
                    f"after {before!r}"
                )
            found.append(position)
        return found

    def stages(self, begins: Sequence[str]) -> list[nn.Module]:
        """The modules of the network cut there; they share the model's submodules.

        See :class:`gruppetto.decoupled.stage.Stage` for what they take and return. Every parameter
        and buffer of the model is in exactly one of them, under the name it has in the model.

        Args:
            begins: the block with which each module but the first begins, in order.

        Raises:
            InvalidSetting: an unknown name, a place that cannot be cut, or another order.
        """
        bounds = [0, *(self._starts[p] for p in self.positions(begins)), len(self._pieces)]
        return [
            self._pieces.build(a, b, self._edited is None or a in self._edited)
            for a, b in pairwise(bounds)
        ]

    def _position(self, name: str) -> int:
        piece = self._pieces.begins.get(name)
        if piece is not None and piece in self._starts:
            if piece == 0:
                raise InvalidSetting(
                    f"cut {name!r}: the first module begins there anyway; expected a later block"
                    f"{self._near(0)}"
                )
            return self._starts.index(piece)
        if piece is not None:
            raise InvalidSetting(f"cut {name!r}: {self._walls[piece]}{self._near(piece)}")
        known = self._pieces.find(name)
        if known is not None:
            raise InvalidSetting(f"cut {name!r}: {known[1]}{self._near(known[0])}")
        valid = [block.name for block in self.blocks[1:]]
        close = difflib.get_close_matches(name, valid, n=_LISTED, cutoff=0.0)
        shown = ", ".join(sorted(close, key=valid.index))
        others = f" and {len(valid) - len(close)} others" if len(valid) > len(close) else ""
        guess = difflib.get_close_matches(name, valid, n=1)
        raise InvalidSetting(
            f"cut {name!r}: the model has no block of that name; valid: {shown or 'none'}{others}"
            + (f" (did you mean {guess[0]!r}?)" if guess else "")
        )

    def _near(self, piece: int) -> str:
        """The valid cuts around a piece, to end a sentence."""
        before = [b.name for s, b in zip(self._starts, self.blocks, strict=True) if 0 < s <= piece]
        after = [b.name for s, b in zip(self._starts, self.blocks, strict=True) if s > piece]
        near = ([f"{before[-1]!r} before it"] if before else []) + (
            [f"{after[0]!r} after it"] if after else []
        )
        if not near:
            return "; nowhere else can it be cut either"
        return f"; the nearest valid cut{'s are' if len(near) == 2 else ' is'} {' and '.join(near)}"


def chain_of(
    model: nn.Module,
    example: Inputs | None,
    cuts: Sequence[str] = (),
    at_least: int = 1,
) -> Chain:
    """A model as a chain of blocks.

    The model is run once on the example and once block by block, in the mode it is in and under
    the same random numbers; its buffers and the global random numbers are given back.

    Args:
        model: to be cut; not changed.
        example: inputs of the model, positional or by keyword, of one mini-batch. Without one,
            blocks are not compared with the model, and modules copy all they receive.
        cuts: names that are to begin a block.
        at_least: blocks that are wanted; Sequentials in the chain are taken apart until there are
            as many.

    Raises:
        InvalidSetting: the model is no chain and cannot be traced; or a cut is impossible.
    """
    wanted = max(at_least, len(cuts) + 1)
    pieces = sequential_pieces(model, cuts, wanted)
    chain = None if pieces is None else _checked(model, pieces, example)
    if chain is None or len(chain.blocks) < wanted or not all(map(chain.has_piece, cuts)):
        why = "its blocks compute something else than it does when it is traced"
        traced = None
        try:
            traced = _checked(model, trace(model, example), example)
        except CannotTrace as error:
            why = f"its forward cannot be traced ({error})"
        chain = _better(chain, traced, cuts)
        if chain is None and wanted > 1:
            raise InvalidSetting(
                f"the model {type(model).__name__} cannot be cut into modules: {why}; make it an "
                "nn.Sequential, or give it an attribute `blocks`, an nn.Sequential that is all of "
                "it in order"
            )
    if chain is None:
        return Chain(WholePieces(model), {})
    chain.positions(cuts)
    return chain


def model_inputs(task: Task, batch: Any) -> Inputs:
    """What the task gives the model for a batch: positional or keyword arguments."""
    taken: list[Inputs] = []

    class Taker(nn.Module):
        def forward(self, *inputs: Any, **named: Any) -> None:
            taken.append(named or inputs)

    task.forward(Taker(), batch)
    return taken[0]


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Give the model's buffers back as they were."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer.copy_(before)  # a module may have put in another


def _checked(model: nn.Module, pieces: Pieces, example: Inputs | None) -> Chain | None:
    """The chain of these pieces; None where it computes something else than the model."""
    walls = _tied(model, pieces)
    chain = Chain(pieces, walls)
    if example is None:
        return chain
    expected = _outputs(model, example)
    try:
        outputs, crossing, edited = _run_blocks(model, chain, example)
    except Exception:  # blocks that do not even fit together
        return None
    if not _are_same(expected, outputs):
        return None
    starts = [chain.start_of(i) for i in range(len(chain.blocks))]
    for start, value in zip(starts[1:], crossing[1:], strict=True):
        if not _can_cross(value):
            walls[start] = (
                f"{_describe(value)} crosses there; expected a tensor of floating-point numbers "
                "or a tuple of tensors with one of them"
            )
    return Chain(pieces, walls, frozenset(starts[i] for i in edited))


def _tied(model: nn.Module, pieces: Pieces) -> dict[int, str]:
    """Why pieces cannot be cut apart that use the same parameter or buffer."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    first: dict[int, tuple[int, str]] = {}
    walls: dict[int, str] = {}
    for piece in range(len(pieces)):
        for tensor, own in pieces.state_of(piece).items():
            earliest, name = first.setdefault(tensor, (piece, own))
            kind = "buffer" if name in buffers else "parameter"
            for between in range(earliest + 1, piece + 1):
                walls.setdefault(between, f"the {kind} {name!r} is used on both sides of it")
    return walls


def _outputs(model: nn.Module, example: Inputs) -> Any:
    with keep_buffers(model), keep_global_randomness(), torch.no_grad():
        try:
            return _call(model, map_tensors(Tensor.clone, example))
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise TaskError(f"the model fails on a mini-batch: {why}") from error


def _run_blocks(
    model: nn.Module, chain: Chain, example: Inputs
) -> tuple[Any, list[Any], list[int]]:
    """Outputs, what enters each block, and the blocks whose input has changed at the end."""
    value: Any = map_tensors(Tensor.clone, example)
    entered: list[Any] = []
    versions: list[list[int]] = []
    with keep_buffers(model), keep_global_randomness(), torch.no_grad():
        for block in chain.blocks:
            entered.append(value)
            versions.append([t._version for t in tensors_of(value)])
            value = block.module(value) if len(entered) > 1 else _call(block.module, value)
        now = [[t._version for t in tensors_of(value)] for value in entered]
    edited = [i for i, (a, b) in enumerate(zip(versions, now, strict=True)) if a != b]
    return value, entered, edited


def _call(module: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, dict):
        # Submodules of a Sequential have other names for the only thing they take.
        is_whole = isinstance(module, Stage) or len(inputs) > 1
        return module(**inputs) if is_whole else module(*inputs.values())
    return module(*inputs)


def _are_same(expected: Any, outputs: Any) -> bool:
    a, b = tensors_of(expected), tensors_of(outputs)
    if type(expected) is not type(outputs) or len(a) != len(b):
        return False
    return all(
        x.shape == y.shape and x.dtype == y.dtype
        # Only a CPU promises the same bits twice.
        and torch.allclose(x, y, **({"rtol": 0, "atol": 0} if x.device.type == "cpu" else {}),
                           equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


def _can_cross(value: Any) -> bool:
    # Masks and other whole numbers may come along; gradients need something to come back for.
    values = value if type(value) is tuple else (value,)
    tensors = [v for v in values if isinstance(v, Tensor)]
    return len(tensors) == len(values) and any(
        t.is_floating_point() or t.is_complex() for t in tensors
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return f"a value of type {type(value).__name__}"


def _better(chain: Chain | None, traced: Chain | None, cuts: Sequence[str]) -> Chain | None:
    """Of the two, the one that has the cuts, or has more to say about them."""
    if chain is None or traced is None:
        return chain or traced
    if all(map(chain.has_piece, cuts)):
        return max(chain, traced, key=lambda c: len(c.blocks))
    return traced if all(map(traced.has, cuts)) else chain
