"""``gruppetto simulate``: how fast and how stale, without training anything."""

from __future__ import annotations

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
    ("idle", "idle_fraction", "{:.0%}"),
)

#: Characters that the table needs.
_WIDTH: Final = 130


@click.command(
    epilog="Example: gruppetto simulate --protocol hardsync --protocol k-async:k=16 "
    "--learners 20 --delay pareto:shape=2,scale=1"
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
@quiet
@as_json
def simulate(
    protocols: tuple[str, ...],
    learners: tuple[int, ...],
    delay: tuple[str, ...],
    updates: int,
    seed: int,
    repeats: int,
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
    records = simulate_all(
        protocols or ("hardsync",),
        learners or (4,),
        delay=laws[0] if laws else "constant:value=1",
        delays=own,
        updates=updates,
        seed=seed,
        repeats=repeats,
        progress=False if quiet else None,
    )
    if not as_json:
        _show(records)
    elif len(records) == 1:
        print_json(records[0])
    else:
        print_json({"runs": records, "report": None})


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
