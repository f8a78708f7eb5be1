"""Evaluating a model as every run does it: under a random stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gruppetto.training.buffers import recalibrated_batch_norm
from gruppetto.training.randomness import Stream, seed_everything
from gruppetto.training.task import Task, to_device

__all__ = ["evaluate_model"]


def evaluate_model(
    task: Task,
    model: nn.Module,
    device: torch.device,
    *,
    version: int,
    seed: int,
    recalibration: Sequence[Any] = (),
) -> dict[str, float]:
    """The task's metrics of a model.

    Args:
        task: of the run.
        model: on the device; its mode and its buffers are given back.
        device: where it is.
        version: of the weights, keys the random stream.
        seed: the run's.
        recalibration: batches over which BatchNorm's statistics are averaged anew, for this
            evaluation only.

    Raises:
        TaskError: evaluating fails, or returns something else than a dict of numbers.
    """
    seed_everything(seed, Stream.EVALUATION, version, device)
    if not recalibration:
        return task.measure(model, device)
    with recalibrated_batch_norm(model) as modules:
        if modules:
            with torch.no_grad():
                for batch in recalibration:
                    task.forward(model, to_device(batch, device))
        return task.measure(model, device)
