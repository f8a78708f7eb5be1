"""What a task needs to know of a model: how it is built, and how it is trained by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

__all__ = ["ImageModel"]


@dataclass(frozen=True)
class ImageModel:
    """A classifier of small pictures.

    Args:
        build: ``build(channels, size, classes)`` makes it, for pictures [N, channels, size, size];
            it draws its initial weights from torch's global generator.
        summary: one line.
        optimizer, batch_size, epochs: defaults of the tasks that train it.
        augment: colour pictures are cropped and flipped at random by default.
        preprocessing: ``standardise``: each channel has mean 0 and deviation 1 over the training
            set; ``subtract-mean``: values 0 to 255 less each pixel's mean over the training set.
        param_groups: as in :class:`gruppetto.training.task.Task`.
        only: the (channels, size) of the only pictures it can take; None for any.
    """

    build: Callable[[int, int, int], nn.Module]
    summary: str
    optimizer: str
    batch_size: int
    epochs: float
    augment: bool = False
    preprocessing: Literal["standardise", "subtract-mean"] = "standardise"
    param_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    only: tuple[int, int] | None = None
