"""Figures of simulated time per update, against K, against learners, or side by side.

What was simulated is a dot; what theory says is a line, dashed where it is an upper bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gruppetto.report.simulated import (
    CELLS,
    Simulated,
    all_times,
    case_name,
    cell_colour,
    read_simulations,
    time_unit,
)
from gruppetto.report.style import WIDTH, legend_size, tick, wrapped
from gruppetto.report.svg import plain_style, save_png

__all__ = ["against_k", "against_learners", "scale_time", "side_by_side", "update_times_png"]

#: Panels, lines and rows that a figure shows at most.
_MOST_PANELS: Final = 4
_MOST_LINES: Final = 8
_MOST_ROWS: Final = 40
_DASHED: Final[Any] = (0, (4, 2))
#: In the order of the cells: of their first protocol, of the next.
_MARKERS: Final = ("o", "s", "^", "D")
_OTHER_MARKERS: Final = ("v", "P", "X", "p")
#: Those drawn first are larger, so that they show around others in the same place.
_SIZES: Final = {"o": 10.0, "s": 7.5, "^": 8.5, "D": 4.5}


# ------------------------------------------------------------------ time per update


def against_k(cases: Sequence[Simulated]) -> Figure | None:
    """Time per update against K, a line per cell and a panel per number of learners.

    None where no cell was simulated with several K for one number of learners; several are two,
    or three where the learners differ too. Protocols with a bound are on no cell's line.
    """
    cases = [case for case in cases if not case.is_bounded]
    several = 2 if len({case.learners for case in cases}) == 1 else 3
    numbers = [
        number
        for number in dict.fromkeys(case.learners for case in cases)
        if any(len({c.k for c in cases if (c.learners, c.cell) == (number, cell)}) >= several
               for cell in CELLS)
    ][:_MOST_PANELS]  # fmt: skip
    if not numbers:
        return None
    shown = [case for case in cases if case.learners in numbers]
    present = [cell for cell in CELLS if any(case.cell == cell for case in shown)]
    with plain_style():
        height = (3.4 if len(numbers) == 1 else 2.5 * len(numbers)) + 0.75
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        panels = figure.subplots(len(numbers), 1, squeeze=False)[:, 0]
        for axes, number in zip(panels, numbers, strict=True):
            here = [case for case in shown if case.learners == number]
            unit, factor = time_unit(all_times(here))
            for cell in present:
                line = {case.k: case for case in here if case.cell == cell}
                points = [(k, line[k]) for k in sorted(line)]
                _line(axes, points, factor, cell_colour(cell), _marker(cell))
            _x_axis(axes, [case.k for case in here])
            scale_time(axes, all_times(here), factor, f"time per update ({unit})")
            if len(numbers) > 1:
                axes.set_title(f"{number:,} learners", loc="left")
        panels[-1].set_xlabel("K, mini-batches per update")
        styles = [(cell, cell_colour(cell), _marker(cell)) for cell in present]
        _legend(figure, styles, shown)
    return figure


def against_learners(cases: Sequence[Simulated]) -> Figure | None:
    """Time per update against the number of learners, a line per protocol.

    None where no protocol was simulated with several.
    """
    names = [
        name
        for name in dict.fromkeys(case.protocol for case in cases)
        if len({case.learners for case in cases if case.protocol == name}) > 1
    ][:_MOST_LINES]
    if not names:
        return None
    shown = [case for case in cases if case.protocol in names]
    unit, factor = time_unit(all_times(shown))
    styles = []
    with plain_style():
        _, legend_height = legend_size(names)
        figure = Figure(figsize=(WIDTH, 3.6 + legend_height), layout="constrained")
        axes = figure.add_subplot()
        seen: dict[str, int] = {}
        for name in names:
            line = {case.learners: case for case in shown if case.protocol == name}
            points = [(number, line[number]) for number in sorted(line)]
            cell = points[0][1].cell
            place = seen[cell] = seen.get(cell, -1) + 1
            styles.append((name, _shade(cell_colour(cell), place), _marker(cell, place)))
            _line(axes, points, factor, *styles[-1][1:])
        _x_axis(axes, [case.learners for case in shown])
        scale_time(axes, all_times(shown), factor, f"time per update ({unit})")
        axes.set_xlabel("learners")
        _legend(figure, styles, shown)
    return figure


def side_by_side(cases: Sequence[Simulated]) -> Figure | None:
    """Time per update, a row per simulation; for those that make no line."""
    shown = [case for case in cases if case.update_time is not None][:_MOST_ROWS]
    if not shown:
        return None
    unit, factor = time_unit(all_times(shown))
    with plain_style():
        figure = Figure(figsize=(WIDTH, 1.7 + 0.44 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        for row, case in enumerate(shown):
            colour = cell_colour(case.cell)
            time = factor * (case.update_time or 0.0)
            axes.axhline(row, color="#e6e6e6", linewidth=0.8, zorder=0)
            if case.expected is not None:
                axes.vlines(
                    factor * case.expected, row - 0.34, row + 0.34, color=colour, linewidth=2.0,
                    linestyle="-" if case.kind == "exact" else (0, (1.6, 1.0)),
                )  # fmt: skip
            if case.lowest is not None and case.highest is not None:
                axes.hlines(row, factor * case.lowest, factor * case.highest, color=colour)
            axes.plot(time, row, "o", color=colour, markersize=7.5, markeredgecolor="white")
        axes.set_yticks(range(len(shown)), [case_name(case, shown) for case in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0.0, 1.08 * factor * max(all_times(shown)) or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"time per update ({unit})")
        axes.grid(True, axis="x")
        handles = [_dot("#777777", "o", "simulated")]
        handles += _theory(shown)
        figure.legend(handles=handles, loc="outside lower left", ncols=3, columnspacing=1.2)
    return figure


def update_times_png(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw time per update against K, or against learners, or side by side, to a PNG file.

    Raises:
        RunFolderError: it cannot be written there.
    """
    cases = read_simulations(records)
    figure = against_k(cases) or against_learners(cases) or side_by_side(cases)
    return save_png(Figure(figsize=(WIDTH, 2.0)) if figure is None else figure, path)


def _line(
    axes: Axes, points: Sequence[tuple[int, Simulated]], factor: float, colour: str, marker: str
) -> None:
    """Dots, how they spread over repeats, and theory from each to the next."""
    for (x0, one), (x1, two) in itertools.pairwise(points):
        if one.expected is None or two.expected is None:
            continue
        exact = one.kind == two.kind == "exact"
        axes.plot(
            [x0, x1], [factor * one.expected, factor * two.expected], color=colour, linewidth=1.5,
            linestyle="-" if exact else _DASHED, zorder=2 if exact else 2.5,
        )  # fmt: skip
    for number, (x, case) in enumerate(points):
        around = [points[i][1] for i in (number - 1, number + 1) if 0 <= i < len(points)]
        if case.expected is not None and all(each.expected is None for each in around):
            axes.plot(x, factor * case.expected, "_", color=colour, markersize=15, zorder=2)
        if case.lowest is not None and case.highest is not None:
            axes.vlines(x, factor * case.lowest, factor * case.highest, color=colour, zorder=3)
    known = [(x, case.update_time) for x, case in points if case.update_time is not None]
    axes.plot(
        [x for x, _ in known], [factor * time for _, time in known], linestyle="none",
        marker=marker, color=colour, markersize=_SIZES.get(marker, 6.5), markeredgecolor="white",
        markeredgewidth=0.7, zorder=4,
    )  # fmt: skip


def _x_axis(axes: Axes, values: Sequence[int]) -> None:
    """Logarithmic where whole numbers span much; ticks at some of them."""
    low, high = min(values), max(values)
    if high >= 8 * low:
        axes.set_xscale("log")
        kept: list[int] = []
        for value in sorted(set(values), reverse=True):
            if not kept or kept[-1] / value >= max(1.35, (high / low) ** (1 / 9)):
                kept.append(value)
        axes.xaxis.set_major_locator(FixedLocator(kept))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_minor_locator(FixedLocator([]))
        axes.set_xlim(0.85 * low, 1.18 * high)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(tick))
    axes.grid(True)
    axes.tick_params(length=3)


def scale_time(axes: Axes, seconds: Sequence[float], factor: float, label: str) -> None:
    """The vertical axis from zero; logarithmic where times span more than a factor of ten."""
    low, high = factor * min(seconds, default=0.0), factor * max(seconds, default=0.0)
    axes.set_ylabel(label)
    if low > 0.0 and high > 10.0 * low:
        axes.set_yscale("log")
        many = math.log10(high / low) < 2.5
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if many else (1.0,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(0.75 * low, 1.35 * high)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.set_ylim(0.0, 1.1 * high or 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(tick))


def _marker(cell: str, place: int = 0) -> str:
    """Of the n-th protocol of a cell."""
    return (_MARKERS, _OTHER_MARKERS)[place % 2][CELLS.index(cell)]


def _shade(colour: str, place: int) -> str:
    """The colour of the n-th protocol of a cell: darker, then paler."""
    towards, share = ((0.0, 0.0), (0.0, 0.5), (1.0, 0.35), (0.0, 0.75))[place % 4]
    red, green, blue = ((1 - share) * part + share * towards for part in to_rgb(colour))
    return str(to_hex((red, green, blue)))


def _legend(
    figure: Figure, styles: Sequence[tuple[str, str, str]], shown: Sequence[Simulated]
) -> None:
    handles = [_dot(colour, marker, wrapped(name)) for name, colour, marker in styles]
    handles += _theory(shown)
    columns, _ = legend_size([name for name, *_ in styles])
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, columnspacing=1.6)


def _dot(colour: str, marker: str, label: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=7,
                  markeredgecolor="white", label=label)  # fmt: skip


def _theory(shown: Sequence[Simulated]) -> list[Line2D]:
    """What stands in a legend for theory, as far as there is any."""
    kinds: tuple[tuple[str, Any, str], ...] = (
        ("exact", "-", "theory, exact"),
        ("upper-bound", _DASHED, "theory, upper bound"),
    )
    return [
        Line2D([], [], color="#555555", linewidth=1.6, linestyle=line, label=label)
        for kind, line, label in kinds
        if any(case.kind == kind for case in shown)
    ]
