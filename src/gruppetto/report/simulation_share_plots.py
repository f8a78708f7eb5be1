"""Figures of simulated shares: of contributions per staleness, of the learners' time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gruppetto.report.bars import stacked_bars
from gruppetto.report.simulated import Simulated, case_name, cell_colour
from gruppetto.report.style import SHORT, WIDTH, wrapped
from gruppetto.report.svg import plain_style

__all__ = [
    "MOST_BARS",
    "MOST_PANELS",
    "SPENT",
    "learners_time",
    "shown_histograms",
    "staleness_histograms",
]

#: What learners' time goes into: attribute of Simulated, name, colour, hatch.
SPENT: Final = (
    ("useful", "computing what is applied", "#0072B2", ""),
    ("cancelled_time", "computing what is cancelled or discarded", "#D55E00", "////"),
    ("idle", "idle until an update", "#9CCFEF", ""),
)
#: Histograms, and bars, that a figure shows at most.
MOST_PANELS: Final = 8
MOST_BARS: Final = 40
#: Share of the contributions that a panel's bars hold; the few beyond would squeeze them.
_SHOWN: Final = 0.995


def shown_histograms(cases: Sequence[Simulated]) -> list[Simulated]:
    """Those that can be stale; of many, some spread evenly over their order."""
    late = [case for case in cases if case.max_staleness > 0]
    if len(late) <= MOST_PANELS:
        return late
    places = np.linspace(0, len(late) - 1, MOST_PANELS).round().astype(int)
    return [late[place] for place in places]


def staleness_histograms(cases: Sequence[Simulated]) -> Figure | None:
    """Share of contributions per staleness, a panel per simulation; None where none is stale."""
    shown = shown_histograms(cases)
    if not shown:
        return None
    ends = [_end(case) for case in shown]
    shares_axis = max(ends) <= 8 * min(ends)
    names = [case_name(case, cases) for case in shown]
    columns = 2 if len(shown) > 1 and max(map(len, names)) <= SHORT else 1
    num_rows = math.ceil(len(shown) / columns)
    with plain_style():
        height = max(2.6, 0.6 + 1.45 * num_rows)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        panels = figure.subplots(num_rows, columns, squeeze=False)
        for number, axes in enumerate(panels.flat):
            if number >= len(shown):
                axes.set_axis_off()
                continue
            end = max(ends) if shares_axis else ends[number]
            _panel(axes, shown[number], names[number], ends[number], end)
        figure.supxlabel("staleness (updates)", fontsize=11.5)
        figure.supylabel("share of gradients (%)", fontsize=11.5)
    return figure


def _end(case: Simulated) -> int:
    """Staleness values from 0 on that are shown."""
    counts = np.cumsum(case.histogram)
    return max(3, int(np.searchsorted(counts, _SHOWN * counts[-1])) + 1)


def _panel(axes: Axes, case: Simulated, name: str, end: int, widest: int) -> None:
    counts = np.array(case.histogram, dtype=np.float64)
    width = math.ceil(widest / 40)  # staleness values per bar
    kept = counts[:end]
    padded = np.concatenate([kept, np.zeros(-len(kept) % width)])
    shares = 100.0 * padded.reshape(-1, width).sum(axis=1) / counts.sum()
    starts = np.arange(len(shares)) * width
    axes.bar(starts + (width - 1) / 2, shares, width=0.85 * width, color=cell_colour(case.cell))
    axes.set_title(wrapped(name), loc="left", pad=3, fontsize=10.5)
    axes.set_xlim(-0.6, widest - 0.4)
    axes.set_ylim(0.0, 1.2 * shares.max())
    axes.grid(True, axis="y")
    axes.tick_params(length=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    words = [f"mean {case.mean_staleness:.2f}", f"95 %: {case.p95_staleness:,}"]
    words.append(f"max {case.max_staleness:,}")
    if width > 1:
        words.append(f"{width} per bar")
    right = case.mean_staleness < 0.55 * widest
    axes.text(
        0.99 if right else 0.01,
        0.97,
        "\n".join(words),
        transform=axes.transAxes,
        ha="right" if right else "left",
        va="top",
        fontsize=10,
        linespacing=1.1,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
    )


def learners_time(cases: Sequence[Simulated]) -> Figure:
    """Stacked bars of the shares of the learners' time, one per simulation."""
    shown = list(cases)[:MOST_BARS]
    with plain_style():
        figure = Figure(figsize=(WIDTH, 1.75 + 0.28 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        stacked_bars(
            axes, SPENT, lambda name: [100.0 * getattr(case, name) for case in shown], height=0.74
        )
        axes.set_yticks(range(len(shown)), [wrapped(case_name(c, cases), 30) for c in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(0.0, 100.0)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", length=3)
        axes.set_xlabel("share of the learners' time (%)")
        axes.grid(True, axis="x")
        figure.legend(loc="outside lower left", ncols=2, handlelength=1.4, columnspacing=1.2)
    return figure
