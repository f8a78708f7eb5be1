"""Cutting a model whose ``forward`` is code: its graph, as torch.fx traces it.

A module may begin where a submodule of the model does, if exactly one value is alive there:
within a skip connection there are two, and so a residual block is never cut.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from gruppetto.decoupled.stage import Inputs, Stage, holder_of, place
from gruppetto.errors import GruppettoError

__all__ = ["CannotTrace", "TracedPieces", "TracedStage", "trace"]


class CannotTrace(GruppettoError):
    """The model's own ``forward`` depends on values, or does what tracing does not know."""


def trace(model: nn.Module, example: Inputs | None) -> TracedPieces:
    """The graph of a model, as pieces that begin where its submodules do.

    A submodule whose code cannot be traced is kept as one step. The model is traced as it is, in
    training mode or not. Tracing works on a copy: whatever its code keeps is not kept in the model.

    Args:
        model: whose graph it is.
        example: its inputs, positional or by keyword; None for all that have no default.

    Raises:
        CannotTrace: the model's own ``forward`` cannot be traced.
    """
    leaves: set[str] = set()
    while True:
        tracer = None
        try:
            replica = copy.deepcopy(model)
            tracer = _Tracer(frozenset(leaves), example)
            graph = tracer.trace(replica)
        except Exception as error:
            innermost = tracer.open[-1] if tracer is not None and tracer.open else None
            if innermost is None or innermost in leaves:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise CannotTrace(why) from error
            leaves.add(innermost)
        else:
            return TracedPieces(model, graph, tracer.calls, replica)


class _Tracer(fx.Tracer):
    """Notes where every submodule begins and ends.

    Args:
        leaves: names of submodules that are one step each, besides those of torch.nn.
        example: see :func:`trace`.
    """

    #: ``self.mask[:n]`` in a forward is an operation on the buffer, not a constant of today.
    proxy_buffer_attributes = True

    def __init__(self, leaves: frozenset[str], example: Inputs | None) -> None:
        super().__init__()
        self._leaves = leaves
        self._example = example
        #: Submodules begun and not finished; after a failure, the last one is where it was.
        self.open: list[str] = []
        #: Name, first node and the one after the last.
        self.calls: list[tuple[str, int, int]] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = self.path_of_module(m)
        self.open.append(name)
        begin = len(self.graph.nodes)
        result = super().call_module(m, forward, args, kwargs)
        self.calls.append((name, begin, len(self.graph.nodes)))
        self.open.pop()
        return result

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Placeholders for the arguments of the example only; the others keep their defaults."""
        signature = inspect.signature(root_fn)
        if self._example is None:
            needed = [p for p in list(signature.parameters.values())[1:] if p.default is p.empty]
            bound = signature.bind(self.root, *[None for p in needed if p.kind != p.VAR_KEYWORD])
        elif isinstance(self._example, dict):
            bound = signature.bind(self.root, **self._example)
        else:
            bound = signature.bind(self.root, *self._example)
        for name, value in list(bound.arguments.items())[1:]:
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                proxies: Any = tuple(self._input(f"{name}_{i}") for i in range(len(value)))
            elif kind is inspect.Parameter.VAR_KEYWORD:
                proxies = {key: self._input(key) for key in value}
            else:
                proxies = self._input(name)
            bound.arguments[name] = proxies
        return (lambda: root_fn(*bound.args, **bound.kwargs)), []

    def _input(self, name: str) -> fx.Proxy:
        return self.create_proxy("placeholder", name, (), {})


class TracedStage(Stage):
    """A range of a graph.

    Args:
        copies_input: see :class:`Stage`.
    """

    def __init__(self, copies_input: bool = False) -> None:
        super().__init__(copies_input)
        self._function: Any = None

    def compute(self, graph: fx.Graph) -> None:
        """Run this graph from now on; all that it names is in place."""
        # Only the function is kept: a GraphModule would have names and an order of its own.
        self._function = type(fx.GraphModule(self, graph)).forward

    def _run(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self._function(self, *inputs, **named)


class TracedPieces:
    """A graph in pieces; piece i begins with the i-th place where a submodule does.

    Args:
        model: whose submodules the nodes name.
        graph: of the whole model.
        calls: name, first node, and the one after the last, of every call of a submodule.
        replica: the copy that was traced, which has the constants that tracing made.
    """

    is_traced = True

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        calls: list[tuple[str, int, int]],
        replica: nn.Module,
    ) -> None:
        self._model = model
        self._replica = replica
        self._nodes = list(graph.nodes)
        self._calls = [call for call in calls if call[1] < call[2]]
        times = Counter(name for name, *_ in self._calls)
        # Where a submodule that runs twice begins cannot be told by its name.
        once = [call for call in self._calls if times[call[0]] == 1]
        self._starts = sorted({begin for _, begin, _ in once})[1:]
        self._starts = [0, *self._starts, len(self._nodes)]
        place_of = {node: i for i, node in enumerate(self._nodes)}
        self._last_use = {n: max((place_of[u] for u in n.users), default=-1) for n in self._nodes}
        #: Name -> the piece that begins there, of every submodule that runs once.
        self.begins = {name: self._piece_at(begin) for name, begin, _ in once}
        self._ends = {name: end for name, _, end in once}
        self._by_name = dict(_state(model, remove_duplicate=False))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def name_of(self, start: int, stop: int) -> str:
        """The outermost submodule that begins with a piece and is over before another."""
        end = self._starts[stop]
        here = [name for name, at in self.begins.items() if at == start]
        fitting = [name for name in here if self._ends[name] <= end]
        if fitting:
            return max(fitting, key=lambda name: self._ends[name])
        return min(here, key=lambda name: self._ends[name]) if here else "model"

    def wall(self, piece: int) -> str | None:
        """Why no module can begin with a piece; None where it can."""
        count = len(self._alive(piece))
        if count == 1:
            return None
        return f"{count} values are needed across it, as inside a skip connection"

    def find(self, name: str) -> tuple[int, str] | None:
        """The piece that a submodule is in without beginning it, and why it begins none."""
        for known, begin, _ in self._calls:
            if name == known:
                return self._piece_at(begin), "it runs more than once"
        if name not in dict(self._model.named_modules()):
            return None
        # Calls are noted as they end, so the innermost that it is in comes first.
        for known, begin, _ in self._calls:
            if name.startswith(f"{known}."):
                return self._piece_at(begin), f"it lies inside {known!r}, which runs as one"
        return None

    def state_of(self, piece: int) -> dict[int, str]:
        """Identity -> name of the parameters and buffers that a piece uses."""
        found: dict[int, str] = {}
        for node in self._range(piece, piece + 1):
            for name, tensor in self._tensors_of(node):
                found.setdefault(id(tensor), name)
        return found

    def build(self, start: int, stop: int, copies_input: bool = False) -> Stage:
        """The pieces from ``start`` to before ``stop`` as a module."""
        graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()

        def find(node: fx.Node) -> fx.Node:
            if node not in copied and node.op == "get_attr":
                copied[node] = graph.node_copy(node)
            return copied[node]

        if start > 0:
            (received,) = self._alive(start)
            copied[received] = graph.placeholder("received")
        for node in self._range(start, stop):
            if node.op == "output":
                graph.output(fx.map_arg(node.args[0], find))
            elif node.op != "get_attr":  # those are copied where they are used
                copied[node] = graph.node_copy(node, find)
        if stop < len(self):
            (sent,) = self._alive(stop)
            graph.output(find(sent))
        stage = TracedStage(copies_input)
        self._fill(stage, graph, is_last=stop == len(self))
        stage.compute(graph)
        return stage

    def _fill(self, stage: Stage, graph: fx.Graph, *, is_last: bool) -> None:
        """Put what the nodes name into a stage, in the model's order."""
        named = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
        if is_last:  # so that everything is somewhere: what no node uses comes last
            used = {id(t) for node in self._nodes for _, t in self._tensors_of(node)}
            named |= {name for name, t in _state(self._model) if id(t) not in used}
        for name, module in self._model.named_modules(remove_duplicate=False):
            if name in named:
                place(stage, name, module)
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for last, tensor in own:
                full = f"{name}.{last}" if name else last
                if full not in named:
                    continue
                if isinstance(tensor, nn.Parameter):
                    place(stage, full, tensor)
                else:
                    holder, _ = holder_of(stage, full)
                    persistent = last not in module._non_persistent_buffers_set
                    if not hasattr(holder, last):
                        holder.register_buffer(last, tensor, persistent)
        for name in named:
            holder, last = holder_of(stage, name)
            if not hasattr(holder, last):  # a tensor that is no buffer, or one that tracing made
                source, _ = holder_of(self._replica, name)
                setattr(holder, last, getattr(source, last))

    def _piece_at(self, node: int) -> int:
        return max(i for i, start in enumerate(self._starts[:-1]) if start <= node)

    def _range(self, start: int, stop: int) -> list[fx.Node]:
        return self._nodes[self._starts[start] : self._starts[stop]]

    def _alive(self, piece: int) -> list[fx.Node]:
        """Values made before a piece and used in it or after; parameters are no values."""
        at = self._starts[piece]
        return [n for n in self._nodes[:at] if n.op != "get_attr" and self._last_use[n] >= at]

    def _tensors_of(self, node: fx.Node) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers that a node uses, with their names."""
        if node.op == "call_module":
            name = str(node.target)
            for last, tensor in _state(self._model.get_submodule(name)):
                yield f"{name}.{last}", tensor
        for given in node.all_input_nodes:
            if given.op == "get_attr":
                name = str(given.target)
                if name in self._by_name:
                    yield name, self._by_name[name]


def _state(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)
