"""The figures of a report. One run has the same colour, marker and line in all of them.

Every function returns a matplotlib Figure, or None where the runs hold nothing to show. Those
about time spent are in :mod:`gruppetto.report.time_plots`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gruppetto.report.bars import stacked_bars
from gruppetto.report.data import Curve, ReportedRun, Target, shared_metric, shared_unit
from gruppetto.report.style import SHORT, WIDTH, legend_size, run_style, tick, wrapped
from gruppetto.report.svg import plain_style, save_png, to_svg

__all__ = [
    "KINDS",
    "error_against_time",
    "error_against_time_png",
    "error_against_updates",
    "error_label",
    "line_chart",
    "loss_against_time",
    "loss_against_updates",
    "mini_batch_bars",
    "run_style",
    "save_png",
    "staleness_histogram",
    "time_label",
    "to_svg",
]

Against = Literal["time", "updates"]

#: What becomes of a mini-batch handed to a learner: attribute of Outcome, name, colour, hatch.
KINDS: Final = (
    ("applied", "applied", "#0072B2", ""),
    ("cancelled", "cancelled", "#E69F00", "////"),
    ("discarded", "discarded", "#D55E00", "...."),
    ("given_up", "given up", "#555555", "xxxx"),
    ("dropped", "dropped", "#CC79A7", "\\\\"),
)
_HEIGHT: Final = 3.5


def time_label(runs: Sequence[ReportedRun]) -> str:
    """The label of a time axis, with its unit."""
    unit = shared_unit(runs)
    if unit is None:
        return "time (each run in its own unit)"
    return {
        "virtual units": "time (virtual units)",
        "virtual s": "virtual time (s)",
        "s": "wall time (s)",
    }[unit]


def error_label(metric: str) -> str:
    """The label of an error axis: ``test error (%)`` where there are accuracies."""
    return "test error (%)" if metric == "accuracy" else f"test {metric.replace('_', ' ')}"


def error_against_time(runs: Sequence[ReportedRun], target: Target | None = None) -> Figure | None:
    """Test error, or the test loss where not all runs have accuracies, over run time."""
    return _error(runs, "time", target)


def error_against_updates(
    runs: Sequence[ReportedRun], target: Target | None = None
) -> Figure | None:
    """Test error, or the test loss where not all runs have accuracies, over updates."""
    return _error(runs, "updates", target)


def loss_against_time(runs: Sequence[ReportedRun]) -> Figure | None:
    """Mean training loss of the applied mini-batches over run time."""
    return line_chart(runs, lambda run: run.training_loss(), "time", "training loss")


def loss_against_updates(runs: Sequence[ReportedRun]) -> Figure | None:
    """Mean training loss of the applied mini-batches over updates."""
    return line_chart(runs, lambda run: run.training_loss(), "updates", "training loss")


def _error(runs: Sequence[ReportedRun], against: Against, target: Target | None) -> Figure | None:
    metric = shared_metric(runs)
    if metric is None:
        return None
    goal = target[1] if target is not None and target[0] == metric else None
    if goal is not None and metric == "accuracy":
        goal = 100.0 * (1.0 - goal)
    return line_chart(runs, lambda run: run.error(metric), against, error_label(metric), goal)


def line_chart(
    runs: Sequence[ReportedRun],
    curve_of: Callable[[ReportedRun], Curve],
    against: Against,
    y_label: str,
    goal: float | None = None,
) -> Figure | None:
    """One quantity of each run as a line; None where no run has it."""
    curves = [curve_of(run).where_finite() for run in runs]
    if not any(len(curve) for curve in curves):
        return None
    with plain_style():
        columns, legend_height = legend_size([run.name for run in runs])
        figure = Figure(figsize=(WIDTH, _HEIGHT + legend_height), layout="constrained")
        axes = figure.add_subplot()
        for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
            style = run_style(index)
            axes.plot(
                curve.times if against == "time" else curve.updates,
                curve.values,
                color=style.colour,
                linestyle=style.line,
                linewidth=1.7,
                marker=style.marker,
                markersize=5,
                markeredgecolor="white",
                markeredgewidth=0.5,
                # Markers of different runs fall in different places where lines coincide.
                markevery=(index % max(1, len(curve) // 10), max(1, len(curve) // 10)),
                label=wrapped(run.name),
            )
        shown = [curve.values for curve in curves]
        if goal is not None:  # the target belongs in the picture, also where nobody came near it
            shown.append(np.array([goal]))
        _scale(axes, np.concatenate(shown), y_label)
        if goal is not None:
            axes.axhline(goal, color="#222222", linewidth=1.0, linestyle=(0, (2, 2)))
            axes.annotate(
                "target",
                (1.0, goal),
                xycoords=("axes fraction", "data"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                fontsize=10,
            )
        axes.set_xlabel(time_label(runs) if against == "time" else "updates")
        axes.set_xlim(left=0.0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=against == "updates"))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.grid(True)
        axes.tick_params(length=3)
        figure.legend(loc="outside lower left", ncols=columns, handlelength=3.2, columnspacing=1.4)
    return figure


def _scale(axes: Axes, values: np.ndarray[Any, Any], label: str) -> None:
    """Linear from zero; logarithmic where values span more than a factor of ten."""
    low, high = float(values.min()), float(values.max())
    if low > 0.0 and high > 10.0 * low:
        axes.set_yscale("log")
        axes.set_ylabel(f"{label}, log scale")
        decades = math.log10(high / low)
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=12)
        )
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        axes.set_ylim(0.8 * low, 1.25 * high)
        return
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if low >= 0.0:
        axes.set_ylim(0.0, 1.05 * high if high > 0.0 else 1.0)


def staleness_histogram(runs: Sequence[ReportedRun]) -> Figure | None:
    """Share of the applied gradients per staleness, one panel per run on a common axis."""
    if not any(len(run.staleness) for run in runs):
        return None
    widest = max(len(run.staleness) for run in runs)
    width = math.ceil(widest / 50)  # staleness values per bar
    in_two = len(runs) > 2 and max(len(run.name) for run in runs) <= SHORT
    columns = 2 if in_two else 1
    num_rows = math.ceil(len(runs) / columns)
    with plain_style():
        height = max(_HEIGHT, 0.55 + 1.05 * num_rows)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        panels = figure.subplots(num_rows, columns, sharex=True, squeeze=False)
        for index, axes in enumerate(panels.flat):
            if index >= len(runs):
                axes.set_axis_off()
                continue
            _panel(axes, runs[index], run_style(index).colour, width, widest)
            if index + columns >= len(runs):
                axes.tick_params(labelbottom=True)
        unit = "staleness (updates)" if width == 1 else f"staleness (updates, {width} per bar)"
        figure.supxlabel(unit, fontsize=11.5)
        figure.supylabel("share of gradients (%)", fontsize=11.5)
    return figure


def _panel(axes: Axes, run: ReportedRun, colour: str, width: int, widest: int) -> None:
    histogram = run.staleness
    axes.set_title(wrapped(run.name), loc="left", pad=3)
    axes.grid(True, axis="y")
    axes.tick_params(length=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.set_xlim(-0.6, max(widest, 2) - 0.4)
    if not len(histogram):
        axes.text(0.5, 0.5, "no updates", transform=axes.transAxes, ha="center", va="center")
        axes.set_yticks([])
        return
    padded = np.concatenate([histogram, np.zeros(-len(histogram) % width, dtype=np.int64)])
    shares = 100.0 * padded.reshape(-1, width).sum(axis=1) / histogram.sum()
    starts = np.arange(len(shares)) * width
    axes.bar(starts + (width - 1) / 2, shares, width=0.85 * width, color=colour)
    axes.set_ylim(0.0, 1.15 * shares.max())
    outcome = run.outcome
    # The side away from the bulk of the bars.
    right = outcome.mean_staleness < 0.55 * widest
    axes.text(
        0.99 if right else 0.01,
        0.97,
        f"mean {outcome.mean_staleness:.2f}\nmax {outcome.max_staleness:,}",
        transform=axes.transAxes,
        ha="right" if right else "left",
        va="top",
        fontsize=10,
        linespacing=1.1,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
    )


def mini_batch_bars(runs: Sequence[ReportedRun]) -> Figure | None:
    """What became of the mini-batches handed to learners, one stacked bar per run."""
    totals = [sum(getattr(run.outcome, kind) for kind, *_ in KINDS) for run in runs]
    most = max(totals, default=0)
    if not most:
        return None
    with plain_style():
        height = max(2.0, 1.1 + 0.5 * len(runs))
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        for index, run in enumerate(runs):
            axes.text(0.0, index - 0.26, run.name, va="bottom", fontsize=11)
        outcomes = [run.outcome for run in runs]
        stacked_bars(axes, KINDS, lambda kind: [getattr(o, kind) for o in outcomes], height=0.42)
        axes.set_ylim(len(runs) - 0.6, -0.75)
        axes.set_xlim(0.0, 1.02 * most)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.set_xlabel("mini-batches handed to learners")
        axes.grid(True, axis="x")
        axes.tick_params(length=3)
        figure.legend(loc="outside lower left", ncols=4, handlelength=1.4, columnspacing=1.2)
    return figure


def error_against_time_png(
    runs: Sequence[ReportedRun], path: Path, target: Target | None = None
) -> Path | None:
    """Write the error-against-time figure as a PNG file; None where there is no evaluation.

    Raises:
        RunFolderError: it cannot be written there.
    """
    figure = error_against_time(runs, target)
    return None if figure is None else save_png(figure, path)
