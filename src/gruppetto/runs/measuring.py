"""Measurements of progress, for runs whose protocol asks for them."""

from __future__ import annotations

import torch

from gruppetto.engines.measuring import Measuring
from gruppetto.errors import RunFailed, TaskError
from gruppetto.protocols import PROTOCOLS
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.parts import Parts
from gruppetto.training.progress import ProgressLoss

__all__ = ["measuring_of", "progress_loss"]


def progress_loss(parts: Parts) -> ProgressLoss | None:
    """What measures the server's weights; None where the protocol does not ask for it."""
    if PROTOCOLS.parse(parts.settings.protocol).measures_every is None:
        return None
    server, device = parts.server, torch.device(parts.settings.device)
    return ProgressLoss(server.task, server.model, parts.mini_batches, parts.settings.seed, device)


def measuring_of(parts: Parts, folder: RunFolder) -> Measuring | None:
    """When and how the engine measures; None where the protocol does not ask for it.

    What it does raises RunFailed where the task fails: the run cannot go on without.
    """
    interval = PROTOCOLS.parse(parts.settings.protocol).measures_every
    measured = progress_loss(parts)
    if interval is None or measured is None:
        return None

    def measure() -> float | None:
        try:
            return measured()
        except TaskError as error:
            raise RunFailed(
                f"{error}; the run is in {folder.path}",
                {"run": str(folder.path), "stopped_by": RunFailed.stopped_by},
            ) from error

    return Measuring(interval, measure)
