"""One page about simulations: plots, a table, and the command that makes it again.

Everything comes in as the records of ``gruppetto simulate --json``; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from gruppetto.errors import InvalidSetting
from gruppetto.report import simulation_plots, simulation_share_plots
from gruppetto.report.simulated import (
    Simulated,
    case_name,
    cell_colour,
    read_simulations,
    time_unit,
)
from gruppetto.report.table import format_number
from gruppetto.report.templating import Plot, drawn, render_template
from gruppetto.trace.folder import write_atomically

__all__ = ["render_simulation_page", "write_simulation_page"]

_KINDS: Final = {
    "exact": "exact",
    "upper-bound": "upper bound",
    "unknown": "unknown",
}
_DOTS: Final = (
    "dots: simulated; lines: what theory says, dashed where it is an upper bound; no line where "
    "it says nothing"
)


def write_simulation_page(
    records: Sequence[Mapping[str, Any]], path: Path, command: str | None = None
) -> Path:
    """Write simulations as one self-contained HTML file.

    Args:
        records: at least one, with the keys of ``gruppetto simulate --json``, in the order to show
            them in; of one law of delays, one number of updates and the same seeds.
        path: the file, replaced as a whole if it exists; missing folders are made.
        command: what to type for this page.

    Returns:
        The path.

    Raises:
        InvalidSetting: no simulations.
        RunFolderError: the file cannot be written.
    """
    write_atomically(path, render_simulation_page(records, command).encode())
    return path


def render_simulation_page(records: Sequence[Mapping[str, Any]], command: str | None = None) -> str:
    """The page that :func:`write_simulation_page` writes, as text."""
    if not records:
        raise InvalidSetting("a page about simulations needs at least one, got none")
    cases = read_simulations(records)
    return render_template(
        "simulation.html",
        title=_title(cases),
        summary=_summary(cases, records[0]),
        remarks=None,
        table=_table(cases, records[0]),
        colours=[cell_colour(case.cell) for case in cases],
        theory=_theory(cases),
        plots=_plots(cases, records[0]),
        settings=_settings(cases, records[0]),
        command=command,
    )


def _title(cases: Sequence[Simulated]) -> str:
    numbers = list(dict.fromkeys(case.learners for case in cases))
    if len(cases) == 1:
        return f"Simulation of {cases[0].protocol} with {_learners(cases[0].learners)}"
    if len(numbers) == 1:
        return f"{len(cases)} simulations with {_learners(numbers[0])}"
    return f"{len(cases)} simulations with {min(numbers):,} to {max(numbers):,} learners"


def _learners(number: int) -> str:
    return "1 learner" if number == 1 else f"{number:,} learners"


def _summary(cases: Sequence[Simulated], record: Mapping[str, Any]) -> str:
    law = record["delay"]
    known = [case for case in cases if case.throughput]
    if len(known) < 2:
        case = cases[0]
        if case.update_time is None or case.throughput is None:
            return f"Mini-batches take {law} seconds."
        return (
            f"Where a mini-batch takes {law} seconds, an update takes {_seconds(case.update_time)} "
            f"and uses {case.k:,} of them: {_rate(case)}."
        )
    best = max(known, key=lambda case: case.throughput or 0.0)
    worst = min(known, key=lambda case: case.throughput or 0.0)
    stale = max(cases, key=lambda case: case.mean_staleness)
    text = (
        f"Where a mini-batch takes {law} seconds, {_full_name(best, cases)} applies most of them, "
        f"{_rate(best)}{_nearly(best, known)}, and {_full_name(worst, cases)} fewest, "
        f"{_rate(worst)}."
    )
    if stale.mean_staleness > 0.0:
        text += (
            f" Gradients are stalest in {_full_name(stale, cases)}: "
            f"{stale.mean_staleness:.2f} updates in the mean."
        )
    return text


def _nearly(best: Simulated, cases: Sequence[Simulated]) -> str:
    """How many others are as good, but for chance."""
    close = sum((case.throughput or 0.0) > 0.98 * (best.throughput or 0.0) for case in cases) - 1
    if close < 1:
        return ""
    return f" ({close} {'others come' if close > 1 else 'other comes'} within 2 %)"


def _full_name(case: Simulated, cases: Sequence[Simulated]) -> str:
    alike = len({each.learners for each in cases}) == 1
    return case.protocol if alike else f"{case.protocol} with {_learners(case.learners)}"


def _seconds(value: float) -> str:
    unit, factor = time_unit([value])
    return f"{format_number(factor * value)} {unit}"


def _rate(case: Simulated) -> str:
    return f"{format_number(float(case.throughput or 0.0))} per second"


# --------------------------------------------------------------------------- table


def _table(cases: Sequence[Simulated], record: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per simulation: heading -> text."""
    times = [case.update_time for case in cases if case.update_time is not None]
    unit, factor = time_unit(times)

    def time(value: float | None) -> str:
        return "not finite" if value is None else format_number(factor * value)

    rows = []
    for case in cases:
        row = {
            "protocol": case.protocol,
            "learners": f"{case.learners:,}",
            "K": f"{case.k:,}",
            f"{unit} per update": time(case.update_time),
        }
        if record["repeats"] > 1:
            row["lowest to highest"] = f"{time(case.lowest)} to {time(case.highest)}"
        row |= {
            "theory": _expected(case, factor),
            "mini-batches per s": format_number(float(case.throughput or 0.0)),
            "mean staleness": f"{case.mean_staleness:.2f}",
            "95 % at most": f"{case.p95_staleness:,}",
            "max": f"{case.max_staleness:,}",
            "fresh (%)": f"{100 * case.fresh:.0f}",
            "cancelled": f"{case.cancelled:,}",
            "cancelled (% of time)": f"{100 * case.cancelled_time:.0f}",
            "idle (% of time)": f"{100 * case.idle:.0f}",
        }
        rows.append(row)
    return rows


def _expected(case: Simulated, factor: float) -> str:
    """What theory says of the time per update, with its kind in words."""
    if case.expected is None:
        return "unknown"
    value = format_number(factor * case.expected)
    return f"at most {value}" if case.kind == "upper-bound" else f"{value}, {_KINDS[case.kind]}"


def _theory(cases: Sequence[Simulated]) -> list[tuple[str, str]]:
    """For each thing that theory says: of which simulations, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        found.setdefault((_KINDS[case.kind], case.why), []).append(case.protocol)
    return [
        (f"{kind}: {why}", ", ".join(dict.fromkeys(names))) for (kind, why), names in found.items()
    ]


def _settings(cases: Sequence[Simulated], record: Mapping[str, Any]) -> dict[str, str]:
    seed, repeats = record["seed"], record["repeats"]
    seeds = f"{seed}"
    if repeats > 1:
        seeds = f"{seed} to {seed + repeats - 1}; numbers are medians over them"
    settings = {"delay": record["delay"], "updates": f"{record['updates']:,}", "seeds": seeds}
    if record["delays"]:
        settings["own delays"] = ", ".join(
            f"learner {learner}: {law}" for learner, law in record["delays"].items()
        )
    return settings


# --------------------------------------------------------------------------- plots


def _plots(cases: Sequence[Simulated], record: Mapping[str, Any]) -> list[Plot]:
    times = "; ".join(
        f"{case_name(case, cases)}: {_seconds(case.update_time)}, theory {_spoken(case)}"
        for case in cases
        if case.update_time is not None
    )
    stale = simulation_share_plots.shown_histograms(cases)
    spread = "; ".join(
        f"{case_name(case, cases)}: mean {case.mean_staleness:.2f}, max {case.max_staleness}"
        for case in stale
    )
    shares = "; ".join(
        f"{case_name(case, cases)}: "
        + ", ".join(
            f"{100 * getattr(case, attribute):.0f} % {label}"
            for attribute, label, *_ in simulation_share_plots.SPENT
        )
        for case in cases[: simulation_share_plots.MOST_BARS]
    )
    dots = _DOTS
    if record["repeats"] > 1:
        dots += f"; bars through the dots: lowest to highest of {record['repeats']} seeds"
    over_k = simulation_plots.against_k(cases)
    over_learners = simulation_plots.against_learners(cases)
    rows = None
    if over_k is None and over_learners is None:
        rows = simulation_plots.side_by_side(cases)
    figures: list[tuple[Figure | None, str, str, str]] = [
        (over_k, "Time per update against K", f"Dots and lines. {times}.", dots),
        (over_learners, "Time per update against learners", f"Dots and lines. {times}.", dots),
        (rows, "Time per update", f"Dots, and marks at what theory says. {times}.", dots),
        (
            simulation_share_plots.staleness_histograms(cases),
            "Staleness",
            f"Histograms of staleness. {spread}.",
            _staleness_caption(cases, stale),
        ),
        (
            simulation_share_plots.learners_time(cases),
            "Where the learners' time goes",
            f"Stacked bars of shares of the learners' time. {shares}.",
            _spent_caption(cases),
        ),
    ]
    return drawn(figures)


def _spoken(case: Simulated) -> str:
    if case.expected is None:
        return "unknown"
    at_most = "at most " if case.kind == "upper-bound" else ""
    return f"{at_most}{_seconds(case.expected)}"


def _staleness_caption(cases: Sequence[Simulated], shown: Sequence[Simulated]) -> str:
    parts = [
        "updates between reading the weights and applying the gradient; bars hold at least "
        "99.5 % of the gradients"
    ]
    late = sum(case.max_staleness > 0 for case in cases)
    if late > len(shown):
        parts.append(f"{len(shown)} of {late} simulations with stale gradients")
    if late < len(cases):
        parts.append("not shown: those where no gradient is late")
    if len({case.learners for case in cases}) > 1:
        parts.append("P: learners")
    return "; ".join(parts)


def _spent_caption(cases: Sequence[Simulated]) -> str:
    parts = ["messages and the server take no time here"]
    if any(case.cell == "k-batch-sync" for case in cases):
        parts.append("cancelled time of k-batch-sync: estimated from updates of its own")
    if len(cases) > simulation_share_plots.MOST_BARS:
        parts.append(f"the first {simulation_share_plots.MOST_BARS} of {len(cases)}")
    return "; ".join(parts)
