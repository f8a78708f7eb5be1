"""``gruppetto compare`` and ``gruppetto report``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from gruppetto.cli.options import (
    OPTIONS,
    as_json,
    out,
    quiet,
    run_options,
    split_delays,
    tensorboard,
)
from gruppetto.cli.output import Failed, Interrupted, print_json
from gruppetto.errors import InvalidSetting, RunFolderError
from gruppetto.spec import suggest

#: What is the same for all runs of a comparison.
_COMMON: Final = ("target", "delay")


@click.command(
    epilog="Example: gruppetto compare digits --protocol hardsync --protocol async "
    "--delay exponential:mean=1 --target accuracy=0.93"
)
@click.argument("task")
@run_options(multiple=True)
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="KEY=V;KEY=V",
    help="One run by itself, like 'protocol=async;modulation=none', or "
    "'decouple=ddg:modules=3;cut=2;cut=4'; instead of a grid.",
)
@out("Folder of the comparison.  [a new one under runs/]")
@tensorboard
@quiet
@as_json
def compare(
    task: str,
    runs: tuple[str, ...],
    out: Path | None,
    tensorboard: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train TASK several times and report side by side.

    The folder gets report.html and, where runs were evaluated, error-against-time.png. Several
    values of any option make a grid: every combination is run. A target does not stop runs here;
    it is what they are compared by. Runs of decoupled modules (--decouple) are cut alike where
    they have equally many.
    """
    from gruppetto.runs.local import start_early

    if not options["engine"] or "local" in options["engine"]:
        start_early()  # before torch is imported here: both take as long

    from gruppetto.report import load_runs, results_table
    from gruppetto.report.page import write_page
    from gruppetto.report.plots import error_against_time_png
    from gruppetto.runs.compare import compare as compare_runs
    from gruppetto.runs.compare import grid
    from gruppetto.trace.metrics import parse_target

    laws, own = split_delays(options.pop("delay"))
    cuts = options.pop("cuts")
    given = {key: values for key, values in options.items() if values}
    if laws:
        given["delay"] = tuple(laws)
    targets = given.pop("target", ())
    if len(targets) > 1:
        raise InvalidSetting(f"target: expected one to compare by, got {len(targets)}")
    pair = parse_target(targets[0]) if targets else None
    several = {key: values for key, values in given.items() if len(values) > 1}
    common: dict[str, Any] = {k: v[0] for k, v in given.items() if len(v) == 1}
    if cuts:
        common["cuts"] = cuts
    if own:
        common["delays"] = own
    wanted = [_read_run(text) for text in runs] if runs else grid(several)
    if not runs and "decouple" in given and "protocol" in given:
        raise InvalidSetting(
            "compare: a grid is of learners or of modules; expected --decouple or --protocol, got "
            "both; name each run by itself, like --run decouple=ddg:modules=2 --run protocol=async"
        )
    if runs and several:
        raise InvalidSetting(f"compare: expected --run or a grid of {', '.join(several)}, got both")
    comparison = compare_runs(
        task,
        wanted,
        out=out,
        progress=False if quiet else None,
        target=targets[0] if targets else None,
        tensorboard=tensorboard,
        **common,
    )
    reported = load_runs(comparison.folders)
    path = write_page(reported, comparison.folder / "report.html", pair)
    png = error_against_time_png(reported, comparison.folder / "error-against-time.png", pair)
    if as_json:
        print_json(
            {
                "runs": comparison.results,
                "report": str(path),
                "png": None if png is None else str(png),
                "run": str(comparison.folder),
            }
        )
    else:
        Console(highlight=False).print(results_table(reported, pair))
        for result in comparison.results:
            if "error" in result:
                name = result.get("protocol") or result.get("decouple")
                click.echo(f"{name}: {result['error']}", err=True)
            if result.get("without_contribution_why"):
                click.echo(f"{result['protocol']}: {result['without_contribution_why']}", err=True)
        click.echo(f"report: {path}")
        if png is not None:
            click.echo(f"picture: {png}")
    if comparison.results[-1].get("stopped_by") == "interrupted":
        raise Interrupted(f"interrupted; what there is, is in {comparison.folder}")
    if all("error" in result for result in comparison.results):
        raise Failed("every run failed")


@click.command(epilog="Example: gruppetto report runs/digits-async-001 runs/digits-hardsync-001")
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--target", metavar="METRIC=X", help="Show when each run reached it.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="FILE.html.  [report.html in the folder of the run; here for several runs]",
)
@click.option("--png", type=click.Path(path_type=Path), help="Also draw error against time there.")
@as_json
def report(
    runs: tuple[Path, ...], target: str | None, out: Path | None, png: Path | None, as_json: bool
) -> None:
    """Write one HTML page about RUNS, the folders of runs or of comparisons.

    Where the modules' time went in decoupled runs is printed as well.
    """
    from gruppetto.report import load_runs
    from gruppetto.report.module_table import module_json, modules_table
    from gruppetto.report.page import write_page
    from gruppetto.report.plots import error_against_time_png
    from gruppetto.trace.metrics import parse_target

    pair = None if target is None else parse_target(target)
    folders = [folder for run in runs for folder in _expand(run)]
    reported = load_runs(folders)
    if out is None:
        out = (runs[0] if len(runs) == 1 else Path()) / "report.html"
    path = write_page(reported, out, pair)
    if png is not None and error_against_time_png(reported, png, pair) is None:
        raise RunFolderError("png: the runs have no evaluation to draw")
    decoupled = [run for run in reported if run.is_decoupled]
    if as_json:
        made: dict[str, Any] = {"report": str(path), "runs": [str(folder) for folder in folders]}
        if decoupled:
            made["modules"] = {run.folder: module_json(run) for run in decoupled}
        print_json(made)
    else:
        for run in decoupled:
            Console(highlight=False).print(modules_table(run))
        click.echo(str(path))


def _expand(path: Path) -> list[Path]:
    """The runs of a comparison, or the path itself."""
    if path.is_dir() and not (path / "config.json").exists():
        inner = sorted(p.parent for p in path.glob("*/config.json"))
        if inner:
            return inner
    return [path]


def _read_run(text: str) -> dict[str, Any]:
    types = {option.key: option.type for option in OPTIONS}
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise InvalidSetting(f"run {text!r}: expected key=value, got {part!r}")
        if key not in types or key in _COMMON:
            valid = [k for k in types if k not in _COMMON]
            raise InvalidSetting(f"run {text!r} has an unknown key {key!r}; {suggest(key, valid)}")
        if key == "cut":
            values.setdefault("cuts", []).append(value)
            continue
        kind = types[key]
        try:
            values[key] = kind(value) if kind in (int, float) else value
        except ValueError:
            raise InvalidSetting(f"run {text!r}: {key} expects a number, got {value!r}") from None
    return values
