"""What every benchmark shares: arguments, the machine's state, and how results are printed."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options every benchmark takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--repeats", type=int, default=5, help="runs, of which the median counts [5]")
    return made


def load() -> list[float]:
    """The machine's load averages; a busy machine makes every number larger."""
    return [round(x, 2) for x in os.getloadavg()]


def median_of(repeats: int, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Median of each figure over several runs."""
    runs = [measure() for _ in range(repeats)]
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def report(
    rows: Sequence[dict[str, Any]], before: list[float], as_json: bool, threads: int = 1
) -> None:
    """Print the rows with the command that made them."""
    result = {
        "command": " ".join(["python", *sys.argv]),
        "threads": threads,
        "load_before": before,
        "load_after": load(),
        "rows": list(rows),
    }
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['command']}   threads {threads}, load {before} -> {result['load_after']}")
    # Neighbours with the same columns are a table.
    for _, table in itertools.groupby(rows, key=lambda row: (row.get("table"), *row)):
        print_table(list(table))


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Rows under each other, a column per key, after the table's name where it has one."""
    names = [name for name in rows[0] if name != "table"]
    cells = [names] + [
        [f"{row[n]:.4g}" if isinstance(row[n], float) else str(row[n]) for n in names]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if "table" in rows[0]:
        print(f"\n{rows[0]['table']}")
    for line in cells:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
