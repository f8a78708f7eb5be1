"""Modules of decoupled runs as rows of text, in words, as a terminal's table, and as JSON."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from gruppetto.report.data import ReportedRun
from gruppetto.report.modules import ModuleReport, ModuleSpent, module_reports, speed, utilisation
from gruppetto.report.table import format_number

__all__ = ["module_json", "modules_rows", "modules_table", "modules_words"]

_MIB: Final = 2.0**20
#: Headings of shares in per cent: attributes of ModuleSpent that are added up.
_SHARES: Final = (
    ("forward", ("forward",)),
    ("backward", ("backward",)),
    ("step", ("step",)),
    ("loading", ("loading",)),
    ("for inputs", ("waiting_for_inputs",)),
    ("for gradients", ("waiting_for_gradients",)),
    ("for others", ("waiting_for_others",)),
    ("start, end", ("start", "end")),
    ("rest", ("rest",)),
)
#: What the terminal adds up.
_WAITING: Final = ("waiting_for_inputs", "waiting_for_gradients", "waiting_for_others")
_IDLE: Final = ("start", "end")


def modules_words(run: ReportedRun) -> str:
    """A run's modules in a sentence: how busy they were, and how fast together."""
    reports = module_reports(run)
    if not reports:
        return "No module has applied a mini-batch."
    shares = [100.0 * each.utilisation for each in reports]
    text = f"{len(reports)} module{'s' * (len(reports) > 1)}"
    if len(reports) > 1:
        mean = 100.0 * (utilisation(run) or 0.0)
        text += (
            f", used {min(shares):.3g} to {max(shares):.3g} % of the time, {mean:.3g} % on average"
        )
    else:
        text += f", used {shares[0]:.3g} % of the time"
    rate = speed(run)
    if rate is not None:
        text += f"; {format_number(rate)} mini-batches per {run.per_unit}"
    return f"{text}."


def modules_rows(run: ReportedRun) -> list[dict[str, str]]:
    """A row of text per module: heading -> text. Columns without any number are left out."""
    reports = module_reports(run)
    texts = [
        {
            "module": str(each.module),
            "begins at": each.begins_at or "-",
            "staleness": format_number(each.max_staleness),
            "used": _percent(each.utilisation),
            **{heading: _percent(_share(each, *names)) for heading, names in _SHARES},
            "peak (MiB)": _mib(each.peak_bytes),
            "predicted (MiB)": _mib(each.predicted_bytes),
        }
        for each in reports
    ]
    empty = {key for key in (texts[0] if texts else ()) if all(row[key] == "-" for row in texts)}
    return [{key: text for key, text in row.items() if key not in empty} for row in texts]


def modules_table(run: ReportedRun) -> Table:
    """The same numbers for the terminal, with waiting and idling added up."""
    table = Table(
        title=Text(run.name),
        caption=f"in % of each module's time; {modules_words(run)}",
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    rows = [
        {
            "module": str(each.module),
            "stale": format_number(each.max_staleness),
            "used": _percent(each.utilisation),
            "forward": _percent(_share(each, "forward")),
            "backward": _percent(_share(each, "backward")),
            "step": _percent(_share(each, "step")),
            "load": _percent(_share(each, "loading")),
            "wait": _percent(_share(each, *_WAITING)),
            "idle": _percent(_share(each, *_IDLE)),
            "rest": _percent(_share(each, "rest")),
            "peak\nMiB": _mib(each.peak_bytes),
            "predicted\nMiB": _mib(each.predicted_bytes),
        }
        for each in module_reports(run)
    ]
    shown = [key for key in (rows[0] if rows else ()) if any(row[key] != "-" for row in rows)]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    return table


def module_json(run: ReportedRun) -> list[dict[str, Any]]:
    """One dict per module, for scripts: counts, shares in [0, 1], seconds, bytes."""
    return [
        {
            "module": each.module,
            "updates": each.updates,
            "mean_staleness": each.mean_staleness,
            "max_staleness": each.max_staleness,
            "utilisation": each.utilisation,
            "shares": {field.name: _share(each, field.name) for field in fields(ModuleSpent)},
            "time": each.spent.total,
            "mini_batches_per_time": each.rate,
            "begins_at": each.begins_at,
            "parameters": each.parameters,
            "peak_bytes": each.peak_bytes,
            "predicted_bytes": each.predicted_bytes,
        }
        for each in module_reports(run)
    ]


def _share(each: ModuleReport, *names: str) -> float:
    total = each.spent.total
    return sum(getattr(each.spent, name) for name in names) / total if total else 0.0


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f}"


def _mib(number: int | None) -> str:
    return (
        "-"
        if number is None
        else f"{number / _MIB:,.3g}"
        if number < 1000 * _MIB
        else f"{number / _MIB:,.0f}"
    )
