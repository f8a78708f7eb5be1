"""The hub's layout: parquet files with a column of encoded pictures and a column of labels."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from gruppetto.errors import TaskError
from gruppetto.training.images.kinds import ImageKind, Split
from gruppetto.training.images.labels import check_labels

__all__ = ["find_parquet", "read_parquet"]

#: What the hub calls the column of pictures: CIFAR-10 has the one, MNIST the other.
_PICTURES = ("img", "image")
_LABELS = "label"
#: Pillow's names of modes in words.
_WORDS = {"L": "grey", "RGB": "colour"}
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.parquet$")


def find_parquet(folder: Path, kind: ImageKind, split: Split) -> list[Path]:
    """The files of a split, in order: ``train.parquet`` or ``train-00000-of-00001.parquet``.

    Looked for in the folder itself, then in those that the hub's repositories have.

    Raises:
        TaskError: some of the numbered files are missing.
    """
    for inner in dict.fromkeys(("", "data", kind.hub_folder, kind.name)):
        whole = folder / inner / f"{split}.parquet"
        if whole.is_file():
            return [whole]
        shards = sorted((folder / inner).glob(f"{split}-*.parquet"))
        if shards:
            _check_shards(shards)
            return shards
    return []


def _check_shards(paths: list[Path]) -> None:
    numbered = [match for path in paths if (match := _SHARD.search(path.name))]
    if not numbered:
        return
    total = int(numbered[0][2])
    if [int(match[1]) for match in numbered] != list(range(total)) or len(numbered) != len(paths):
        raise TaskError(
            f"{paths[0].parent}: expected {total} files like {paths[0].name}, found "
            f"{', '.join(path.name for path in paths)}"
        )


def read_parquet(
    path: Path, kind: ImageKind
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Decode a file's pictures.

    One thread: pictures are so small that more of them only wait for the interpreter.

    Returns:
        Pixels [N, C, H, W] and labels [N].

    Raises:
        TaskError: not a whole parquet file, other columns, a picture that cannot be decoded or
            of another size, a label that is no class.
    """
    table = _read_table(path)
    pictures, labels = _columns(table, path)
    number = np.asarray(labels.to_numpy(), dtype=np.int64)
    check_labels(number, kind, path)
    pixels = np.empty((len(number), kind.size, kind.size, kind.channels), np.uint8)
    for index, encoded in enumerate(pc.struct_field(pictures, "bytes").to_pylist()):
        pixels[index] = _decode(encoded, kind, f"{path}: picture {index}")
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), number


def _read_table(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        with pq.ParquetFile(path) as reader:
            names = reader.schema_arrow.names
            wanted = [name for name in (*_PICTURES, _LABELS) if name in names]
            if len(wanted) != 2 or _LABELS not in wanted:
                raise TaskError(
                    f"{path}: expected a column {' or '.join(_PICTURES)} and a column {_LABELS}, "
                    f"found {', '.join(names) or 'none'}"
                )
            return reader.read(columns=wanted)
    except (pa.ArrowException, OSError) as error:
        if magic == b"PAR1":
            what = "is cut off or damaged; fetch it again"
        else:
            what = "is not a parquet file"
        raise TaskError(f"{path} {what} ({str(error).splitlines()[0]})") from None


def _columns(table: Any, path: Path) -> tuple[Any, Any]:
    """The pictures and the labels, of the right types, without gaps."""
    name = next(n for n in _PICTURES if n in table.column_names)
    pictures, labels = table[name], table[_LABELS]
    if not (
        pa.types.is_struct(pictures.type)
        and (at := pictures.type.get_field_index("bytes")) >= 0
        and str(pictures.type.field(at).type) in ("binary", "large_binary")
    ):
        raise TaskError(
            f"{path}: expected the column {name} to hold encoded pictures as {{bytes, path}}, got "
            f"{pictures.type}"
        )
    if not pa.types.is_integer(labels.type):
        raise TaskError(f"{path}: expected whole numbers in the column label, got {labels.type}")
    if labels.null_count:
        raise TaskError(f"{path}: {labels.null_count} rows have no label")
    return pictures, labels


def _decode(encoded: bytes | None, kind: ImageKind, where: str) -> npt.NDArray[np.uint8]:
    """One picture, [H, W, C]."""
    if encoded is None:
        raise TaskError(f"{where} has no bytes; expected the pictures to be inside the file")
    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG")) as picture:
            found = picture.mode, picture.size
            if found == (kind.mode, (kind.size, kind.size)):
                return np.frombuffer(picture.tobytes(), np.uint8).reshape(
                    kind.size, kind.size, kind.channels
                )
    except Exception as error:  # Pillow's decoders raise a dozen different ones
        raise TaskError(
            f"{where} is no readable JPEG or PNG ({type(error).__name__}: {error})"
        ) from None
    mode, (width, height) = found
    raise TaskError(
        f"{where}: expected {_WORDS[kind.mode]} of {kind.size}x{kind.size} pixels, got "
        f"{_WORDS.get(mode, mode)} of {width}x{height}"
    )
