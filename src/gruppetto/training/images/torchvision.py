"""The files torchvision downloads: CIFAR-10's pickles and MNIST's idx files."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gruppetto.errors import TaskError
from gruppetto.training.images.kinds import ImageKind, Split
from gruppetto.training.images.labels import check_labels

__all__ = [
    "CIFAR10_BATCHES",
    "CIFAR10_FOLDER",
    "MNIST_FILES",
    "MNIST_FOLDER",
    "find_idx",
    "find_pickles",
    "read_idx",
    "read_pickle",
]

CIFAR10_FOLDER: Final = "cifar-10-batches-py"
CIFAR10_BATCHES: Final[dict[str, tuple[str, ...]]] = {
    "train": tuple(f"data_batch_{i}" for i in range(1, 6)),
    "test": ("test_batch",),
}
MNIST_FOLDER: Final = "MNIST/raw"
MNIST_FILES: Final[dict[str, tuple[str, str]]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def find_pickles(folder: Path, split: Split) -> list[Path]:
    """CIFAR-10's files of a split, in order; none where there is not one of them.

    Raises:
        TaskError: only some of them are there.
    """
    for inner in (folder, folder / CIFAR10_FOLDER):
        paths = [inner / name for name in CIFAR10_BATCHES[split]]
        missing = [path.name for path in paths if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise TaskError(f"{inner} lacks {', '.join(missing)}; fetch the data set again")
    return []


def read_pickle(path: Path, kind: ImageKind) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read one of CIFAR-10's pickles: ``data`` uint8 [N, 3072], ``labels`` a list of N.

    Returns:
        Pixels [N, C, H, W] and labels [N].

    Raises:
        TaskError: no whole pickle, one of something else, or one that would run code.
    """
    content = _unpickle(path)
    keys = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    if not {"data", "labels"} <= keys.keys():
        found = ", ".join(sorted(map(str, keys))) or "none"
        raise TaskError(f"{path}: expected the keys data and labels, found {found}")
    pixels = keys["data"]
    length = kind.channels * kind.size**2
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 2):
        got = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels)
        raise TaskError(f"{path}: expected data to be uint8 [N, {length}], got {got}")
    if pixels.shape[1] != length:
        raise TaskError(
            f"{path}: expected pictures of {length} values ({kind.channels}x{kind.size}x"
            f"{kind.size}), got {pixels.shape[1]}"
        )
    try:
        labels = np.asarray(keys["labels"]).astype(np.int64, casting="safe")
    except (TypeError, ValueError):
        raise TaskError(f"{path}: expected labels to be a list of whole numbers") from None
    _check_count(len(pixels), path, labels.shape, path)
    check_labels(labels, kind, path)
    return pixels.reshape(-1, kind.channels, kind.size, kind.size), labels


class _ArraysOnly(pickle.Unpickler):
    """Builds arrays and plain values only: a pickle from elsewhere may name any function."""

    #: Arrays are rebuilt by these; their modules' names changed over numpy's versions.
    _ALLOWED: Final[dict[str, Any]] = {
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "_reconstruct": np.zeros(1).__reduce__()[0],
        "_frombuffer": np.zeros(1).__reduce_ex__(5)[0],
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self._ALLOWED:
            return self._ALLOWED[name]
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes protocol 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, arrays were expected")


def _unpickle(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
    except EOFError:
        raise TaskError(f"{path} is cut off; fetch it again") from None
    except Exception as error:  # whatever the bytes happen to say
        truncated = "truncated" in str(error) or "exhausted" in str(error)
        what = "is cut off; fetch it again" if truncated else "is not a CIFAR-10 batch"
        raise TaskError(f"{path} {what} ({type(error).__name__}: {error})") from None
    if not isinstance(content, dict):
        raise TaskError(
            f"{path} is not a CIFAR-10 batch: expected a dict with data and labels, got "
            f"{type(content).__name__}"
        )
    return content


def find_idx(folder: Path, split: Split) -> tuple[Path, Path] | None:
    """MNIST's pictures and labels of a split, packed (``.gz``) or not.

    Raises:
        TaskError: one of the two is missing.
    """
    for inner in (folder, folder / "raw", folder / MNIST_FOLDER):
        found = [_plain_or_packed(inner / name) for name in MNIST_FILES[split]]
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
        if any(found):
            missing = MNIST_FILES[split][found.index(None)]
            raise TaskError(f"{inner} lacks {missing} (or {missing}.gz); fetch the data set again")
    return None


def _plain_or_packed(path: Path) -> Path | None:
    packed = path.with_name(path.name + ".gz")
    return path if path.is_file() else packed if packed.is_file() else None


def read_idx(
    pictures: Path, labels: Path, kind: ImageKind
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read a pair of idx files.

    Returns:
        Pixels [N, C, H, W] and labels [N].

    Raises:
        TaskError: not idx files, cut off, pictures of another size, or not as many labels.
    """
    pixels = _read_idx(pictures, 3)
    if pixels.shape[1:] != (kind.size, kind.size):
        raise TaskError(
            f"{pictures}: expected pictures of {kind.size}x{kind.size} pixels, got "
            f"{pixels.shape[2]}x{pixels.shape[1]}"
        )
    number = _read_idx(labels, 1).astype(np.int64)
    _check_count(len(pixels), pictures, number.shape, labels)
    check_labels(number, kind, labels)
    return pixels[:, None], number


def _read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """An array of bytes: two zeros, type 8, number of dimensions, sizes big-endian, values."""
    content = _read_bytes(path)
    expected = bytes((0, 0, 8, dimensions))
    if content[:4] != expected:
        raise TaskError(
            f"{path} is not an idx file of {dimensions} dimensions: expected it to begin with "
            f"{expected.hex(' ')}, got {content[:4].hex(' ') or 'nothing'}"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise TaskError(f"{path} is cut off after {len(content)} bytes; fetch it again")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size = start + int(np.prod(shape, dtype=object))
    if len(content) != size:
        raise TaskError(
            f"{path} is cut off or damaged: expected {size} bytes, got {len(content)}; fetch it "
            "again"
        )
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if path.suffix != ".gz":
            return content
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            return file.read()
    except EOFError:
        raise TaskError(f"{path} is cut off; fetch it again") from None
    except (OSError, zlib.error) as error:
        raise TaskError(f"{path} cannot be read: {error}") from None


def _check_count(pictures: int, where: Path, labels: tuple[int, ...], other: Path) -> None:
    if labels != (pictures,):
        got = labels[0] if len(labels) == 1 else f"an array of shape {labels}"
        of = "" if where == other else f" in {other.name}"
        raise TaskError(f"{where}: expected as many labels as pictures, {pictures}, got {got}{of}")
