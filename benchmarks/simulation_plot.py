"""The picture of what a simulation costs, from the rows of benchmarks/simulation.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from gruppetto.report.simulated import CELLS, cell_colour
from gruppetto.report.style import WIDTH, tick
from gruppetto.report.svg import plain_style, save_png

MARKERS = dict(zip(CELLS, "os^D", strict=True))


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the tables ``learners`` and ``updates`` to a PNG file.

    Raises:
        RunFolderError: it cannot be written there.
    """
    by_learners = [row for row in rows if row["table"] == "learners"]
    by_updates = [row for row in rows if row["table"] == "updates"]
    with plain_style():
        figure = Figure(figsize=(WIDTH, 6.4), layout="constrained")
        upper, lower = figure.subplots(2, 1)
        _lines(upper, by_learners, "learners", "us_per_update", 1.0)
        upper.set_xlabel("learners P, with K = P/8")
        upper.set_ylabel("per update (µs)")
        _lines(lower, by_updates, "updates", "us_per_update", 1e-3)
        same = by_updates[0]
        lower.set_xlabel(f"updates, with P = {same['learners']} and K = {same['k']}")
        lower.set_ylabel("whole simulation (ms)")
        handles, labels = upper.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, columnspacing=1.6)
    return save_png(figure, path)


def _lines(
    axes: Axes, rows: Sequence[Mapping[str, Any]], across: str, what: str, factor: float
) -> None:
    """A line per cell; against updates the cost of all of them together."""
    for cell in CELLS:
        points = sorted((row[across], row[what]) for row in rows if row["cell"] == cell)
        values = [factor * cost * (x if across == "updates" else 1) for x, cost in points]
        axes.plot(
            [x for x, _ in points], values, color=cell_colour(cell), marker=MARKERS[cell],
            markersize=7.0, markeredgecolor="white", markeredgewidth=0.7, label=cell,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row[across] for row in rows})))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(tick))
    axes.grid(True)
    axes.tick_params(length=3)
