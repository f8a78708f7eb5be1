"""The figure of protocols that adapt K: how many gradients an update waits for, over run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS
from gruppetto.protocols.messages import LearnerJoined, LearnerLost, ProgressMeasured
from gruppetto.report.data import ReportedRun
from gruppetto.report.plots import time_label
from gruppetto.report.style import WIDTH, legend_size, run_style, tick, wrapped
from gruppetto.report.svg import plain_style

__all__ = ["Waiting", "waiting_against_time", "waiting_of", "waiting_words"]

#: Marks on a line, about.
_MARKS: Final = 12


@dataclass(frozen=True)
class Waiting:
    """K of a run that adapts it, from the run's beginning to its end."""

    #: When K took each value, run time; the last is the end of the run.
    times: tuple[float, ...]
    #: K from each of these times on; the last value twice.
    values: tuple[int, ...]
    #: Losses measured; None where one was not finite.
    losses: tuple[float | None, ...]


def waiting_of(run: ReportedRun) -> Waiting | None:
    """K over time, folded from the run's events; None for a protocol that does not adapt."""
    try:
        protocol = PROTOCOLS.parse(str(run.settings.get("protocol")))
    except InvalidSetting:  # of another version of the library
        return None
    learners = run.settings.get("learners")
    if protocol.measures_every is None or not isinstance(learners, int):
        return None
    live = set(range(learners))
    times, values, losses = [0.0], [protocol.num_to_wait(learners)], []
    for row in run.trace.events:
        if row.type not in ("LearnerJoined", "LearnerLost", "ProgressMeasured"):
            continue
        match row.decode():
            case LearnerJoined(learner):
                live.add(learner)
            case LearnerLost(learner):
                live.discard(learner)
            case ProgressMeasured(loss):
                losses.append(loss)
                protocol = protocol.measured(loss, len(live))
        k = protocol.num_to_wait(len(live))
        if k != values[-1]:
            times.append(row.time)
            values.append(k)
    times.append(max(run.outcome.time, times[-1]))
    values.append(values[-1])
    return Waiting(tuple(times), tuple(values), tuple(losses))


def waiting_against_time(runs: Sequence[ReportedRun]) -> Figure | None:
    """Steps of K over run time, one line for each run that adapts it; None where none does."""
    known = _known(runs)
    if not known:
        return None
    with plain_style():
        columns, legend_height = legend_size([run.name for _, run, _ in known])
        figure = Figure(figsize=(WIDTH, 3.0 + legend_height), layout="constrained")
        axes = figure.add_subplot()
        for index, run, waiting in known:
            style = run_style(index)
            axes.step(
                waiting.times,
                waiting.values,
                where="post",
                color=style.colour,
                linestyle=style.line,
                linewidth=1.7,
                marker=style.marker,
                markersize=5,
                markeredgecolor="white",
                markeredgewidth=0.5,
                markevery=max(1, len(waiting.times) // _MARKS),
                label=wrapped(run.name),
            )
        axes.set_xlabel(time_label([run for _, run, _ in known]))
        axes.set_ylabel("K (gradients per update)")
        axes.set_xlim(left=0.0)
        axes.set_ylim(0.0, 1.12 * max(max(waiting.values) for *_, waiting in known))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(True)
        axes.tick_params(length=3)
        figure.legend(loc="outside lower left", ncols=columns, handlelength=3.2, columnspacing=1.4)
    return figure


def waiting_words(runs: Sequence[ReportedRun]) -> str:
    """What :func:`waiting_against_time` shows, for readers who cannot see it."""
    parts = [
        f"{run.name}: from {waiting.values[0]} to {waiting.values[-1]} in "
        f"{len(waiting.values) - 2} steps"
        for _, run, waiting in _known(runs)
    ]
    return f"Step lines of K over run time. {'; '.join(parts)}."


def _known(runs: Sequence[ReportedRun]) -> list[tuple[int, ReportedRun, Waiting]]:
    folded = ((index, run, waiting_of(run)) for index, run in enumerate(runs))
    return [(index, run, waiting) for index, run, waiting in folded if waiting is not None]
