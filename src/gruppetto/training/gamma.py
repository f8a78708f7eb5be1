"""How far staleness moves the gradient: what γ is estimated from.

γ of Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, §3.2, bounds
E‖∇F(w_j) − ∇F(w_τ)‖² by γ E‖∇F(w_j)‖². Both gradients are of one fixed sample here, so that the
noise of mini-batches does not count as staleness; :mod:`gruppetto.theory.estimates` makes γ̂ of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gruppetto.errors import GruppettoError, RunFailed
from gruppetto.protocols.messages import Contribution
from gruppetto.training.buffers import BufferUpdate
from gruppetto.training.learner import Gradient, Weights
from gruppetto.training.parameters import Flat, Layout, squared_distance, squared_norm
from gruppetto.training.randomness import keep_global_randomness
from gruppetto.training.sample import FixedSample
from gruppetto.training.server import Server
from gruppetto.training.task import Task

__all__ = ["GammaMeter", "GammaServer", "SquaredChanges"]


@dataclass(frozen=True)
class SquaredChanges:
    """What was measured just before an update."""

    #: ‖∇F(w_j) − ∇F(w_τ)‖² of each contribution; exactly 0 for a fresh one.
    changes: tuple[float, ...]
    #: ‖∇F(w_j)‖².
    norm: float


class GammaMeter:
    """Gradients of the mean loss on a fixed sample, in training mode as learners compute theirs.

    BatchNorm uses the statistics of the sample's batches, and dropout draws the same masks each
    time, so that the weights alone make a difference. A replica computes: no buffer of the server
    changes, and the global random numbers are as before afterwards.

    Args:
        task: loss and inputs.
        model: a replica of the server's, in training mode; this object changes it.
        layout: of the flat vector.
        sample: of the training set.
        device: where the model is.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: Layout,
        sample: FixedSample,
        device: torch.device,
    ) -> None:
        self._task = task
        self._model = model
        self._layout = layout
        self._sample = sample
        self._device = device
        self._flat = layout.adopt(model, device)
        parameters = dict(model.named_parameters())
        self._trained = [parameters[slot.name] for slot in layout.slots]
        self._buffers = BufferUpdate(model)

    def gradient(self, weights: Flat, others: dict[str, Tensor]) -> Flat:
        """∇F at some weights.

        Args:
            weights: in the layout.
            others: buffers without a rule, as :class:`Weights` has them.
        """
        self._flat.copy_(weights)
        for parameter in self._model.parameters():
            parameter.grad = None
        with keep_global_randomness():
            for num_samples, batch in self._sample.batches():
                self._buffers.load_others(others)
                outputs = self._task.forward(self._model, batch)
                loss = self._task.compute_loss(outputs, batch)
                (loss * (num_samples / len(self._sample))).backward()  # type: ignore[no-untyped-call]
        made = self._layout.zeros(self._device)
        for view, parameter in zip(self._layout.views(made), self._trained, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad.to_dense())
        return made

    def measure(
        self, now: Weights, contributions: Sequence[Contribution], past: Sequence[Flat]
    ) -> SquaredChanges | None:
        """Compare the gradient at the weights with those at the weights of contributions.

        Args:
            now: w_j, to which the contributions are about to be applied.
            contributions: of the update.
            past: w_τ of each.

        Returns:
            None where a gradient is not finite.
        """
        newest = self.gradient(now.flat, now.others)
        changes = {c.version: 0.0 for c in contributions if c.staleness == 0}
        for contribution, then in zip(contributions, past, strict=True):
            if contribution.version not in changes:
                older = self.gradient(then.to(self._device), now.others)
                changes[contribution.version] = squared_distance(newest, older)
        norm = sum(squared_norm(vector) for vector in newest.vectors)
        if not all(map(math.isfinite, (norm, *changes.values()))):
            return None
        return SquaredChanges(tuple(changes[c.version] for c in contributions), norm)


class GammaServer:
    """Stands between an engine and its server, and measures before some of the updates.

    Args:
        server: takes the updates.
        meter: measures.
    """

    #: Of engines, whatever the server itself needs.
    needs_past = True

    def __init__(self, server: Server, meter: GammaMeter) -> None:
        self._server = server
        self._meter = meter
        #: Whether these contributions, about to be applied, are to be measured.
        self.is_due: Callable[[Sequence[Contribution]], bool] = lambda contributions: False
        #: Around a measurement: a clock that is to stand still meanwhile.
        self.standing_still: Callable[[], AbstractContextManager[None]] = nullcontext
        self._measured: SquaredChanges | None = None

    def apply(
        self,
        contributions: Sequence[Contribution],
        gradients: Sequence[Gradient],
        past: Sequence[Flat] = (),
    ) -> None:
        """Measure if it is due, then take the update."""
        self._measured = None
        if self.is_due(contributions):
            with self.standing_still():
                self._measured = self._measure(contributions, past)
        self._server.apply(contributions, gradients, past if self._server.needs_past else ())

    def snapshot(self) -> Weights:
        """The current version, copied."""
        return self._server.snapshot()

    def publish_to(self, place: Weights) -> None:
        """Copy the current version somewhere."""
        self._server.publish_to(place)

    def take(self) -> SquaredChanges | None:
        """What was measured before the last update, once; None where nothing was."""
        measured, self._measured = self._measured, None
        return measured

    def _measure(
        self, contributions: Sequence[Contribution], past: Sequence[Flat]
    ) -> SquaredChanges | None:
        try:
            return self._meter.measure(self._server.snapshot(), contributions, past)
        except GruppettoError:
            raise
        except Exception as error:
            raise RunFailed(
                f"measuring gamma failed: {type(error).__name__}: {error}",
                {"stopped_by": RunFailed.stopped_by},
            ) from error
