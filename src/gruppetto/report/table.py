"""The results of runs as rows of text, and as a table for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from gruppetto.report.data import ReportedRun, Target, shared_metric, shared_unit

__all__ = ["final_heading", "format_metric", "format_number", "results_table", "rows"]

#: Headings that the terminal leaves to the page.
_PAGE_ONLY = ("applied", "cancelled", "discarded", "given up", "dropped", "stopped by")


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


def rows(runs: Sequence[ReportedRun], target: Target | None = None) -> list[dict[str, str]]:
    """One row per run: heading -> text, the same headings in the same order in each.

    Args:
        runs: in the order to show them in.
        target: adds the time at which each run reached it.
    """
    unit = shared_unit(runs)
    metric = shared_metric(runs)
    in_heading = f" ({unit})" if unit else ""

    def time(run: ReportedRun, value: float | None) -> str:
        if value is None:
            return "not reached"
        return format_number(float(value)) + ("" if unit else f" {run.time_unit}")

    table = []
    for run in runs:
        outcome = run.outcome
        row = {"protocol": run.name}
        if target is not None:
            row[f"time to target{in_heading}"] = time(run, run.time_to(target))
        row[final_heading(metric)] = format_metric(
            metric or "", run.final(metric) if metric else None
        )
        row[f"time{in_heading}"] = time(run, outcome.time)
        row["updates"] = format_number(outcome.updates)
        row["mean staleness"] = f"{outcome.mean_staleness:.2f}"
        row["max staleness"] = format_number(outcome.max_staleness)
        row["applied"] = format_number(outcome.applied)
        row["cancelled"] = format_number(outcome.cancelled)
        row["discarded"] = format_number(outcome.discarded)
        row["given up"] = format_number(outcome.given_up)
        row["dropped"] = format_number(outcome.dropped)
        row["stopped by"] = outcome.stopped_by
        table.append(row)
    return table


def results_table(runs: Sequence[ReportedRun], target: Target | None = None) -> Table:
    """The results for the terminal, one row per run; a run that did not end says so."""
    table = Table(title_justify="left", caption_justify="left")
    if target is not None:
        table.caption = f"target: {target[0]} {target[1]:g}"
    for number, (run, row) in enumerate(zip(runs, rows(runs, target), strict=True)):
        # Six columns fit a terminal: the run's time gives way to the time to target.
        shown = [
            heading
            for heading in row
            if heading not in _PAGE_ONLY
            and (target is None or not heading.startswith("time") or "target" in heading)
        ]
        if number == 0:
            for column, heading in enumerate(shown):
                if column:  # never narrower than its headings' words, so the names wrap first
                    lines = "\n".join(textwrap.wrap(heading, 11, break_long_words=False))
                    table.add_column(lines, justify="right", no_wrap=True)
                else:
                    table.add_column(heading, overflow="fold")
        name = row["protocol"] + ("" if run.outcome.has_ended else " (did not end)")
        # Text, so that square brackets in a label are not taken for markup.
        table.add_row(Text(name), *(row[heading] for heading in shown[1:]))
    return table
