"""Tiny data sets of pictures in every layout, and what they hold."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
#: Pictures of a split in the tiny data sets.
NUM = {"train": 40, "test": 12}


def pictures(name: str, split: str = "train", n: int | None = None) -> tuple[Pixels, Labels]:
    """Random pixels [N, C, H, W] and labels [N] that have all ten classes in turn."""
    n = n or NUM[split]
    generator = np.random.default_rng((len(name), len(split)))
    shape = (n, 3, 32, 32) if name == "cifar10" else (n, 1, 28, 28)
    return generator.integers(0, 256, shape, dtype=np.uint8), np.arange(n) * 7 % 10


def encode(pixels: Pixels, kind: str = "PNG") -> bytes:
    """One picture [C, H, W] as the bytes of a file."""
    array = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind)
    return stream.getvalue()


def write_parquet(path: Path, column: str, encoded: list[Any], labels: Any) -> Path:
    """The hub's layout: a struct of bytes and path, and a label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [None if e is None else {"bytes": e, "path": "x.png"} for e in encoded]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({column: pa.array(rows, kind), "label": pa.array(labels)})
    pq.write_table(table, path, row_group_size=16)
    return path


def _hub(path: Path, name: str, split: str) -> None:
    pixels, labels = pictures(name, split)
    column = "img" if name == "cifar10" else "image"
    write_parquet(path, column, [encode(p) for p in pixels], labels)


def hub_whole(folder: Path, name: str) -> Path:
    """``train.parquet`` and ``test.parquet``."""
    for split in NUM:
        _hub(folder / f"{split}.parquet", name, split)
    return folder


def hub_inner(folder: Path, name: str) -> Path:
    """As the hub's repositories: ``plain_text/train-00000-of-00001.parquet``."""
    inner = "plain_text" if name == "cifar10" else "mnist"
    for split in NUM:
        _hub(folder / inner / f"{split}-00000-of-00001.parquet", name, split)
    return folder


def hub_shards(folder: Path, name: str) -> Path:
    """Several files a split, the other name of the column."""
    column = "image" if name == "cifar10" else "img"
    for split in NUM:
        pixels, labels = pictures(name, split)
        for i, part in enumerate(np.array_split(np.arange(len(labels)), 3)):
            path = folder / "data" / f"{split}-{i:05}-of-00003.parquet"
            write_parquet(path, column, [encode(p) for p in pixels[part]], labels[part])
    return folder


def write_pickle(path: Path, content: Any, protocol: int = 2) -> Path:
    """A pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def torchvision_cifar10(folder: Path, name: str = "cifar10", protocol: int = 2) -> Path:
    """``cifar-10-batches-py``: five batches and one, pickled."""
    inner = folder / "cifar-10-batches-py"
    pixels, labels = pictures("cifar10", "train")
    for i, part in enumerate(np.array_split(np.arange(len(labels)), 5)):
        content = {b"data": pixels[part].reshape(len(part), -1), b"labels": labels[part].tolist()}
        write_pickle(inner / f"data_batch_{i + 1}", content, protocol)
    pixels, labels = pictures("cifar10", "test")
    content = {b"data": pixels.reshape(len(pixels), -1), b"labels": labels.tolist()}
    write_pickle(inner / "test_batch", content, protocol)
    return folder


def idx(array: Any, kind: int = 8) -> bytes:
    """The bytes of an idx file."""
    array = np.asarray(array, np.uint8)
    head = bytes((0, 0, kind, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def torchvision_mnist(folder: Path, name: str = "mnist", packed: bool = False) -> Path:
    """``MNIST/raw``: idx files, packed or not."""
    inner = folder / "MNIST" / "raw"
    inner.mkdir(parents=True)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        pixels, labels = pictures("mnist", split)
        for end, array in (("images-idx3-ubyte", pixels[:, 0]), ("labels-idx1-ubyte", labels)):
            content = idx(array)
            if packed:
                (inner / f"{prefix}-{end}.gz").write_bytes(gzip.compress(content))
            else:
                (inner / f"{prefix}-{end}").write_bytes(content)
    return folder


def torchvision_mnist_packed(folder: Path, name: str = "mnist") -> Path:
    """``MNIST/raw`` with ``.gz`` files."""
    return torchvision_mnist(folder, packed=True)


#: (data set, function that writes it, inner folders that may be given as well).
LAYOUTS: list[tuple[str, Callable[[Path, str], Path], list[str]]] = [
    ("cifar10", hub_whole, []),
    ("cifar10", hub_inner, ["plain_text"]),
    ("cifar10", hub_shards, ["data"]),
    ("cifar10", torchvision_cifar10, ["cifar-10-batches-py"]),
    ("mnist", hub_whole, []),
    ("mnist", hub_inner, ["mnist"]),
    ("mnist", hub_shards, ["data"]),
    ("mnist", torchvision_mnist, ["MNIST", "MNIST/raw"]),
    ("mnist", torchvision_mnist_packed, ["MNIST", "MNIST/raw"]),
]
