"""The progress of a run: its loss on a fixed sample of the training set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from gruppetto.errors import GruppettoError, TaskError
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.randomness import Stream, keep_global_randomness
from gruppetto.training.sample import FixedSample
from gruppetto.training.task import Task

__all__ = ["SAMPLE_SIZE", "ProgressLoss"]

#: Samples that progress is measured on, at most.
SAMPLE_SIZE: Final = 1024


class ProgressLoss:
    """Mean loss of a model on min(1024, N) of its N training samples, always the same ones.

    See :class:`FixedSample`. The model is in eval mode and without gradients. It is as before
    afterwards, buffers included, and so are the global random numbers.

    Args:
        task: data and loss.
        model: the server's, whose weights change under it.
        mini_batches: of the run.
        seed: the run's.
        device: where the model is.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        mini_batches: MiniBatches,
        seed: int,
        device: torch.device,
    ) -> None:
        self._task = task
        self._model = model
        self._sample = FixedSample(task, mini_batches, SAMPLE_SIZE, seed, Stream.PROGRESS, device)
        #: Indices of the samples, shape [min(1024, N)].
        self.indices = self._sample.indices

    def __call__(self) -> float | None:
        """Measure at the current weights.

        Returns:
            The mean over the samples; None where it is infinite or not a number.

        Raises:
            TaskError: the task's data, model or loss fails.
        """
        was_training = self._model.training
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        self._model.eval()
        try:
            with torch.no_grad(), keep_global_randomness():
                total = sum(n * loss for n, loss in self._losses())
        except GruppettoError:
            raise
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise TaskError(
                f"measuring the loss on {len(self.indices)} training samples failed: {why}"
            ) from error
        finally:
            self._model.train(was_training)
            for buffer, before in buffers:
                buffer.copy_(before)
        mean = total / len(self.indices)
        return mean if math.isfinite(mean) else None

    def _losses(self) -> Iterator[tuple[int, float]]:
        """Number of samples and mean loss of one batch after the other."""
        for num_samples, batch in self._sample.batches():
            outputs = self._task.forward(self._model, batch)
            yield num_samples, float(self._task.compute_loss(outputs, batch))
