"""Files of measured seconds, and laws of delays whose values are in one. Loads no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from gruppetto.delays import DELAYS, Delay, Empirical
from gruppetto.errors import InvalidSetting

__all__ = ["load_delay", "read_seconds"]

Floats = npt.NDArray[np.float64]

#: The column that is read where a table has several.
_COLUMN: Final = "seconds"
_PARQUET: Final = (".parquet", ".pq")


def load_delay(law: Delay | str) -> Delay:
    """Read a law and, if its values are in a file, those; the file's name becomes absolute.

    Raises:
        InvalidSetting: a spec that cannot be read, or a file that cannot.
    """
    parsed = DELAYS.parse(law)
    if not isinstance(parsed, Empirical) or parsed.seconds:
        return parsed
    path = Path(parsed.file).expanduser().absolute()
    return parsed.with_values(read_seconds(path), file=str(path))


def read_seconds(path: str | Path) -> Floats:
    """Read measured seconds: a number per line, a column of a CSV or of a Parquet file.

    Of several columns the one called ``seconds`` is read. Shape [values], in the file's order.

    Raises:
        InvalidSetting: no such file, one that holds something else, nothing, or values that are
            negative, infinite or not numbers.
    """
    path = Path(path)
    try:
        if path.suffix.lower() in _PARQUET:
            values = _read_parquet(path)
        else:
            values = np.array(list(_read_lines(path)), dtype=np.float64)
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror or error}") from None
    if not values.size:
        raise InvalidSetting(f"{path} holds no seconds; expected at least one number")
    wrong = values[~(np.isfinite(values) & (values >= 0.0))]
    if wrong.size:
        raise InvalidSetting(f"{path}: expected seconds >= 0 and finite, got {wrong[0]}")
    return values


def _read_lines(path: Path) -> Iterator[float]:
    column: int | None = None
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                is_first = column is None
                if column is None:
                    column = 0 if _is_number(cells[0]) else _choose(path, cells)
                    if len(cells) > 1 and _is_number(cells[0]):
                        raise InvalidSetting(
                            f"{path}: expected one number per line, or a first line that names "
                            f"the columns, got {len(cells)} columns without names"
                        )
                text = cells[column] if column < len(cells) else ""
                if _is_number(text):
                    yield float(text)
                elif not is_first:
                    raise InvalidSetting(
                        f"{path}, line {reader.line_num}: expected seconds, got {text[:40]!r}"
                    )
    except (UnicodeDecodeError, csv.Error):
        raise InvalidSetting(
            f"{path}: expected text with a number per line, a CSV or a .parquet file, got "
            "something else"
        ) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _choose(path: Path, names: list[str]) -> int:
    """The column to read, by the table's names.

    Raises:
        InvalidSetting: several, and none of them is called ``seconds``.
    """
    stripped = [name.strip() for name in names]
    if len(names) == 1:
        return 0
    if stripped.count(_COLUMN) != 1:
        shown = ", ".join(name[:20] for name in stripped[:8])
        raise InvalidSetting(
            f"{path}: expected one column, or one called {_COLUMN}, got the columns {shown}"
        )
    return stripped.index(_COLUMN)


def _read_parquet(path: Path) -> Floats:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:
            table = pq.read_table(file)
    except pa.ArrowInvalid:
        raise InvalidSetting(f"{path}: expected a Parquet file, got something else") from None
    if not table.num_columns:
        raise InvalidSetting(f"{path}: expected a column of seconds, got none")
    column = table.column(_choose(path, table.column_names))
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise InvalidSetting(f"{path}: expected a column of numbers, got one of {kind}")
    values = column.to_numpy()  # missing ones become not-a-number
    return np.asarray(values, dtype=np.float64)
