"""What each block of a chain costs: memory and operations counted, seconds measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gruppetto.decoupled.chain import Chain, keep_buffers, model_inputs
from gruppetto.decoupled.stage import map_tensors, tensors_of
from gruppetto.training.randomness import keep_global_randomness
from gruppetto.training.task import Task

__all__ = [
    "OPERATIONS_PER_BYTE",
    "OPERATIONS_PER_COMPARISON",
    "BlockCost",
    "count_costs",
    "measure_costs",
]

#: Floating-point operations in the time in which a core reads or writes a byte, fitted roughly to
#: the blocks of ResNet-20 on CPUs: activations and normalisations take time, and hardly compute.
OPERATIONS_PER_BYTE: Final = 32.0
#: The same for each number that max-pooling compares: CPUs do that one at a time.
OPERATIONS_PER_COMPARISON: Final = 1500.0

#: ``watch(block, is_forward)`` surrounds a pass of a block.
Watch = Callable[[int, bool], AbstractContextManager[Any]]


@dataclass(frozen=True)
class BlockCost:
    """What one block costs for one mini-batch.

    Args:
        name: of the block.
        parameters: numbers in them.
        parameter_bytes: bytes of them.
        output_bytes: of what the block gives to the next, each way: its gradient is as large. Of
            the last block, of the model's outputs.
        saved_bytes: of the storages that its forward pass keeps for the backward pass, each
            counted once, parameters and buffers not counted.
        operations: of both passes: those of matrix products and convolutions, and what stands for
            the rest: :data:`OPERATIONS_PER_BYTE` for each byte that any operation reads or writes,
            :data:`OPERATIONS_PER_COMPARISON` for each number that max-pooling compares.
        forward, backward: seconds; None if not measured. The last block's include the loss.
        shared_bytes: of ``saved_bytes``, what the block before keeps as well.
    """

    name: str
    parameters: int
    parameter_bytes: int
    output_bytes: int
    saved_bytes: int
    operations: float
    forward: float | None = None
    backward: float | None = None
    shared_bytes: int = 0


def count_costs(
    chain: Chain, task: Task, batch: Any, device: torch.device
) -> tuple[BlockCost, ...]:
    """Count what each block costs; the same each time, without a clock.

    The model's buffers and gradients and the global random numbers are left as they are.

    Args:
        chain: of the model.
        task: its inputs and loss.
        batch: a mini-batch, on the device.
        device: where the model is.

    Raises:
        Exception: whatever the model or the loss raises.
    """
    passes = _Passes(chain, task, batch)
    stages = passes.stages
    operations = [0.0] * len(stages)
    saved: list[dict[int, Tensor]] = [{} for _ in stages]
    # Not what is there anyway.
    kept = {
        tensor.untyped_storage().data_ptr()
        for stage in stages
        for tensor in (*stage.parameters(), *stage.buffers())
        if tensor.layout == torch.strided
    }

    @contextmanager
    def watch(block: int, is_forward: bool) -> Iterator[None]:
        def note(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided:
                place = tensor.untyped_storage().data_ptr()
                if place not in kept:
                    # Held, so that its place is not given to another.
                    saved[block][place] = tensor
            return tensor

        counter = _Operations()
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with counter, hooks if is_forward else nullcontext():
            yield
        operations[block] += counter.total

    sizes = passes.run(watch)
    found = []
    for i, (block, stage) in enumerate(zip(chain.blocks, stages, strict=True)):
        parameters = list(stage.parameters())
        before = saved[i - 1].keys() if i else ()
        found.append(
            BlockCost(
                name=block.name,
                parameters=sum(p.numel() for p in parameters),
                parameter_bytes=sum(p.nbytes for p in parameters),
                output_bytes=sizes[i],
                saved_bytes=sum(t.untyped_storage().nbytes() for t in saved[i].values()),
                operations=operations[i],
                shared_bytes=sum(
                    t.untyped_storage().nbytes() for p, t in saved[i].items() if p in before
                ),
            )
        )
    return tuple(found)


def measure_costs(
    chain: Chain, task: Task, batch: Any, device: torch.device, repeats: int = 5
) -> tuple[BlockCost, ...]:
    """Count, and measure how long each block's passes take.

    Each repeat runs the whole chain forward and backward, so that whatever slows the machine down
    for a moment meets all blocks alike; the shortest time of each pass is taken. Counting comes
    first and warms up.

    Args:
        chain, task, batch, device: see :func:`count_costs`.
        repeats: passes that are measured.
    """
    counted = count_costs(chain, task, batch, device)
    passes = _Passes(chain, task, batch)
    best = {(i, f): float("inf") for i in range(len(counted)) for f in (True, False)}

    @contextmanager
    def watch(block: int, is_forward: bool) -> Iterator[None]:
        _wait_for(device)
        start = time.perf_counter()
        yield
        _wait_for(device)
        taken = time.perf_counter() - start
        best[block, is_forward] = min(best[block, is_forward], taken)

    for _ in range(repeats):
        passes.run(watch)
    return tuple(
        dataclasses.replace(cost, forward=best[i, True], backward=best[i, False])
        for i, cost in enumerate(counted)
    )


class _Passes:
    """Runs the blocks of a chain forward and backward, one at a time."""

    def __init__(self, chain: Chain, task: Task, batch: Any) -> None:
        self.stages: list[nn.Module] = chain.stages([block.name for block in chain.blocks[1:]])
        self._task = task
        self._batch = batch
        self._model = nn.ModuleList(self.stages)

    def run(self, watch: Watch) -> list[int]:
        """Both passes of every block.

        Returns:
            The bytes of each block's outputs.
        """
        # Gradients are returned, not accumulated: those of the model stay as they are.
        with keep_buffers(self._model), keep_global_randomness(), torch.enable_grad():
            return self._run(watch)

    def _run(self, watch: Watch) -> list[int]:
        received: Any = map_tensors(Tensor.clone, model_inputs(self._task, self._batch))
        links: list[tuple[list[Tensor], list[Tensor]] | None] = []
        sizes: list[int] = []
        last = len(self.stages) - 1
        for i, stage in enumerate(self.stages):
            with watch(i, True):
                if i > 0:
                    outputs = stage(received)
                elif isinstance(received, dict):
                    outputs = stage(**received)
                else:
                    outputs = stage(*received)
                result = self._task.compute_loss(outputs, self._batch) if i == last else outputs
            sizes.append(sum(t.nbytes for t in tensors_of(outputs)))
            links.append((tensors_of(received) if i else [], tensors_of(result)))
            if i < last:
                received = map_tensors(_cut_off, outputs)
        self._run_backward(links, watch)
        return sizes

    def _run_backward(
        self, links: list[tuple[list[Tensor], list[Tensor]] | None], watch: Watch
    ) -> None:
        gradients: Sequence[Tensor | None] = [None]  # of the loss: one
        for i in reversed(range(len(self.stages))):
            link, links[i] = links[i], None  # the graph is freed as the pass goes on
            assert link is not None
            inputs, outputs = link
            is_loss = i == len(self.stages) - 1
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if output.requires_grad and (is_loss or gradient is not None)
            ]
            # Masks and other whole numbers that come along have no gradient.
            places = [j for j, tensor in enumerate(inputs) if tensor.requires_grad]
            parameters = [p for p in self.stages[i].parameters() if p.requires_grad]
            needed = [*(inputs[j] for j in places), *parameters]
            found: Sequence[Tensor | None] = [None] * len(needed)
            if pairs and needed:
                tensors, given = zip(*pairs, strict=True)
                with watch(i, False):
                    found = torch.autograd.grad(tensors, needed, given, allow_unused=True)
            else:
                with watch(i, False):
                    pass
            by_place = dict(zip(places, found, strict=False))
            gradients = [by_place.get(j) for j in range(len(inputs))]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is computed, and what is read and written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        if func._overloadpacket is torch.ops.aten.max_pool2d_with_indices:
            window = args[1] if len(args[1]) == 2 else (args[1][0], args[1][0])
            compared = result[0].numel() * window[0] * window[1]
            self.total += OPERATIONS_PER_COMPARISON * compared
        if not _is_view(func):
            touched = tensors_of([args, kwargs, result])
            dense = [t for t in touched if t.layout == torch.strided]  # others have no one size
            self.total += OPERATIONS_PER_BYTE * sum(t.nbytes for t in dense)
        return result


def _is_view(operation: Any) -> bool:
    """Whether it only looks at its input in another way, and moves nothing."""
    infos = [value.alias_info for value in operation._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _cut_off(tensor: Tensor) -> Tensor:
    can_have_gradient = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(can_have_gradient)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
