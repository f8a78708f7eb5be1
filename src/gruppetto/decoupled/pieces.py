"""The finest pieces of a model that blocks are made of, and those of models that run in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from gruppetto.decoupled.stage import SequentialStage

__all__ = ["Pieces", "SequentialPieces", "WholePieces", "sequential_pieces"]


class Pieces(Protocol):
    """What a chain is made of: the finest pieces in order, not all of which can be cut apart."""

    #: Whether it is a traced graph.
    is_traced: bool
    #: Name -> the piece that begins with it; several names may begin one piece.
    begins: dict[str, int]

    def __len__(self) -> int: ...

    def name_of(self, start: int, stop: int) -> str:
        """What the pieces from ``start`` to before ``stop`` are called together."""
        ...

    def wall(self, piece: int) -> str | None:
        """Why there is no cut before a piece; None where there can be one."""
        ...

    def find(self, name: str) -> tuple[int, str] | None:
        """The piece that a submodule is in without beginning it, and why it begins none."""
        ...

    def state_of(self, piece: int) -> dict[int, str]:
        """Identity -> name of the parameters and buffers that a piece uses."""
        ...

    def build(self, start: int, stop: int, copies_input: bool = False) -> nn.Module:
        """The pieces from ``start`` to before ``stop`` as a module."""
        ...


class SequentialPieces:
    """Submodules that run one after the other, with their names in the model.

    Args:
        entries: names and submodules.
        opened: of a Sequential that was taken apart, the name -> that of its first child.
    """

    is_traced = False

    def __init__(
        self, entries: Sequence[tuple[str, nn.Module]], opened: Mapping[str, str] | None = None
    ) -> None:
        self._entries = list(entries)
        self.begins = {name: i for i, (name, _) in enumerate(entries)}
        for outer, inner in reversed(list((opened or {}).items())):  # the inmost first
            self.begins[outer] = self.begins[inner]

    def __len__(self) -> int:
        return len(self._entries)

    def name_of(self, start: int, stop: int) -> str:
        return self._entries[start][0]

    def wall(self, piece: int) -> str | None:
        return None

    def find(self, name: str) -> tuple[int, str] | None:
        for i, (known, module) in enumerate(self._entries):
            inner = name.removeprefix(f"{known}.")
            if inner != name and inner in dict(module.named_modules()):
                return i, f"it lies inside {known!r}, which runs as one"
        return None

    def state_of(self, piece: int) -> dict[int, str]:
        name, module = self._entries[piece]
        own = (*module.named_parameters(), *module.named_buffers())
        return {id(tensor): f"{name}.{last}" for last, tensor in own}

    def build(self, start: int, stop: int, copies_input: bool = False) -> nn.Module:
        return SequentialStage(self._entries[start:stop], copies_input)


class WholePieces(SequentialPieces):
    """A model that cannot be cut: its own only module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([("model", model)])

    def build(self, start: int, stop: int, copies_input: bool = False) -> nn.Module:
        return self._entries[0][1]


def sequential_pieces(
    model: nn.Module, cuts: Sequence[str], wanted: int
) -> SequentialPieces | None:
    """The pieces of an ``nn.Sequential``, or of a model whose ``blocks`` is all of it.

    Args:
        model: whose pieces they are.
        cuts: names that are to begin a piece, where that takes an inner Sequential apart.
        wanted: pieces, for which inner Sequentials are taken apart, too.

    Returns:
        The pieces, which nobody has run yet; None for any other model.
    """
    blocks = getattr(model, "blocks", None)
    if _is_plain(model):
        entries = _children(model)
    elif isinstance(blocks, nn.Module) and _is_plain(blocks) and _is_all(blocks, model):
        entries = [(f"blocks.{name}", child) for name, child in _children(blocks)]
    else:
        return None
    opened: dict[str, str] = {}
    while True:
        is_short = len(entries) < wanted
        more = {
            name: [(f"{name}.{last}", child) for last, child in _children(module)]
            for name, module in entries
            if _is_plain(module) and (is_short or any(c.startswith(f"{name}.") for c in cuts))
        }
        if not more:
            return SequentialPieces(entries, opened)
        opened |= {name: children[0][0] for name, children in more.items()}
        entries = [e for name, module in entries for e in more.get(name, [(name, module)])]


def _is_plain(module: nn.Module) -> bool:
    """Whether it runs its children one after the other and does nothing else."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and len(module) > 0
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
    )


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    # named_children leaves out the second place of a module that stands at two.
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _is_all(blocks: nn.Module, model: nn.Module) -> bool:
    """Whether every parameter and buffer of the model is inside."""
    inside = {id(t) for t in (*blocks.parameters(), *blocks.buffers())}
    return all(id(t) in inside for t in (*model.parameters(), *model.buffers()))
