"""``gruppetto simulate``: how fast and how stale, without training anything."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from gruppetto.cli.options import as_json, quiet, split_delays
from gruppetto.cli.output import print_json
from gruppetto.errors import InvalidSetting

#: Heading, key and form of a column.
_COLUMNS: Final = (
    ("protocol", "protocol", "{}"),
    ("learners", "learners", "{}"),
    ("s per update", "mean_update_time", "{:.4g}"),
    ("expected", "expected_update_time", "{:.4g}"),
    ("total, s", "total_time", "{:.5g}"),
    ("staleness", "mean_staleness", "{:.2f}"),
    ("p95", "p95_staleness", "{}"),
    ("max", "max_staleness", "{}"),
    ("fresh", "fresh_fraction", "{:.0%}"),
    ("applied", "mini_batches_applied", "{:,}"),
    ("cancelled", "mini_batches_cancelled", "{:,}"),
    ("discarded", "mini_batches_discarded", "{:,}"),
    ("idle", "idle_fraction", "{:.0%}"),
)

#: Characters that the table needs.
_WIDTH: Final = 150


@click.command(
    epilog="Example: gruppetto simulate --sweep k --learners 20 --delay pareto:shape=2,scale=1 "
    "--report simulation.html"
)
@click.option(
    "--protocol",
    "protocols",
    multiple=True,
    metavar="NAME:K=V",
    help="Who waits for whom; see `gruppetto protocols`. Several make a table.  [hardsync]",
)
@click.option("--learners", multiple=True, type=int, help="How many. Several make a table.  [4]")
@click.option(
    "--sweep",
    type=click.Choice(["k"]),
    help="k: k-sync, k-batch-sync, k-async and k-batch-async, each with up to eight K from 1 to "
    "the number of learners; beside what --protocol names.",
)
@click.option(
    "--delay",
    multiple=True,
    metavar="[I=]LAW:K=V",
    help="How long a mini-batch takes, in seconds; I=LAW for learner I alone; see "
    "`gruppetto delays`.  [constant:value=1]",
)
@click.option("--updates", type=int, default=10_000, help="How many to simulate.  [10000]")
@click.option("--seed", type=int, default=0, help="Of the delays.  [0]")
@click.option(
    "--repeats",
    type=int,
    default=1,
    help="Simulate so often, with the next seed each time; medians are shown.  [1]",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Write one page with plots and the table.",
)
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="Draw time per update: against K or learners, where there are several for a line.",
)
@quiet
@as_json
def simulate(
    protocols: tuple[str, ...],
    learners: tuple[int, ...],
    sweep: str | None,
    delay: tuple[str, ...],
    updates: int,
    seed: int,
    repeats: int,
    report: Path | None,
    png: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Time per update and staleness of protocols, from the delays alone.

    The same delays as a run with this seed meets, and the same updates as in virtual time, for
    learners that stay and mini-batches that do not run out.
    """
    from gruppetto.runs.simulate import simulate_all

    laws, own = split_delays(delay)
    if len(laws) > 1:
        raise InvalidSetting(f"delay: expected one law for all learners, got {' and '.join(laws)}")
    for name, path in (("report", report), ("png", png)):
        if path is not None and path.is_dir():
            raise InvalidSetting(f"{name}: expected a file, got the folder {path}")
    protocols = protocols or (() if sweep else ("hardsync",))
    law = laws[0] if laws else "constant:value=1"
    records = simulate_all(
        protocols,
        learners or (4,),
        sweep=sweep is not None,
        delay=law,
        delays=own,
        updates=updates,
        seed=seed,
        repeats=repeats,
        progress=False if quiet else None,
    )
    if report is not None:
        from gruppetto.report.simulation_page import write_simulation_page

        words = ["gruppetto", "simulate"]
        words += [word for each in protocols for word in ("--protocol", each)]
        words += ["--sweep", sweep] if sweep else []
        words += [word for each in learners or (4,) for word in ("--learners", str(each))]
        words += [word for each in delay or (law,) for word in ("--delay", each)]
        words += ["--updates", str(updates), "--seed", str(seed), "--repeats", str(repeats)]
        words += ["--report", report.name]
        write_simulation_page(records, report, shlex.join(words))
    if png is not None:
        from gruppetto.report.simulation_plots import update_times_png

        update_times_png(records, png)
    written = {
        name: None if p is None else str(p) for name, p in (("report", report), ("png", png))
    }
    if as_json:
        print_json({**records[0], **written} if len(records) == 1 else {"runs": records, **written})
        return
    _show(records)
    for name, path in (("report", report), ("picture", png)):
        if path is not None:
            click.echo(f"{name}: {path}")


def _show(records: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading, key, _ in _COLUMNS:
        table.add_column(heading, justify="left" if key == "protocol" else "right")
    for record in records:
        sign = "<= " if record["expected_is"] == "upper-bound" else ""
        table.add_row(
            *(
                "?" if record[key] is None
                else (sign if key == "expected_update_time" else "") + form.format(record[key])
                for _, key, form in _COLUMNS
            )
        )  # fmt: skip
    console = Console(highlight=False)
    # A line that is too long for the terminal is still better than numbers cut short.
    console.width = max(console.width, _WIDTH)
    console.print(table)
