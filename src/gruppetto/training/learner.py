"""A learner: weights + mini-batch -> gradient. No processes, no clock."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gruppetto.errors import GruppettoError
from gruppetto.training.buffers import BufferUpdate
from gruppetto.training.packing import GradientSpace, Weights
from gruppetto.training.parameters import Flat, Layout
from gruppetto.training.randomness import Stream, seed_everything
from gruppetto.training.task import Task, to_device

__all__ = ["FetchesMiniBatches", "Gradient", "Learner", "NotFinite", "Weights"]


class FetchesMiniBatches(Protocol):
    """Where mini-batches come from: the run's stream itself, or something that reads ahead."""

    def fetch(self, mini_batch: int, device: torch.device) -> tuple[Any, int]:
        """The batch, on the CPU, and its number of samples."""
        ...


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a learner pushes."""

    flat: Flat
    #: Slots that had no gradient.
    absent: frozenset[int]
    #: News of the buffers, see :class:`BufferUpdate`.
    news: dict[str, dict[str, Tensor]]
    #: Mean over the samples; finite.
    loss: float
    num_samples: int

    def to(self, device: torch.device) -> Gradient:
        """The same on a device; itself where it is there already."""
        flat = Flat([vector.to(device) for vector in self.flat.vectors])
        news = {m: {n: t.to(device) for n, t in ts.items()} for m, ts in self.news.items()}
        return Gradient(flat, self.absent, news, self.loss, self.num_samples)


class NotFinite(GruppettoError):
    """The loss or the gradient of a mini-batch is infinite or not a number."""


class Learner:
    """Computes gradients with a model of its own.

    Args:
        task: inputs and loss.
        model: a replica of the server's, in training mode; this object changes it.
        layout: of the flat vector.
        mini_batches: of the run.
        seed: the run's.
        device: where the model is.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: Layout,
        mini_batches: FetchesMiniBatches,
        seed: int,
        device: torch.device,
    ) -> None:
        self._task = task
        self._model = model
        self._layout = layout
        self._mini_batches = mini_batches
        self._seed = seed
        self._device = device
        self._flat = layout.adopt(model, device)
        #: Gradients are gathered here; its views are made once.
        self._gathered = layout.zeros(device)
        self._views = layout.views(self._gathered)
        parameters = dict(model.named_parameters())
        self._trained = [parameters[slot.name] for slot in layout.slots]
        self._parameters = list(parameters.values())
        self._buffers = BufferUpdate(model)
        self._warned_sparse = False

    def read_from(self, mini_batches: FetchesMiniBatches) -> None:
        """Get mini-batches from somewhere else: the same samples, perhaps earlier."""
        self._mini_batches = mini_batches

    def compute(
        self, mini_batch: int, weights: Weights, space: GradientSpace | None = None
    ) -> Gradient:
        """The gradient of a mini-batch's mean loss at some weights.

        Args:
            mini_batch: its number.
            weights: a version; read, not kept.
            space: where the gradient is written; None for memory of its own.

        Raises:
            NotFinite: the loss or the gradient is not finite.
            Exception: whatever the user's data, model or loss raises.
        """
        # Neither the flat vector nor a buffer records gradients: no need to say no_grad.
        self._flat.copy_(weights.flat)
        self._buffers.load_others(weights.others)
        self._buffers.prepare()
        for parameter in self._parameters:
            parameter.grad = None
        batch, num_samples = self._mini_batches.fetch(mini_batch, self._device)
        if self._device.type != "cpu":  # datasets give CPU tensors
            batch = to_device(batch, self._device)
        seed_everything(self._seed, Stream.FORWARD, mini_batch, self._device)
        outputs = self._task.forward(self._model, batch)
        loss = self._task.compute_loss(outputs, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return self._collect(loss.item(), num_samples, weights, space)

    def _collect(
        self, loss: float, num_samples: int, weights: Weights, space: GradientSpace | None
    ) -> Gradient:
        targets, sources, absent = [], [], []
        views = self._views if space is None else space.views
        for index, (view, parameter) in enumerate(zip(views, self._trained, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                absent.append(index)
                view.zero_()
                continue
            if gradient.is_sparse:
                gradient = self._densify(gradient)
            targets.append(view)
            sources.append(gradient)
        torch._foreach_copy_(targets, sources)
        flat = self._gathered.clone() if space is None else space.flat
        if loss - loss != 0.0 or not flat.is_finite():
            raise NotFinite(f"loss {loss}")
        news = self._buffers.collect(weights.others)
        missing = frozenset(absent)
        if space is not None:
            space.write(missing, news)
        return Gradient(flat, missing, news, loss, num_samples)

    def _densify(self, gradient: Tensor) -> Tensor:
        if not self._warned_sparse:
            self._warned_sparse = True
            warnings.warn(
                "sparse gradients are made dense: they travel and are summed as full vectors",
                stacklevel=2,
            )
        return gradient.to_dense()
