"""A tiny data set of pictures on disk."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

__all__ = ["write_pictures"]


def write_pictures(folder: Path) -> Path:
    """CIFAR-10 as torchvision lays it out, with 40 and 10 pictures of noise."""
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, n in [*((f"data_batch_{i}", 8) for i in range(1, 6)), ("test_batch", 10)]:
        pixels = generator.integers(0, 256, (n, 3072), dtype=np.uint8)
        content = {b"data": pixels, b"labels": [i % 10 for i in range(n)]}
        (inner / name).write_bytes(pickle.dumps(content, 2))
    return folder
