"""``gruppetto replay`` and ``gruppetto export``."""

from __future__ import annotations

from pathlib import Path

import click

from gruppetto.cli.options import as_json, quiet
from gruppetto.cli.output import finish, print_json
from gruppetto.errors import InvalidSetting, ReplayMismatch


@click.command(epilog="Example: gruppetto replay runs/digits-async-001")
@click.argument("run", type=click.Path(path_type=Path))
@quiet
@as_json
def replay(run: Path, quiet: bool, as_json: bool) -> None:
    """Re-feed the events of RUN and see whether the same weights come out; exit 1 if not."""
    from gruppetto.runs.replay import replay as replay_run

    result = replay_run(run, progress=False if quiet else None)
    if not result["matches"]:
        raise ReplayMismatch(f"{run} does not match: {result['difference']}", result)
    if as_json:
        print_json(result)
    else:
        finish(result, False)
        click.echo("matches: weights, state, events and commands are those of the run")


@click.command(epilog="Example: gruppetto export runs/digits-async-001 --out model.pt")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="FILE.pt or FILE.safetensors.  [RUN/model.pt]"
)
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the trace as TensorBoard event files there; instead of weights.",
)
@as_json
def export(run: Path, out: Path | None, tensorboard: Path | None, as_json: bool) -> None:
    """Write the newest weights of RUN as a plain state_dict, or its curves for TensorBoard."""
    from gruppetto.runs.export import export as export_run
    from gruppetto.runs.export import export_tensorboard

    if out is not None and tensorboard is not None:
        raise InvalidSetting("export: expected --out or --tensorboard, got both")
    if tensorboard is None:
        kind, path = "file", export_run(run, out)
    else:
        kind, path = "tensorboard", export_tensorboard(run, tensorboard)
    if as_json:
        print_json({"run": str(run), kind: str(path)})
    else:
        click.echo(str(path))
