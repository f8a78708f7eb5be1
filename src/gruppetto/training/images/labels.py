"""Class labels from files, checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from gruppetto.errors import TaskError
from gruppetto.training.images.kinds import ImageKind

__all__ = ["check_labels"]


def check_labels(labels: npt.NDArray[np.int64], kind: ImageKind, path: Path) -> None:
    """Refuse labels that are no class of the dataset.

    Raises:
        TaskError: naming the first of them.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= kind.classes))
    if len(wrong):
        raise TaskError(
            f"{path}: expected class labels 0 to {kind.classes - 1}, got {labels[wrong[0]]} for "
            f"picture {wrong[0]}"
        )
