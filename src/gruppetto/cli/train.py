"""``gruppetto train`` and ``gruppetto resume``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gruppetto.cli.options import as_json, out, quiet, run_options, split_delays, tensorboard
from gruppetto.cli.output import finish
from gruppetto.errors import InvalidSetting, RunFolderError

if TYPE_CHECKING:
    from gruppetto.runs.decoupled.settings import DecoupledSettings
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
    """Train TASK: digits, mnist, cifar10, least-squares[:n=,d=], or path/to/file.py[:name].

    With --protocol and --learners, learners compute gradients of one network that a server updates.
    With --decouple, one network is cut into modules that train in parallel instead, like
    gruppetto train digits --decouple ddg:modules=2.
    """
    from gruppetto.runs.local import start_early

    if options["engine"] in (None, "local"):
        start_early()  # before torch is imported here: both take as long

    from gruppetto.runs.start import start_run
    from gruppetto.runs.train import plan_any

    given = {k: v for k, v in options.items() if v is not None and v is not False and v != ()}
    common, own = split_delays(given.pop("delay", ()))
    if len(common) > 1:
        raise InvalidSetting(
            f"delay: expected one law for all learners, got {' and '.join(common)}"
        )
    if common:
        given["delay"] = common[0]
    if own:
        given["delays"] = own
    settings, ingredients = plan_any(task, **given)
    if resume:
        if out is None:
            raise InvalidSetting("resume: expected --out with the folder of the run to continue")
        if (out / "config.json").exists():
            _check_same(out, settings, given)
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


def _check_same(
    folder: Path, wanted: Settings | DecoupledSettings, given: Mapping[str, Any]
) -> None:
    from gruppetto.runs.decoupled.settings import settings_of
    from gruppetto.runs.folder import RunFolder
    from gruppetto.trace.folder import read_config

    limits = {"updates", "max_time", "target"}
    recorded = settings_of(RunFolder.open(folder)).model_dump(exclude=limits)
    # A run of before keeps its rules where a setting has come since and nobody asks for it.
    since = recorded.keys() - read_config(folder).settings.keys() - given.keys()
    # Where a network is cut and how long its passes take is chosen once, unless somebody says it.
    if "cuts" not in given and "balance" not in given:
        since = since | {"begins"}
    if "pass_times" not in given or given["pass_times"] == "measured":
        since = since | {"pass_times"}
    for key, value in wanted.model_dump(exclude=limits).items():
        if key not in since and recorded.get(key) != value:
            raise RunFolderError(
                f"{folder} holds a run with {key}={recorded.get(key)}, and {key}={value} was asked "
                "for"
            )
