"""One HTML file with everything: opens offline, needs no script, the same bytes every time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from gruppetto.errors import InvalidSetting
from gruppetto.report import account_plots, adaptive_plots, module_plots, plots, time_plots
from gruppetto.report.data import (
    ReportedRun,
    Target,
    differing_settings,
    setting_text,
    shared_metric,
    told_settings,
)
from gruppetto.report.load import load_runs
from gruppetto.report.module_table import modules_rows, modules_words
from gruppetto.report.summary import remarks, summary, target_text, title
from gruppetto.report.table import format_metric, rows
from gruppetto.report.templating import Plot, drawn, render_template
from gruppetto.trace.folder import write_atomically
from gruppetto.trace.metrics import parse_target

__all__ = ["render_page", "write_page", "write_report"]

#: Hashes of the end row's result, in the order shown.
_HASHES = ("weights_sha256", "state_sha256", "events_sha256")
#: Tracebacks shown per run; a run that fails often fails the same way.
_MAX_TRACEBACKS = 3


def write_report(runs: Sequence[str | Path], path: str | Path, target: str | None = None) -> Path:
    """Write one page about run folders: what ``gruppetto report`` does.

    Args:
        runs: their folders.
        path: of the HTML file.
        target: like ``accuracy=0.95``: when each run reached it.

    Raises:
        UsageError: a folder without a run, a target that is none, a path that cannot be written.
    """
    pair = None if target is None else parse_target(target)
    return write_page(load_runs([Path(run) for run in runs]), Path(path), pair)


def write_page(runs: Sequence[ReportedRun], path: Path, target: Target | None = None) -> Path:
    """Write the report of some runs as one self-contained HTML file.

    Args:
        runs: at least one, in the order to show them in, with distinct names.
        path: the file, replaced as a whole if it exists; missing folders are made.
        target: a metric and the value to reach, for the time to target.

    Returns:
        The path.

    Raises:
        InvalidSetting: no runs.
        RunFolderError: the file cannot be written.
    """
    write_atomically(path, render_page(runs, target).encode())
    return path


def render_page(runs: Sequence[ReportedRun], target: Target | None = None) -> str:
    """The page that :func:`write_page` writes, as text."""
    if not runs:
        raise InvalidSetting("a report needs at least one run, got none")
    settings = [run.settings for run in runs]
    differing = differing_settings(settings)
    keys = dict.fromkeys(key for each in settings for key in each)
    versions = dict.fromkeys(key for run in runs for key in run.versions)
    return render_template(
        "page.html",
        title=title(runs),
        summary=summary(runs, target),
        remarks=remarks(runs),
        target=target_text(target) if target is not None else None,
        table=rows(runs, target),
        colours=[plots.run_style(index).colour for index in range(len(runs))],
        plots=_plots(runs, target),
        learners=[
            (run, account_plots.learners_words(run), account_plots.learners_rows(run))
            for run in _with_learners(runs)
        ],
        modules=[(run, modules_words(run), modules_rows(run)) for run in runs if run.is_decoupled],
        gamma=any(run.trace.gammas for run in runs),
        evaluated=any(run.trace.evaluations for run in runs),
        runs=runs,
        common={
            key: setting_text(settings[0].get(key))
            for key in keys
            if len({setting_text(each.get(key)) for each in settings}) == 1
        },
        differing=differing,
        differing_rows=[_differing_texts(run, differing, settings) for run in runs],
        versions=[
            (key, list(dict.fromkeys(run.versions.get(key, "unknown") for run in runs)))
            for key in versions
        ],
        hashes=[[run.result(key) for key in _HASHES] for run in runs],
        hash_names=_HASHES,
        max_tracebacks=_MAX_TRACEBACKS,
    )


def _with_learners(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    return [run for run in runs if not run.is_decoupled]


def _differing_texts(
    run: ReportedRun, differing: Sequence[str], settings: Sequence[Mapping[str, object]]
) -> list[str]:
    """A run's settings that differ; a dash where only runs of the other kind have that one."""
    told = told_settings(run.settings, settings) | run.settings.keys()
    return [setting_text(run.settings.get(key)) if key in told else "-" for key in differing]


def _staleness_caption(runs: Sequence[ReportedRun]) -> str:
    learners = "updates that the server made between reading the weights and applying the gradient"
    modules = "updates that a module made between a mini-batch's forward pass and its own update"
    kinds = {run.is_decoupled for run in runs}
    if kinds == {False}:
        return learners
    return modules if kinds == {True} else f"{learners}; of decoupled runs, {modules}"


def _expected_caption(runs: Sequence[ReportedRun]) -> str:
    learners = (
        "what the same protocol takes with the delays actually drawn, if nothing else cost time"
    )
    modules = "what the schedule takes with the modules' mean passes and steps, if nothing else did"
    kinds = {run.is_decoupled for run in runs}
    if kinds == {False}:
        return f"expected: {learners}"
    if kinds == {True}:
        return f"expected: {modules}"
    return f"expected: {learners}; of decoupled runs, {modules}"


def _plots(runs: Sequence[ReportedRun], target: Target | None) -> list[Plot]:
    names = ", ".join(run.name for run in runs)
    metric = shared_metric(runs)
    error = plots.error_label(metric) if metric else ""
    time = plots.time_label(runs)
    finals = "; ".join(
        f"{run.name} ends at {format_metric('', float(curve.values[-1]))}"
        for run in (runs if metric else [])
        if len(curve := run.error(metric or "").where_finite())
    )
    lines = "Line chart of {} against {} for " + names + ". "
    loss = "mean over the mini-batches applied; each on the version it was computed on"
    spread = "; ".join(
        f"{run.name}: mean {run.outcome.mean_staleness:.2f}, max {run.outcome.max_staleness}"
        for run in runs
    )
    counts = "; ".join(
        f"{run.name}: "
        + ", ".join(f"{getattr(run.outcome, kind)} {name}" for kind, name, *_ in plots.KINDS)
        for run in _with_learners(runs)
    )
    heading = error.removesuffix(" (%)").capitalize()
    figures: list[tuple[Figure | None, str, str, str]] = [
        (
            plots.error_against_time(runs, target),
            f"{heading} against time",
            lines.format(error, time) + finals + ".",
            "at the time each evaluated version was published; evaluating it is left out",
        ),
        (
            plots.error_against_updates(runs, target),
            f"{heading} against updates",
            lines.format(error, "updates") + finals + ".",
            "the same evaluations, by version of the weights",
        ),
        (
            plots.loss_against_time(runs),
            "Training loss against time",
            lines.format("training loss", time),
            loss,
        ),
        (
            plots.loss_against_updates(runs),
            "Training loss against updates",
            lines.format("training loss", "updates"),
            loss,
        ),
        (
            adaptive_plots.waiting_against_time(runs),
            "K over time",
            adaptive_plots.waiting_words(runs),
            "gradients that an update waits for, by the loss measured last; hardsync's rules hold "
            "first where there is a warm-up",
        ),
        (
            plots.staleness_histogram(runs),
            "Staleness",
            f"Histograms of staleness. {spread}.",
            _staleness_caption(runs),
        ),
        (
            account_plots.effective_rates(runs),
            "Effective learning rate",
            account_plots.effective_rates_words(runs),
            "base rate times the mean factor of modulation, weighted by samples; means over "
            "neighbouring updates",
        ),
        (
            plots.mini_batch_bars(_with_learners(runs)),
            "Mini-batches",
            f"Stacked bars of mini-batches handed to learners. {counts}.",
            "what became of each mini-batch handed to a learner; a cancelled or discarded one "
            "goes back and is handed out again",
        ),
        (
            time_plots.update_times(runs),
            "Time per update",
            time_plots.update_times_words(runs),
            _expected_caption(runs),
        ),
        (
            time_plots.learners_time(runs),
            "Where the learners' time went",
            time_plots.learners_time_words(runs),
            time_plots.learners_time_caption(runs),
        ),
        (
            module_plots.modules_time(runs),
            "Where the modules' time went",
            module_plots.modules_time_words(runs),
            module_plots.modules_time_caption(runs),
        ),
        (
            module_plots.passes_strip(runs),
            "The first passes",
            module_plots.passes_words(runs),
            module_plots.passes_caption(runs),
        ),
    ]
    return drawn(figures)
