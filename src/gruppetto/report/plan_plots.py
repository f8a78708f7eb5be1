"""Figures of a plan: predicted times with how sure they are, measured times with the fitted law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gruppetto.report.style import WIDTH, tick, wrapped
from gruppetto.report.svg import plain_style

__all__ = ["Band", "measured_times", "predictions"]

_CHOSEN: Final = "#D55E00"
_OTHER: Final = "#0072B2"
#: Rows that a figure shows at most.
_MOST_ROWS: Final = 40


@dataclass(frozen=True)
class Band:
    """A predicted number and between what it probably lies; None where nothing is predicted."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> list[float]:
        """All that has to be on an axis."""
        return [x for x in (self.low, self.value, self.high) if x is not None and math.isfinite(x)]


def predictions(
    names: Sequence[str], bands: Sequence[Band], chosen: int | None, label: str
) -> Figure | None:
    """A dot with its band for each candidate; None where nothing is predicted for any.

    Args:
        names: of the candidates.
        bands: of each.
        chosen: the place of the recommended one.
        label: of the axis.
    """
    names, bands = names[:_MOST_ROWS], bands[:_MOST_ROWS]
    ends = [x for band in bands for x in band.ends]
    if not any(band.value is not None for band in bands) or not ends:
        return None
    low, high = min(ends), max(ends)
    logarithmic = low > 0.0 and high > 20.0 * low
    labels = [wrapped(name, 30) for name in names]
    lines = sum(text.count("\n") + 1 for text in labels)
    with plain_style():
        figure = Figure(figsize=(WIDTH, 1.1 + 0.17 * len(labels) + 0.2 * lines),
                        layout="constrained")  # fmt: skip
        axes = figure.add_subplot()
        for row, band in enumerate(bands):
            colour = _CHOSEN if row == chosen else _OTHER
            axes.axhline(row, color="#e6e6e6", linewidth=0.8, zorder=0)
            if band.value is None:
                axes.text(0.02, row, "not reached", transform=axes.get_yaxis_transform(),
                          va="center", fontsize=10, color="#555555",
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
                continue
            if band.low is not None:
                open_end = band.high is None or not math.isfinite(band.high)
                right = 1.5 * high if open_end or band.high is None else band.high
                axes.hlines(row, band.low, right, color=colour, linewidth=4.5, alpha=0.35)
                caps = [band.low] if open_end else [band.low, right]
                axes.plot(caps, [row] * len(caps), "|", color=colour, markersize=9)
            axes.plot(band.value, row, "D" if row == chosen else "o", color=colour,
                      markersize=7.5, markeredgecolor="white")  # fmt: skip
        if logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(
                LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,))
            )
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlim(0.75 * low, 1.3 * high)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.set_xlim(0.0, 1.08 * high or 1.0)
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.set_yticks(range(len(labels)), labels)
        if chosen is not None and chosen < len(labels):
            axes.get_yticklabels()[chosen].set_fontweight("bold")
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(label)
        axes.grid(True, axis="x")
    return figure


def measured_times(
    edges: npt.NDArray[np.float64],
    counts: npt.NDArray[np.float64],
    density: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None,
    law: str,
) -> Figure | None:
    """A histogram of measured seconds per mini-batch, with the fitted law's density.

    Args:
        edges: of the bins, seconds. Shape [bins + 1].
        counts: measured times per bin. Shape [bins].
        density: seconds, and the law's density per second there.
        law: how the fitted law is called.
    """
    total = float(counts.sum())
    if total <= 0.0:
        return None
    heights = counts / (total * np.diff(edges))
    top = float(heights.max())
    with plain_style():
        figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
        axes = figure.add_subplot()
        bars: Any = {"color": _OTHER, "alpha": 0.45, "edgecolor": "white", "linewidth": 0.5}
        axes.bar(edges[:-1], heights, np.diff(edges), align="edge", label="measured", **bars)
        if density is not None:
            seconds, values = density
            inside = (seconds >= edges[0]) & (seconds <= edges[-1]) & np.isfinite(values)
            axes.plot(seconds[inside], values[inside], color=_CHOSEN, linewidth=2.0,
                      label=wrapped(law))  # fmt: skip
            top = max(top, min(float(values[inside].max(initial=0.0)), 2.0 * top))
        axes.set_ylim(0.0, 1.08 * top)
        axes.set_xlim(min(0.0, float(edges[0])), float(edges[-1]))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("seconds per mini-batch")
        axes.set_ylabel("density (per second)")
        axes.grid(True)
        axes.tick_params(length=3)
        figure.legend(loc="outside lower left", ncols=1)
    return figure
