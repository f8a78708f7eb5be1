"""A folder -> all its pictures and labels, whichever of the known layouts it has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gruppetto.errors import TaskError
from gruppetto.training.images import torchvision
from gruppetto.training.images.kinds import MNIST, ImageKind, Split

__all__ = ["describe_layouts", "read_images"]


def describe_layouts(kind: ImageKind) -> str:
    """The files a folder may hold, for messages."""
    folder = torchvision.MNIST_FOLDER if kind == MNIST else torchvision.CIFAR10_FOLDER
    return f"train.parquet and test.parquet (or train-*.parquet and test-*.parquet), or {folder}/"


def read_images(folder: str | Path, kind: ImageKind, split: Split) -> tuple[Tensor, Tensor]:
    """Read and decode all pictures of a split.

    The hub's parquet files are looked for first, then torchvision's files.

    Args:
        folder: holds the files, or is torchvision's inner folder itself.
        kind: what the pictures must look like.
        split: ``"train"`` or ``"test"``.

    Returns:
        Pixels, uint8 [N, C, H, W], and class labels, int64 [N].

    Raises:
        TaskError: no such folder, none of the known files in it, or a file that cannot be read,
            is cut off, or holds something else.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise TaskError(
            f"{kind.name}: {folder} {what}; expected a folder with {describe_layouts(kind)}"
        )
    # Only now: its library keeps a thread, which processes that fork others should not have.
    from gruppetto.training.images import parquet

    if paths := parquet.find_parquet(folder, kind, split):
        parts = [parquet.read_parquet(path, kind) for path in paths]
    elif kind == MNIST and (files := torchvision.find_idx(folder, split)):
        parts = [torchvision.read_idx(*files, kind)]
    elif kind != MNIST and (paths := torchvision.find_pickles(folder, split)):
        parts = [torchvision.read_pickle(path, kind) for path in paths]
    else:
        raise TaskError(
            f"{kind.name}: {folder} holds no {split} pictures; looked for "
            f"{_looked_for(kind, split)}"
        )
    pixels = np.concatenate([pixels for pixels, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    if len(labels) == 0:
        raise TaskError(f"{kind.name}: the {split} files in {folder} hold no pictures")
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def _looked_for(kind: ImageKind, split: Split) -> str:
    inner = ", ".join(f"{name}/" for name in dict.fromkeys(("data", kind.hub_folder, kind.name)))
    if kind == MNIST:
        plain = f"{torchvision.MNIST_FOLDER}/{torchvision.MNIST_FILES[split][0]} (or .gz)"
    else:
        plain = f"{torchvision.CIFAR10_FOLDER}/{torchvision.CIFAR10_BATCHES[split][0]}"
    return f"{split}.parquet or {split}-*.parquet, there and in {inner}, and for {plain}"
