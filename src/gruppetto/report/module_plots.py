"""Figures of decoupled runs: where each module's time went, and how the first passes lay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gruppetto.report.bars import Kind, stacked_bars
from gruppetto.report.data import ReportedRun
from gruppetto.report.modules import ModuleReport, Pass, first_passes, module_reports
from gruppetto.report.plots import time_label
from gruppetto.report.style import WIDTH, tick
from gruppetto.report.svg import plain_style

__all__ = [
    "MODULE_SPENT",
    "modules_time",
    "modules_time_caption",
    "modules_time_words",
    "passes_caption",
    "passes_strip",
    "passes_words",
]

_FORWARD: Final = "#0072B2"
_BACKWARD: Final = "#E69F00"
_STEP: Final = "#7A5195"
#: Where a module's time went: attribute of ModuleSpent, name, colour, hatch; waiting is as pale as
#: what is waited for is strong.
MODULE_SPENT: Final[tuple[Kind, ...]] = (
    ("forward", "forward", _FORWARD, ""),
    ("backward", "backward", _BACKWARD, ""),
    ("step", "step", _STEP, ""),
    ("loading", "loading data", "#009E73", "...."),
    ("waiting_for_inputs", "waiting for inputs", "#9CCFEF", ""),
    ("waiting_for_gradients", "waiting for gradients", "#F6D998", ""),
    ("waiting_for_others", "waiting for others", "#D3C4DE", ""),
    ("start", "start", "#D5D8DC", "////"),
    ("end", "end", "#D5D8DC", "\\\\\\\\"),
    ("rest", "the rest", "#D5D8DC", ""),
)
_COLOURS: Final = {"forward": _FORWARD, "backward": _BACKWARD, "step": _STEP}
#: Runs of a report that get a strip, and letters of a name above one.
_MOST_STRIPS: Final = 6
_LONGEST: Final = 54
#: Updates of each module in a strip.
_UPDATES: Final = 10
#: Points: of a strip's numbers, of one digit, of the narrowest bar with an edge, and about how wide
#: a strip is.
_NUMBERS: Final = 8.0
_DIGIT: Final = 5.1
_EDGED: Final = 4.0
_POINTS: Final = 330.0


def modules_time(runs: Sequence[ReportedRun]) -> Figure | None:
    """Stacked bars of what each module's time went into; None where no run has modules.

    One group of bars per run; a bar is as long as its run, and says how much of it was used.
    """
    groups = [(run, reports) for run in runs if (reports := module_reports(run))]
    if not groups:
        return None
    # A blank row above each group holds the name; one run alone needs none.
    rows: list[ModuleReport | None] = []
    names: list[tuple[int, str]] = []
    for run, reports in groups:
        if len(runs) > 1:
            names.append((len(rows), run.name))
            rows.append(None)
        rows += reports
    with plain_style():
        figure = Figure(figsize=(WIDTH, 2.2 + 0.27 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        ends = stacked_bars(
            axes,
            MODULE_SPENT,
            lambda part: [0.0 if each is None else getattr(each.spent, part) for each in rows],
            height=0.74,
        )
        for row, each in enumerate(rows):
            if each is not None:
                axes.annotate(
                    f"{100.0 * each.utilisation:.0f} %",
                    (float(ends[row]), row),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=10,
                )
        for row, name in names:
            axes.text(0.0, row + 0.05, _shortened(name), va="center", fontsize=11)
        bars = [(row, str(each.module)) for row, each in enumerate(rows) if each is not None]
        axes.set_yticks([row for row, _ in bars], [number for _, number in bars])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_ylabel("module")
        _finish(axes, 1.15 * float(ends.max()), time_label([run for run, _ in groups]))
        figure.legend(loc="outside lower left", ncols=2, handlelength=1.4, columnspacing=1.2)
    return figure


def modules_time_words(runs: Sequence[ReportedRun]) -> str:
    """What :func:`modules_time` shows, for readers who cannot see it."""
    parts = []
    for run in runs:
        for each in module_reports(run):
            whole = each.spent.total or 1.0
            shares = ", ".join(
                f"{100 * value / whole:.0f} % {label}"
                for (_, label, *_), value in zip(MODULE_SPENT, each.spent.parts(), strict=True)
                if value > 0.0
            )
            parts.append(f"{run.name}, module {each.module}: {shares}")
    return f"Stacked bars of the time of modules. {'; '.join(parts)}."


def modules_time_caption(runs: Sequence[ReportedRun]) -> str:
    """What the bars and their parts mean."""
    parts = [
        "each bar is as long as its run; in per cent, how much of it went into passes and steps",
        "others: room to send, and barriers",
        "start and end: before a module's first pass and after its last update",
        "the rest: sending, and what no row accounts for",
    ]
    if any(not run.outcome.has_ended for run in runs if run.trace.modules):
        parts.append("of a run that did not end, up to each module's last update")
    return "; ".join(parts)


def passes_strip(runs: Sequence[ReportedRun]) -> Figure | None:
    """The first passes of each module over run time, one panel per run; None where none has any.

    Panels have one axis where times can be compared and none would shrink to a corner of it.
    """
    shown = _shown(runs)
    if not shown:
        return None
    several = len(runs) > 1
    heights = [0.34 * max(each.module for each in passes) for _, passes in shown]
    lasts = [max(each.end for each in passes) for _, passes in shown]
    is_shared = len({run.time_unit for run, _ in shown}) == 1 and min(lasts) > 0.3 * max(lasts)
    with plain_style():
        extra = 0.3 if is_shared else 0.5
        height = 1.1 + sum(heights) + extra * len(shown)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        panels = figure.subplots(
            len(shown), 1, squeeze=False, sharex=is_shared, height_ratios=heights
        )[:, 0]
        for axes, (run, passes), last in zip(panels, shown, lasts, strict=True):
            right = max(lasts) if is_shared else last
            _strip(axes, passes, right)
            is_last = axes is panels[-1]
            label = time_label([each for each, _ in shown] if is_shared else [run])
            _finish(axes, right, label if is_last or not is_shared else "")
            axes.set_yticks(range(1, max(each.module for each in passes) + 1))
            if several:
                axes.set_title(_shortened(run.name), loc="left", pad=3)
        figure.supylabel("module", fontsize=11.5)
        figure.legend(
            handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()],
            loc="outside lower left",
            ncols=3,
            handlelength=1.4,
            columnspacing=1.6,
        )
    return figure


def passes_words(runs: Sequence[ReportedRun]) -> str:
    """What :func:`passes_strip` shows, for readers who cannot see it."""
    parts = []
    for run, passes in _shown(runs):
        column = [each for each in passes if each.module == 1 and each.kind != "step"]
        order = ", ".join(f"{each.kind} {each.mini_batch}" for each in column[:6])
        parts.append(f"{run.name}: module 1 begins with {order}")
    return f"Passes of each module as bars over run time. {'; '.join(parts)}."


def passes_caption(runs: Sequence[ReportedRun]) -> str:
    """What the strip's bars are, and which runs have none."""
    text = (
        f"mini-batches, by number, up to {_UPDATES} updates of each module; forward passes before "
        "a module's first update are drawn as long as each other, as far as that fits"
    )
    left_out = sum(1 for run in runs if run.trace.modules) - _MOST_STRIPS
    return text + (f"; {left_out} further runs are not drawn" if left_out > 0 else "")


def _shown(runs: Sequence[ReportedRun]) -> list[tuple[ReportedRun, list[Pass]]]:
    known = [(run, passes) for run in runs if (passes := first_passes(run, _UPDATES))]
    return known[:_MOST_STRIPS]


def _strip(axes: Axes, passes: Sequence[Pass], right: float) -> None:
    for kind, colour in _COLOURS.items():
        bars = [each for each in passes if each.kind == kind]
        axes.barh(
            [each.module for each in bars],
            [each.end - each.start for each in bars],
            left=[each.start for each in bars],
            height=0.8,
            color=colour,
            edgecolor="white",
            # A white edge would leave nothing of what is narrow.
            linewidth=[0.5 if _room(each, right) > _EDGED else 0.0 for each in bars],
        )
    for kind in ("forward", "backward"):
        bars = [each for each in passes if each.kind == kind]
        fitting = [each for each in bars if _fits(each, right)]
        # A few numbers here and there say less than none.
        for each in fitting if len(fitting) >= 0.75 * len(bars) else ():
            axes.text(
                (each.start + each.end) / 2,
                each.module,
                str(each.mini_batch),
                ha="center",
                va="center_baseline",
                fontsize=_NUMBERS,
                color="white" if kind == "forward" else "#222222",
            )
    axes.set_ylim(max(each.module for each in passes) + 0.5, 0.5)


def _fits(each: Pass, right: float) -> bool:
    return _room(each, right) >= _DIGIT * len(str(each.mini_batch)) + 1.5


def _room(each: Pass, right: float) -> float:
    """About how many points wide it is drawn."""
    return (each.end - each.start) / right * _POINTS if right else 0.0


def _finish(axes: Axes, right: float, label: str) -> None:
    axes.set_xlim(0.0, right or 1.0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(tick))
    axes.set_xlabel(label)
    axes.grid(True, axis="x")
    axes.tick_params(length=3)
    axes.tick_params(axis="y", length=0)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
