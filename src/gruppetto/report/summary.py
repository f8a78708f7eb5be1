"""The outcome of the runs in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gruppetto.report.data import (
    ReportedRun,
    Target,
    number_or_none,
    setting_text,
    shared_metric,
    shared_unit,
)
from gruppetto.report.modules import num_modules, speed
from gruppetto.report.table import format_metric, format_number
from gruppetto.trace.metrics import is_lower_better

__all__ = ["remarks", "summary", "target_text", "title"]

#: Above this many runs only the best and the worst are named.
_FEW = 4
#: The method that the others are compared with, and settings in which both must agree.
_CONTROL: Final = "bp"
_SAME_WORK: Final = ("task", "model", "data", "engine", "batch_size", "threads", "device")
#: Before a unit, so that it does not start a line.
_NBSP = "\u00a0"


def title(runs: Sequence[ReportedRun]) -> str:
    """The page's heading: the task, and the run or how many there are."""
    tasks = {setting_text(run.settings.get("task", "task")) for run in runs}
    task = tasks.pop() if len(tasks) == 1 else "several tasks"
    if len(runs) == 1:
        return f"{task}: {runs[0].name}"
    return f"{task}: {len(runs)} runs compared"


def target_text(target: Target) -> str:
    """A target in words: ``test accuracy 95 %``."""
    metric, goal = target
    if metric == "accuracy":
        return f"test accuracy {100 * goal:g}{_NBSP}%"
    return f"test {metric.replace('_', ' ')} {goal:g}"


def summary(runs: Sequence[ReportedRun], target: Target | None = None) -> str:
    """Who reached the target first, how accurate the runs became, and which did not end."""
    sentences = [_race(runs, target)] if target is not None else []
    sentences += [_quality(runs), _unfinished(runs)]
    return " ".join(filter(None, sentences))


def remarks(runs: Sequence[ReportedRun]) -> str:
    """What to know about the numbers: learners lost or without contribution, what evaluating cost.

    Of decoupled runs beside a control also how much faster they were. Empty if nothing.
    """
    known = [_faster(runs), _lost(runs), _without(runs), _live(runs), _caution(runs)]
    return " ".join(filter(None, known))


def _race(runs: Sequence[ReportedRun], target: Target) -> str:
    goal = target_text(target)
    times = [(run.time_to(target), run) for run in runs]
    reached = [(time, run) for time, run in times if time is not None]
    missed = [run.name for time, run in times if time is None]
    if not reached:
        return f"No run reached {goal}." if len(runs) > 1 else f"It did not reach {goal}."
    if shared_unit(runs) is None:
        named = _listed([f"{run.name} at {_time(time, run)}" for time, run in reached])
        return f"{goal[0].upper()}{goal[1:]} was reached by {named} (units differ)."
    reached.sort(key=lambda pair: pair[0])
    first_time, first = reached[0]
    if len(runs) == 1:
        return f"It reached {goal} after {_time(first_time, first)}."
    text = f"{first.name} reached {goal} first, after {_time(first_time, first)}"
    last_time, last = reached[-1]
    if len(reached) > 1:
        text += f"; {last.name} took longest, {_time(last_time, last)}"
        if first_time > 0 and last_time >= 1.05 * first_time:
            text += f" ({last_time / first_time:.1f} times as long)"
    if missed:
        text += f"; {_listed(missed)} did not reach it"
    return text + "."


def _quality(runs: Sequence[ReportedRun]) -> str:
    metric = shared_metric(runs)
    finals = [(run.final(metric), run) for run in runs] if metric else []
    known = [(value, run) for value, run in finals if value is not None]
    if metric is None or not known:
        return _no_evaluation(runs)
    name = f"test {metric.replace('_', ' ')}"
    unit = f"{_NBSP}%" if metric == "accuracy" else ""

    def text(value: float) -> str:
        return f"{format_metric(metric, value)}{unit}"

    if len(runs) == 1:
        value, run = known[0]
        verb = "ended at" if run.outcome.has_ended else "was at"
        return (
            f"It {verb} {name} {text(value)} after {format_number(run.outcome.updates)} updates "
            f"and {_time(run.outcome.time, run)}."
        )
    known.sort(key=lambda pair: pair[0], reverse=not is_lower_better(metric))
    if len(known) <= _FEW:
        named = _listed([f"{run.name} {text(value)}" for value, run in known])
        return f"Final {name}: {named}."
    (best, first), (worst, last) = known[0], known[-1]
    return f"Final {name}: from {text(best)} ({first.name}) to {text(worst)} ({last.name})."


def _no_evaluation(runs: Sequence[ReportedRun]) -> str:
    subject = "It" if len(runs) == 1 else "The runs"
    if len(runs) == 1:
        outcome = runs[0].outcome
        return (
            f"{subject} made {format_number(outcome.updates)} updates in "
            f"{_time(outcome.time, runs[0])} and was not evaluated."
        )
    return f"{subject} have no evaluation in common."


def _unfinished(runs: Sequence[ReportedRun]) -> str:
    names = [run.name for run in runs if not run.outcome.has_ended]
    if not names:
        return ""
    if len(runs) == 1:
        return "It did not end; the numbers are those of its last rows."
    numbers = "its numbers are those of its" if len(names) == 1 else "their numbers are of their"
    return f"{_listed(names)} did not end; {numbers} last rows."


def _faster(runs: Sequence[ReportedRun]) -> str:
    """Decoupled runs beside backpropagation in as many modules, by mini-batches per time."""
    parts = []
    for run in runs:
        control = next((each for each in runs if _is_control_of(each, run)), None)
        pair = None if control is None else (speed(control), speed(run))
        if control is not None and pair is not None and pair[0] and pair[1]:
            parts.append(
                f"{run.name} was {pair[1] / pair[0]:.2f} times as fast as {control.name}, in "
                "mini-batches per time"
            )
    return "; ".join(parts) + "." if parts else ""


def _is_control_of(other: ReportedRun, run: ReportedRun) -> bool:
    """Whether another run is backpropagation with as many modules, and the same work per pass."""
    return (
        run.is_decoupled
        and other.is_decoupled
        and _method(run) != _method(other) == _CONTROL
        and num_modules(run) == num_modules(other)
        and all(run.settings.get(key) == other.settings.get(key) for key in _SAME_WORK)
    )


def _method(run: ReportedRun) -> str:
    return str(run.settings.get("decouple")).partition(":")[0]


def _lost(runs: Sequence[ReportedRun]) -> str:
    parts = []
    for run in runs:
        if not (lost := run.learners_lost):
            continue
        text = f"{'It' if len(runs) == 1 else run.name} lost {lost} learner{'s' * (lost > 1)}"
        restarted = int(number_or_none(run.result("learners_restarted")) or 0)
        if restarted:
            text += f" and restarted {restarted}"
        parts.append(text)
    return "; ".join(parts) + "." if parts else ""


def _without(runs: Sequence[ReportedRun]) -> str:
    """Which learners contributed nothing, as the runs' results say."""
    found = [(run, run.result("without_contribution_why")) for run in runs]
    told = [(run, str(why)) for run, why in found if why]
    if len(runs) == 1:
        return " ".join(f"{why[0].upper()}{why[1:]}." for _, why in told)
    return " ".join(f"{run.name}: {why}." for run, why in told)


def _live(runs: Sequence[ReportedRun]) -> str:
    """What evaluating during the run cost; in virtual time it costs nothing."""
    costs = []
    for run in runs:
        seconds = number_or_none(run.result("evaluation_time"))
        if _evaluates_live(run) and seconds and run.outcome.time > 0.0:
            costs.append((seconds / run.outcome.time, seconds, run))
    if not costs:
        return ""
    live = [run for *_, run in costs]
    where = _where(live).replace("the learners", _who(live))
    if len(costs) > _FEW:
        costs.sort(key=lambda each: each[0])
        costs = [costs[0], costs[-1]]
        first, last = (_cost(*each, several=True) for each in costs)
        took = f"from {first} to {last}"
    else:
        took = _listed([_cost(*each, several=len(runs) > 1) for each in costs])
    return f"Live evaluation took {took}, {where}."


def _cost(share: float, seconds: float, run: ReportedRun, several: bool) -> str:
    percent = f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2g}"
    if several:
        return f"{_time(seconds, run)} in {run.name} ({percent}{_NBSP}% of its time)"
    return f"{_time(seconds, run)} ({percent}{_NBSP}% of the run's time)"


def _where(runs: Sequence[ReportedRun]) -> str:
    """Whether evaluating had a core of its own, as far as the runs' results tell."""
    spare = {_has_spare_core(run) for run in runs}
    if spare == {True}:
        return "on a core of its own"
    if spare == {False}:
        return "on cores that it shared with the learners, which slows them down"
    return "beside the learners, which slows them down where there are not cores enough for all"


def _who(runs: Sequence[ReportedRun]) -> str:
    """Who computes: learners, or the modules of decoupled runs."""
    kinds = {run.is_decoupled for run in runs}
    if len(kinds) > 1:
        return "learners and modules"
    return "the modules" if kinds == {True} else "the learners"


def _has_spare_core(run: ReportedRun) -> bool | None:
    cores = number_or_none(run.result("cores"))
    learners = num_modules(run) or number_or_none(run.settings.get("learners"))
    if cores is None or learners is None:
        return None
    threads = number_or_none(run.settings.get("threads")) or 1.0
    return cores >= learners * threads + 2  # the server needs one too


def _evaluates_live(run: ReportedRun) -> bool:
    return run.time_unit == "s" and run.settings.get("evaluate") == "live"


def _caution(runs: Sequence[ReportedRun]) -> str:
    """Wall times of runs that were evaluated in different ways are not comparable."""
    kinds: dict[str, list[str]] = {}
    for run in runs:
        if run.time_unit == "s" and "evaluate" in run.settings:
            kinds.setdefault(setting_text(run.settings["evaluate"]), []).append(run.name)
    if len(kinds) < 2:
        return ""
    ways = "; ".join(
        f"{kind}: {_listed(names) if len(names) <= _FEW else f'{len(names)} runs'}"
        for kind, names in kinds.items()
    )
    return (
        f"Caution: the runs were evaluated in different ways ({ways}), and live evaluation "
        f"competes with {_who(runs)} for cores, so their times are not comparable."
    )


def _time(value: float, run: ReportedRun) -> str:
    return f"{format_number(float(value))} {run.time_unit}".replace(" ", _NBSP)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
