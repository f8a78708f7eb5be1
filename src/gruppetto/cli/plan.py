"""``gruppetto plan``: which protocol, how many to wait for, and what it gains."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table

from gruppetto.cli.options import OPTIONS, as_json, quiet, split_delays
from gruppetto.cli.output import print_json
from gruppetto.errors import InvalidSetting

if TYPE_CHECKING:
    from gruppetto.runs.plan_result import Assessment, Plan

#: Options of ``train`` that pilot runs take, too.
_PASSED_ON: Final = (
    "--model", "--data", "--optimizer", "--scale-lr", "--modulation", "--compensation", "--clip",
    "--evaluate-every", "--recalibrate-bn", "--threads", "--device",
)  # fmt: skip
#: What is said of an option here, where that differs from ``train``.
_HELP: Final = {"--evaluate-every": "Epochs between evaluations of pilot runs.  [0.1]"}
#: Choices shown.
_ROWS: Final = 10
#: Characters that the table needs.
_WIDTH: Final = 120


def _passed_on(function: Any) -> Any:
    for option in reversed(OPTIONS):
        if option.flag in _PASSED_ON:
            text = _HELP.get(option.flag, option.help)
            function = click.option(
                option.flag, type=option.type, metavar=option.metavar, help=text
            )(function)
    return function


@click.command(
    epilog="Example: gruppetto plan digits --delay exponential:mean=1 --learners 8 "
    "--target accuracy=0.95"
)
@click.argument("task", required=False)
@click.option(
    "--delay",
    multiple=True,
    metavar="[I=]LAW:K=V",
    help="How long a mini-batch takes, in seconds; I=LAW for learner I alone; see "
    "`gruppetto delays`.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Instead: where it was measured, the folder of a run or a file of seconds (a number per "
    "line, CSV, Parquet).",
)
@click.option("--learners", type=int, help="How many.  [the traced run's, else 4]")
@click.option(
    "--target", metavar="METRIC=X", help="What to reach soonest, like accuracy=0.95.  [the run's]"
)
@click.option(
    "--batch-size",
    type=int,
    help="Samples of one mini-batch, per learner; the delays are its.  [the run's, the task's]",
)
@click.option(
    "--fixed-share",
    type=float,
    default=1.0,
    help="Of a mini-batch's time, what does not depend on its size, from 0 to 1. Below 1, other "
    "sizes are looked at.  [1]",
)
@click.option(
    "--budget",
    type=float,
    help="Epochs of training, all pilot runs together.  [30 runs', at most 300]",
)
@click.option("--seed", type=int, default=0, help="Of everything random.  [0]")
@_passed_on
@click.option("--report", type=click.Path(path_type=Path), help="Also write a page: FILE.html.")
@quiet
@as_json
def plan(
    task: str | None,
    delay: tuple[str, ...],
    report: Path | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Recommend a protocol for machines that behave like the delays, to train TASK.

    TASK as for train. With the trace of a run it is the run's; without a task choices are ranked by
    time per update and staleness alone.
    """
    from gruppetto.runs.plan import plan as make_plan

    laws, own = split_delays(delay)
    if len(laws) > 1:
        raise InvalidSetting(f"delay: expected one law for all learners, got {' and '.join(laws)}")
    found = make_plan(
        task,
        delay=laws[0] if laws else None,
        delays=own,
        progress=False if quiet else None,
        **options,
    )
    result = found.as_dict()
    if report is not None:
        from gruppetto.report.plan_page import write_plan_page

        command = shlex.join(["gruppetto", *sys.argv[1:]])
        result["report"] = str(write_plan_page(result, report, command))
    if as_json:
        print_json(result)
    else:
        _show(found)
        if report is not None:
            click.echo(f"report: {result['report']}")


def _show(found: Plan) -> None:
    console = Console(highlight=False)
    # A line that is too long for the terminal is still better than numbers cut short.
    console.width = max(console.width, _WIDTH)
    table = Table(box=None, pad_edge=False)
    has_target = found.target is not None
    table.add_column("protocol", no_wrap=True)
    headings = ["mini-batch", "rate x", "s per update", "staleness", "error floor"]
    if has_target:
        headings += ["s to target", "80 % band", "seeds"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.candidates[:_ROWS]:
        cells = [
            row.protocol,
            "?" if row.batch_size is None else str(row.batch_size),
            f"{row.learning_rate_factor:.2f}",
            f"{row.update_time:.4g}",
            f"{row.staleness:.2f}",
            f"{row.error_floor:.2f}",
        ]
        table.add_row(*cells, *(_to_target(row) if has_target else []))
    law = found.delay["spec"]
    if found.delay["n"] is not None:
        law += f" (fitted to {found.delay['n']} mini-batches)"
    own = found.delay["delays"]
    console.print(f"delays: {law}" + (f"; own laws of {len(own)} learners" if own else ""))
    for text in found.delay["warnings"]:
        console.print(f"  {text}")
    console.print(table)
    if len(found.candidates) > _ROWS:
        console.print(f"and {len(found.candidates) - _ROWS} more, see --json")
    for text in (*found.notes, found.why):
        console.print(text, soft_wrap=True)
    if found.command is not None:
        console.print(found.command, soft_wrap=True, markup=False)


def _to_target(row: Assessment) -> list[str]:
    if row.time_to_target is None or row.time_to_target_band is None:
        above = "?" if row.time_is_above is None else f"> {row.time_is_above:.4g}"
        return [above, "", "0"]
    low, high = row.time_to_target_band
    return [f"{row.time_to_target:.4g}", f"{low:.4g} to {high:.4g}", str(row.seeds)]
