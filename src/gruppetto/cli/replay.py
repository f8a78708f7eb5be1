"""``gruppetto replay`` and ``gruppetto export``."""

from __future__ import annotations

from pathlib import Path

import click

from gruppetto.cli.options import as_json, quiet
from gruppetto.cli.output import finish, print_json
from gruppetto.errors import ReplayMismatch


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
@as_json
def export(run: Path, out: Path | None, as_json: bool) -> None:
    """Write the newest weights of RUN as a plain state_dict."""
    from gruppetto.runs.export import export as export_run

    path = export_run(run, out)
    if as_json:
        print_json({"run": str(run), "file": str(path)})
    else:
        click.echo(str(path))
