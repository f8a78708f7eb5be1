"""Modules of a cut network: pieces of a model run one after the other, under the model's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["Inputs", "SequentialStage", "Stage", "map_tensors", "place", "tensors_of"]

T = TypeVar("T")
#: What a model takes: positional or keyword arguments.
Inputs = tuple[Any, ...] | dict[str, Any]


def map_tensors(function: Callable[[Tensor], Tensor], value: T) -> T:
    """The same nest of tuples, lists and dicts, with every tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]
    if isinstance(value, dict):
        return type(value)((k, map_tensors(function, v)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(map_tensors(function, v) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, v) for v in value)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def place(root: nn.Module, name: str, value: nn.Module | nn.Parameter) -> None:
    """Make a submodule or a parameter known under its dotted name; what is there already stays."""
    owner, last = holder_of(root, name)
    if last not in owner._modules and last not in owner._parameters:
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.add_module(last, value)


def holder_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds what a dotted name names, made where it is missing; the last part."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, last


class Stage(nn.Module):
    """One of the K modules of a network that was cut.

    It holds the model's own submodules, not copies, under the names they have in the model, so
    that ``named_parameters`` gives the model's names. ``copy.deepcopy`` makes a replica.

    The first one takes what the model takes. Every other one takes one argument: what the one
    before returned, a tensor or a tuple of tensors. The last one returns the model's outputs.

    Args:
        copies_input: the first operations may change their input in place; tensors are copied
            before, so that what was received stays as it was. The bits are the same.
    """

    def __init__(self, copies_input: bool = False) -> None:
        super().__init__()
        self._copies_input = copies_input

    def _run(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute the outputs; inputs may be changed in place."""
        raise NotImplementedError

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Outputs of the last piece."""
        if self._copies_input:
            inputs = map_tensors(Tensor.clone, inputs)
            named = map_tensors(Tensor.clone, named)
        return self._run(inputs, named)


class SequentialStage(Stage):
    """Submodules that take one argument and return one value, one after the other.

    Args:
        entries: their names in the model, and they themselves.
        copies_input: see :class:`Stage`.
    """

    def __init__(
        self, entries: Sequence[tuple[str, nn.Module]], copies_input: bool = False
    ) -> None:
        super().__init__(copies_input)
        for name, module in entries:
            place(self, name, module)
        # A list is not registered: the names of parameters are those in the model only.
        self._steps = [module for _, module in entries]

    def _run(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        (value,) = (*inputs, *named.values())
        for step in self._steps:
            value = step(value)
        return value
