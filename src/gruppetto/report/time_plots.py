"""Figures about time spent: per update, and by the learners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gruppetto.report.bars import stacked_bars
from gruppetto.report.data import ReportedRun, shared_unit
from gruppetto.report.plots import time_label
from gruppetto.report.style import WIDTH, run_style, tick
from gruppetto.report.svg import plain_style
from gruppetto.report.table import format_number, seconds_unit
from gruppetto.report.times import Place, Spent, UpdateTime, mean_spent, places, update_time

__all__ = [
    "SPENT",
    "learners_time",
    "learners_time_caption",
    "learners_time_words",
    "update_times",
    "update_times_words",
]

#: Where time went: attribute of Spent, name, colour, hatch; in the order of Spent's fields.
SPENT: Final = (
    ("computing", "computing", "#0072B2", ""),
    ("delay", "injected delay", "#E69F00", ""),
    ("cancelled", "cancelled work", "#D55E00", "////"),
    ("loading", "loading data", "#009E73", "...."),
    ("waiting", "waiting for the server", "#9CCFEF", ""),
    ("rest", "the rest", "#D5D8DC", ""),
)
#: A bar for each learner of a run up to so many; above, their mean says more.
_MOST_BARS: Final = 16
#: Letters of a name above a bar.
_LONGEST: Final = 54
_INK: Final = "#222222"


def update_times(runs: Sequence[ReportedRun]) -> Figure | None:
    """Time per update, measured and expected; None where no run has an expected one."""
    known = _known(runs)
    if not any(time.expected for _, _, time in known):
        return None
    shown = [run for _, run, _ in known]
    factor, label = _axis_of_updates(shown, [time for _, _, time in known])
    with plain_style():
        figure = Figure(figsize=(WIDTH, 1.35 + 0.52 * len(known)), layout="constrained")
        axes = figure.add_subplot()
        most = max(max(time.measured, time.expected or 0.0) for _, _, time in known) * factor
        for row, (index, run, time) in enumerate(known):
            colour = run_style(index).colour
            measured = factor * time.measured
            _name(axes, row, run.name)
            axes.barh(row, measured, height=0.3, color=colour)
            text = _value(measured)
            if time.expected is not None:
                expected = factor * time.expected
                axes.vlines(expected, row - 0.19, row + 0.19, color="white", linewidth=4.5)
                axes.vlines(expected, row - 0.19, row + 0.19, color=_INK, linewidth=2.2)
                text += f", expected {_value(expected)}"
            # Beside the bar's end there is always room: the axis is made half as long again.
            axes.annotate(
                text,
                (max(measured, factor * (time.expected or 0.0)), row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=10,
            )
        axes.barh([0], [0], color="#777777", label="measured")
        axes.plot([], [], color=_INK, linestyle="none", marker="|", markersize=11,
                  markeredgewidth=2.2, label="expected")  # fmt: skip
        _finish(axes, len(known), 1.6 * most, label)
        figure.legend(loc="outside lower left", ncols=2, handlelength=1.4, columnspacing=1.6)
    return figure


def update_times_words(runs: Sequence[ReportedRun]) -> str:
    """What :func:`update_times` shows, for readers who cannot see it."""
    known = _known(runs)
    factor, label = _axis_of_updates([run for _, run, _ in known], [time for *_, time in known])
    parts = []
    for _, run, time in known:
        text = f"{run.name}: measured {_value(factor * time.measured)}"
        if time.expected is not None:
            text += f", expected {_value(factor * time.expected)}"
        parts.append(text)
    return f"Bars of {label}, a mark at what was expected. {'; '.join(parts)}."


def _known(runs: Sequence[ReportedRun]) -> list[tuple[int, ReportedRun, UpdateTime]]:
    timed = ((index, run, update_time(run)) for index, run in enumerate(runs))
    return [(index, run, time) for index, run, time in timed if time is not None]


def _axis_of_updates(runs: Sequence[ReportedRun], times: Sequence[UpdateTime]) -> tuple[float, str]:
    """By what times are multiplied, and what the axis is then called."""
    if shared_unit(runs) != "s":
        return 1.0, time_label(runs).replace("time", "time per update", 1)
    unit, factor = seconds_unit(time.measured for time in times)
    return factor, f"time per update ({unit})"


def _value(value: float) -> str:
    return format_number(float(value))


def learners_time(runs: Sequence[ReportedRun]) -> Figure | None:
    """Stacked bars of what the learners' time went into; None for runs without work rows.

    A single run has a bar for the mean learner and one for each; several have one each, of
    their mean learner. A bar is as long as its run.
    """
    bars = _bars(runs)
    if not bars:
        return None
    alone = len(runs) == 1
    pitch = 0.3 if alone else 0.52
    with plain_style():
        figure = Figure(figsize=(WIDTH, 1.75 + pitch * len(bars)), layout="constrained")
        axes = figure.add_subplot()
        height = 0.72 if alone else 0.42
        ends = stacked_bars(
            axes, SPENT, lambda name: [getattr(spent, name) for _, spent in bars], height=height
        )
        _finish(axes, len(bars), 1.02 * float(ends.max()), time_label(_worked(runs)))
        if alone:
            axes.set_yticks(range(len(bars)), [name for name, _ in bars])
            axes.set_ylim(len(bars) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
            axes.set_ylabel("learner" if len(bars) > 1 else "")
        else:
            for row, (name, _) in enumerate(bars):
                _name(axes, row, name)
        figure.legend(loc="outside lower left", ncols=2, handlelength=1.4, columnspacing=1.2)
    return figure


def learners_time_words(runs: Sequence[ReportedRun]) -> str:
    """What :func:`learners_time` shows, for readers who cannot see it."""
    parts = []
    for name, spent in _bars(runs):
        whole = spent.total or 1.0
        shares = ", ".join(
            f"{100 * value / whole:.0f} % {label}"
            for (_, label, *_), value in zip(SPENT, spent.parts(), strict=True)
            if value > 0.0
        )
        parts.append(f"{name}: {shares}")
    return f"Stacked bars of the time of learners. {'; '.join(parts)}."


def learners_time_caption(runs: Sequence[ReportedRun]) -> str:
    """What the bars and their parts mean."""
    parts = ["each bar is as long as its run"]
    if len(runs) > 1:
        parts[0] += ", and the mean of the run's learners"
    else:
        replaced = [place.name for place in places(runs[0]) if len(place.learners) > 1]
        if replaced and len(_bars(runs)) > 1:
            parts.append(
                f"a bar named like “{replaced[0]}” is of learners that followed each other"
            )
    parts.append(
        "cancelled work: computing and delay of mini-batches that were cancelled or failed"
    )
    parts.append("the rest: starting, restarting, and idle after the last answer")
    return "; ".join(parts)


def _worked(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    return [run for run in runs if run.trace.work]


def _bars(runs: Sequence[ReportedRun]) -> list[tuple[str, Spent]]:
    if len(runs) == 1:
        return list(_bars_of_one(places(runs[0])))
    return [(run.name, mean_spent(places(run))) for run in _worked(runs)]


def _bars_of_one(several: Sequence[Place]) -> Iterable[tuple[str, Spent]]:
    if len(several) > 1:
        yield (
            ("mean" if len(several) <= _MOST_BARS else f"mean of {len(several)}"),
            mean_spent(several),
        )
    if len(several) <= _MOST_BARS:
        for place in several:
            yield place.name, place.spent


def _name(axes: Axes, row: int, name: str) -> None:
    """A run's name above its bar, as much of it as the width holds."""
    text = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    axes.text(0.0, row - 0.26, text, va="bottom", fontsize=11)


def _finish(axes: Axes, bars: int, right: float, label: str) -> None:
    axes.set_ylim(bars - 0.6, -0.75)
    axes.set_xlim(0.0, right or 1.0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(tick))
    axes.set_xlabel(label)
    axes.grid(True, axis="x")
    axes.tick_params(length=3)
