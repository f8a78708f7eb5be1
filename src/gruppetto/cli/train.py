"""``gruppetto train`` and ``gruppetto resume``."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gruppetto.cli.options import as_json, out, quiet, run_options, split_delays, tensorboard
from gruppetto.cli.output import finish
from gruppetto.errors import InvalidSetting, RunFolderError

if TYPE_CHECKING:
    from gruppetto.runs.settings import Settings


@click.command(
    epilog="Example: gruppetto train digits --protocol k-batch-async:k=2 "
    "--delay exponential:mean=0.01"
)
@click.argument("task")
@run_options(multiple=False)
@out("Folder of the run.  [a new one under runs/]")
@click.option("--resume", is_flag=True, help="Continue the run in --out, if it holds one.")
@tensorboard
@quiet
@as_json
def train(
    task: str, out: Path | None, resume: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Train TASK: digits, mnist, cifar10, least-squares[:n=,d=], or path/to/file.py[:name]."""
    from gruppetto.runs.local import start_early

    if options["engine"] in (None, "local"):
        start_early()  # before torch is imported here: both take as long

    from gruppetto.runs.start import start_run
    from gruppetto.runs.train import plan_run

    given = {k: v for k, v in options.items() if v is not None and v is not False and v != ()}
    common, own = split_delays(given.pop("delay", ()))
    if len(common) > 1:
        raise InvalidSetting(
            f"delay: expected one law for all learners, got {' and '.join(common)}"
        )
    if common:
        given["delay"] = common[0]
    values = {"protocol": "hardsync", "learners": 4, "delays": own, **given}
    settings, ingredients = plan_run(task, **values)
    if resume:
        if out is None:
            raise InvalidSetting("resume: expected --out with the folder of the run to continue")
        if (out / "config.json").exists():
            _check_same(out, settings, given.keys())
            return _resume(out, quiet, as_json, given)
    run = start_run(
        settings,
        ingredients,
        out=out,
        progress=False if quiet else None,
    )
    finish(run.result, as_json)
    return None


@click.command(epilog="Example: gruppetto resume runs/digits-async-001")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--updates", type=int, help="A new limit.")
@click.option("--max-time", type=float, help="A new limit, in seconds of run time.")
@click.option("--target", help="A new target, like accuracy=0.95.", metavar="METRIC=X")
@quiet
@as_json
def resume(run: Path, quiet: bool, as_json: bool, **limits: Any) -> None:
    """Continue the run in folder RUN from its newest checkpoint."""
    _resume(run, quiet, as_json, limits)


def _resume(run: Path, quiet: bool, as_json: bool, given: dict[str, Any]) -> None:
    from gruppetto.runs.start import resume as resume_run

    limits = {key: given.get(key) for key in ("updates", "max_time", "target")}
    ended = resume_run(run, progress=False if quiet else None, **limits)
    finish(ended.result, as_json)


def _check_same(folder: Path, wanted: Settings, given: Set[str]) -> None:
    from gruppetto.runs.folder import RunFolder
    from gruppetto.trace.folder import read_config

    limits = {"updates", "max_time", "target"}
    recorded = RunFolder.open(folder).settings().model_dump(exclude=limits)
    # A run of before keeps its rules where a setting has come since and nobody asks for it.
    since = recorded.keys() - read_config(folder).settings.keys() - given
    for key, value in wanted.model_dump(exclude=limits).items():
        if recorded[key] != value and key not in since:
            raise RunFolderError(
                f"{folder} holds a run with {key}={recorded[key]}, and {key}={value} was asked for"
            )
