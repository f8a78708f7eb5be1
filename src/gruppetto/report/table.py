"""The results of runs as rows of text, and as a table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from gruppetto.report.accounts import fresh_fraction, gamma
from gruppetto.report.data import ReportedRun, Target, shared_metric, shared_unit
from gruppetto.report.modules import module_reports, num_modules, speed, utilisation
from gruppetto.report.times import UpdateTime, update_time

__all__ = [
    "final_heading",
    "format_metric",
    "format_number",
    "results_table",
    "rows",
    "seconds_unit",
]

_UPDATE_TIME: Final = "time per update"
_RATIO: Final = "ratio to expected"
_FRESH: Final = "fresh (%)"
_GAMMA: Final = "gamma"
_MODULES: Final = "modules"
_SPEED: Final = "mini-batches per"
_PER_MODULE: Final = "staleness per module"
_UTILISATION: Final = "utilisation (%)"
#: Headings that the terminal leaves to the page.
_PAGE_ONLY: Final = (
    _RATIO, _FRESH, _GAMMA, _MODULES, _SPEED, "applied", "cancelled", "discarded", "given up",
    "dropped", "stopped by",
)  # fmt: skip


def format_number(value: float) -> str:
    """Three or four digits that count, thousands set apart.

    >>> [format_number(x) for x in (12345, 1234.5, 123.45, 12.345, 1.2345, 0.012345, 0.0)]
    ['12,345', '1,234', '123.5', '12.3', '1.23', '0.0123', '0']
    """
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size == 0.0:
        return "0"
    if size >= 1000:
        return f"{value:,.0f}" if size < 1e9 else f"{value:.3g}"
    if size >= 1:
        return f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    return f"{value:.3g}"


def format_metric(metric: str, value: float | None) -> str:
    """A metric's value: accuracies in per cent without the sign, others as they are.

    >>> format_metric("accuracy", 0.95275), format_metric("loss", 0.012345)
    ('95.28', '0.01235')
    """
    if value is None:
        return "-"
    return f"{100.0 * value:.2f}" if metric == "accuracy" else f"{value:.4g}"


def final_heading(metric: str | None) -> str:
    """How the column of final values is called."""
    if metric is None:
        return "final accuracy"
    return f"final {metric} (%)" if metric == "accuracy" else f"final {metric}"


def seconds_unit(seconds: Iterable[float]) -> tuple[str, float]:
    """One unit for several wall times, and how many of it are a second.

    >>> seconds_unit([0.063, 1.2]), seconds_unit([2.5, 61.0]), seconds_unit([])
    (('ms', 1000.0), ('s', 1.0), ('s', 1.0))
    """
    smallest = min((value for value in seconds if value > 0.0), default=1.0)
    return ("ms", 1e3) if smallest < 1.0 else ("s", 1.0)


def rows(runs: Sequence[ReportedRun], target: Target | None = None) -> list[dict[str, str]]:
    """One row per run: heading -> text, the same headings in the same order in each.

    Args:
        runs: in the order to show them in.
        target: adds the time at which each run reached it.

    What learners alone have is left out where all runs are decoupled, and what modules alone have
    where none is.
    """
    unit = shared_unit(runs)
    metric = shared_metric(runs)
    in_heading = f" ({unit})" if unit else ""

    def time(run: ReportedRun, value: float | None) -> str:
        if value is None:
            return "not reached"
        return format_number(float(value)) + ("" if unit else f" {run.time_unit}")

    per_update = [update_time(run) for run in runs]
    wall = [each for each, run in zip(per_update, runs, strict=True) if run.time_unit == "s"]
    small, factor = seconds_unit(each.measured for each in wall if each is not None)

    def update_text(run: ReportedRun, each: UpdateTime | None) -> str:
        if each is None:
            return "-"
        unit, times = (small, factor) if run.time_unit == "s" else (run.time_unit, 1.0)
        text = f"{format_number(times * each.measured)} {unit}"
        if each.expected is None:
            return text
        return f"{text} (expected {format_number(times * each.expected)})"

    decoupled = [run.is_decoupled for run in runs]
    table = []
    for run, each in zip(runs, per_update, strict=True):
        outcome = run.outcome
        row = {_first_heading(runs): run.name}
        if target is not None:
            row[f"time to target{in_heading}"] = time(run, run.time_to(target))
        row[final_heading(metric)] = format_metric(
            metric or "", run.final(metric) if metric else None
        )
        row[f"time{in_heading}"] = time(run, outcome.time)
        row["updates"] = format_number(outcome.updates)
        if any(per_update):
            row[_UPDATE_TIME] = update_text(run, each)
        if any(other is not None and other.ratio is not None for other in per_update):
            ratio = each.ratio if each is not None else None
            row[_RATIO] = "-" if ratio is None else f"{ratio:.2f}"
        if any(decoupled):
            row |= _module_texts(run, unit)
        row["mean staleness"] = f"{outcome.mean_staleness:.2f}"
        if not all(decoupled):
            row["max staleness"] = format_number(outcome.max_staleness)
            fresh = fresh_fraction(run)
            row[_FRESH] = "-" if fresh is None else f"{100.0 * fresh:.1f}"
        if any(other.trace.gammas for other in runs):
            measured = gamma(run)
            row[_GAMMA] = "-" if measured is None else f"{measured:.3g}"
        row["applied"] = format_number(outcome.applied)
        if not all(decoupled):  # modules have no leases
            for heading in ("cancelled", "discarded", "given up"):
                count = getattr(outcome, heading.replace(" ", "_"))
                row[heading] = "-" if run.is_decoupled else format_number(count)
        if not all(decoupled) or any(other.outcome.dropped for other in runs):
            row["dropped"] = format_number(outcome.dropped)
        row["stopped by"] = outcome.stopped_by
        table.append(row)
    return table


def _first_heading(runs: Sequence[ReportedRun]) -> str:
    kinds = {run.is_decoupled for run in runs}
    return "run" if len(kinds) > 1 else "method" if kinds == {True} else "protocol"


def _module_texts(run: ReportedRun, unit: str | None) -> dict[str, str]:
    """What stands in a row about modules; ``unit`` is that of all runs, or None."""
    known, used, rate = num_modules(run), utilisation(run), speed(run)
    rate_text = "-" if rate is None else format_number(rate)
    if rate is not None and unit is None:
        rate_text += f" per {run.per_unit}"
    return {
        _MODULES: "-" if known is None else str(known),
        _PER_MODULE: ", ".join(str(each.max_staleness) for each in module_reports(run)) or "-",
        f"{_SPEED} {run.per_unit if unit else 'time'}": rate_text,
        _UTILISATION: "-" if used is None else f"{100.0 * used:.1f}",
    }


def results_table(runs: Sequence[ReportedRun], target: Target | None = None) -> Table:
    """The results for the terminal, one row per run; a run that did not end says so."""
    table = Table(title_justify="left", caption_justify="left")
    if target is not None:
        table.caption = f"target: {target[0]} {target[1]:g}"
    texts = rows(runs, target)
    # What is expected may stand below what was measured, in one piece.
    widest = max(
        (len(part) for r in texts for part in r.get(_UPDATE_TIME, "").split(" (")), default=0
    )
    for number, (run, row) in enumerate(zip(runs, texts, strict=True)):
        shown = [heading for heading in row if _fits_terminal(heading, row, target)]
        if number == 0:
            for column, heading in enumerate(shown):
                if column:  # never narrower than its headings' words, so the names wrap first
                    lines = "\n".join(textwrap.wrap(heading, 11, break_long_words=False))
                    wraps = heading == _UPDATE_TIME
                    table.add_column(
                        lines,
                        justify="right",
                        no_wrap=not wraps,
                        min_width=widest + 1 if wraps else None,
                    )
                else:
                    table.add_column(heading, overflow="fold")
        name = row[shown[0]] + ("" if run.outcome.has_ended else " (did not end)")
        # Text, so that square brackets in a label are not taken for markup.
        table.add_row(Text(name), *(row[heading] for heading in shown[1:]))
    return table


def _fits_terminal(heading: str, row: Mapping[str, str], target: Target | None) -> bool:
    """Six columns fit; what is more telling takes the place of what is less."""
    shows_update_time = _RATIO in row and _UTILISATION not in row
    if _UTILISATION in row and heading in ("mean staleness", "max staleness", _PER_MODULE):
        # Beside runs with learners, staleness is told in a way that fits both.
        return heading == ("mean staleness" if "max staleness" in row else _PER_MODULE)
    if heading == _UPDATE_TIME:
        return shows_update_time
    if heading == "max staleness":
        return not shows_update_time
    if heading.startswith("time") and not heading.startswith("time to target"):
        return target is None
    return not heading.startswith(_PAGE_ONLY)
