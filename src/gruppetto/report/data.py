"""What a report knows about a run: settings, versions, the trace, and numbers derived from them.

Nothing is read from disk here; whoever opens run folders hands the pieces over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from gruppetto.trace import EvaluationRow, Trace
from gruppetto.trace.metrics import is_lower_better

__all__ = [
    "DID_NOT_END",
    "Curve",
    "Outcome",
    "ReportedRun",
    "Target",
    "TimeUnit",
    "differing_settings",
    "distinct_labels",
    "number_or_none",
    "setting_text",
    "shared_metric",
    "shared_unit",
    "told_settings",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
#: A metric of ``evaluate`` and the value to reach: ``("accuracy", 0.95)``.
Target: TypeAlias = tuple[str, float]
TimeUnit: TypeAlias = Literal["virtual units", "virtual s", "s"]

#: Stands where ``stopped_by`` would, for a run whose trace has no end row.
DID_NOT_END: Final = "did not end"
#: Where a run was put says nothing about what it was.
_NOT_TELLING: Final = frozenset({"out", "folder", "run", "name"})


@dataclass(frozen=True)
class Curve:
    """One quantity over a run; four arrays of the same length, in order of time."""

    #: Run time in the run's own unit, see :attr:`ReportedRun.time_unit`.
    times: Floats
    epochs: Floats
    #: Server versions.
    updates: Integers
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    def where_finite(self) -> Curve:
        """The same curve without points whose value is infinite or not a number."""
        keep = np.isfinite(self.values)
        return Curve(self.times[keep], self.epochs[keep], self.updates[keep], self.values[keep])


@dataclass(frozen=True)
class Outcome:
    """How a run went, from its end row or, without one, as of its last rows."""

    has_ended: bool
    #: ``epochs``, ``target``, ``interrupted``, ...; DID_NOT_END without an end row.
    stopped_by: str
    #: Run time in the run's own unit, evaluation excluded.
    time: float
    updates: int
    samples: int
    epochs: float
    mean_staleness: float
    max_staleness: int
    #: Mini-batches applied, given up and dropped; leases cancelled and discarded.
    applied: int
    cancelled: int
    discarded: int
    given_up: int
    dropped: int


@dataclass(frozen=True)
class ReportedRun:
    """One run as the report sees it.

    Args:
        name: its label, unique among the runs of a report; see :func:`distinct_labels`.
        folder: the run's folder, shown as it is.
        settings: flat: ``task``, ``engine``, ``protocol``, ``learners``, ...; ``delay`` is
            None (or missing) when none was given.
        versions: of python, torch, numpy, gruppetto, and the platform.
        trace: every row that holds.
    """

    name: str
    folder: str
    settings: Mapping[str, object]
    versions: Mapping[str, str]
    trace: Trace

    @property
    def is_decoupled(self) -> bool:
        """Whether a network in modules was trained, so that there are no learners."""
        return _is_decoupled(self.settings)

    @property
    def time_unit(self) -> TimeUnit:
        """What the run's times are counted in."""
        if self.settings.get("engine") != "virtual":
            return "s"
        has_seconds = self.settings.get("delay") or self.settings.get("pass_times")
        return "virtual s" if has_seconds else "virtual units"

    @property
    def per_unit(self) -> str:
        """The unit of rates: ``s``, ``virtual s`` or ``virtual unit``."""
        return self.time_unit.replace("units", "unit")

    @cached_property
    def outcome(self) -> Outcome:
        """The counts at the end, or at the last rows of a run that was killed."""
        trace = self.trace
        end = trace.end.result if trace.end is not None else {}
        last = trace.updates[-1] if trace.updates else None
        ends = [row[-1].time for row in (trace.events, trace.updates, trace.evaluations) if row]
        histogram = self.staleness
        count = int(histogram.sum())
        mean = float(histogram @ np.arange(len(histogram))) / count if count else 0.0

        def number(key: str, otherwise: float) -> float:
            value = end.get(key)
            return float(value) if isinstance(value, int | float) else float(otherwise)

        def total(key: str, attribute: str) -> int:
            return int(number(key, getattr(last, attribute) if last is not None else 0))

        return Outcome(
            has_ended=trace.end is not None,
            stopped_by=str(end.get("stopped_by", "unknown")) if trace.end else DID_NOT_END,
            time=number("time", max(ends, default=0.0)),
            updates=total("updates", "version"),
            samples=total("samples", "samples"),
            epochs=number("epochs", last.epoch if last is not None else 0.0),
            mean_staleness=number("mean_staleness", mean),
            max_staleness=int(number("max_staleness", max(len(histogram) - 1, 0))),
            applied=total("mini_batches_applied", "applied"),
            cancelled=total("mini_batches_cancelled", "cancelled"),
            discarded=total("mini_batches_discarded", "discarded"),
            given_up=total("mini_batches_given_up", "given_up"),
            dropped=total("mini_batches_dropped", "dropped"),
        )

    @cached_property
    def staleness(self) -> Integers:
        """Applied gradients per staleness, shape [max staleness + 1]; empty without updates."""
        values = [s for row in self.trace.updates for s in row.staleness]
        return np.bincount(np.asarray(values, dtype=np.int64)).astype(np.int64)

    @property
    def learners_lost(self) -> int:
        """Learners whose process died, as counted at the end or, without one, so far."""
        lost = number_or_none(self.result("learners_lost"))
        if lost is None:
            lost = sum(row.type == "LearnerLost" for row in self.trace.events)
        return int(lost)

    @property
    def metrics(self) -> list[str]:
        """Names that ``evaluate`` returned in every evaluation, in its order."""
        rows = self.trace.evaluations
        first = rows[0].metrics if rows else {}
        return [name for name in first if all(name in row.metrics for row in rows)]

    def evaluations(self, metric: str) -> Curve:
        """A metric over the evaluations; those without it are left out."""
        rows = [row for row in self.trace.evaluations if metric in row.metrics]
        return _curve(rows, [_number(row.metrics[metric]) for row in rows])

    def error(self, metric: str) -> Curve:
        """What to plot for a metric: 1 - accuracy in per cent for ``accuracy``, else itself."""
        curve = self.evaluations(metric)
        if metric != "accuracy":
            return curve
        return Curve(curve.times, curve.epochs, curve.updates, 100.0 * (1.0 - curve.values))

    def training_loss(self, max_points: int = 60) -> Curve:
        """Sample-weighted mean loss of the applied mini-batches, over runs of equally many updates.

        Each point stands at the last update it covers. Losses are those the learners computed,
        so on the version each gradient was computed on.
        """
        rows = self.trace.updates
        size = max(1, math.ceil(len(rows) / max_points))
        times, epochs, updates, values = [], [], [], []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            weights = np.array([n for row in part for n in row.num_samples], dtype=np.float64)
            losses = np.array([x for row in part for x in row.losses], dtype=np.float64)
            if weights.sum() <= 0:
                continue
            times.append(part[-1].time)
            epochs.append(part[-1].epoch)
            updates.append(part[-1].version)
            values.append(float(losses @ weights / weights.sum()))
        return Curve(
            np.array(times, dtype=np.float64),
            np.array(epochs, dtype=np.float64),
            np.array(updates, dtype=np.int64),
            np.array(values, dtype=np.float64),
        )

    def final(self, metric: str) -> float | None:
        """The last finite value of a metric: of the evaluations, else of the end row."""
        values = self.evaluations(metric).where_finite().values
        if len(values):
            return float(values[-1])
        value = self.result(f"test_{metric}")
        return float(value) if isinstance(value, int | float) else None

    def result(self, key: str) -> object:
        """An entry of the end row's result; None without one."""
        return self.trace.end.result.get(key) if self.trace.end is not None else None

    def time_to(self, target: Target) -> float | None:
        """When the first evaluated version that reaches the target was published; None if none."""
        metric, goal = target
        curve = self.evaluations(metric)
        reached = curve.values <= goal if is_lower_better(metric) else curve.values >= goal
        return float(curve.times[np.argmax(reached)]) if reached.any() else None


def _curve(rows: Sequence[EvaluationRow], values: Sequence[float]) -> Curve:
    return Curve(
        np.array([row.time for row in rows], dtype=np.float64),
        np.array([row.epoch for row in rows], dtype=np.float64),
        np.array([row.version for row in rows], dtype=np.int64),
        np.array(values, dtype=np.float64),
    )


def number_or_none(value: object) -> float | None:
    """A value of a trace or of settings if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def shared_metric(runs: Sequence[ReportedRun]) -> str | None:
    """The metric to judge all evaluated runs by: accuracy, else loss, else the first in common."""
    evaluated = [run.metrics for run in runs if run.trace.evaluations]
    if not evaluated:
        for metric in ("accuracy", "loss"):
            if any(run.final(metric) is not None for run in runs):
                return metric
        return None
    common = [name for name in evaluated[0] if all(name in names for names in evaluated)]
    return next((name for name in ("accuracy", "loss") if name in common), None) or next(
        iter(common), None
    )


def shared_unit(runs: Sequence[ReportedRun]) -> TimeUnit | None:
    """The time unit of all runs; None where they differ and times cannot be compared."""
    units = {run.time_unit for run in runs}
    return units.pop() if len(units) == 1 else None


def setting_text(value: object) -> str:
    """A setting's value as people write it.

    >>> setting_text(None), setting_text(True), setting_text(["constant:value=1", "0=off"])
    ('none', 'true', 'constant:value=1 0=off')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={setting_text(each)}" for key, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return " ".join(setting_text(each) for each in value) or "none"
    return str(value)


def _is_decoupled(settings: Mapping[str, object]) -> bool:
    return settings.get("decouple") is not None


def _with_protocol(settings: Mapping[str, object]) -> Mapping[str, object]:
    """A decoupled run's settings with its method for a protocol; others as they are."""
    if not _is_decoupled(settings):
        return settings
    kept = {key: value for key, value in settings.items() if key not in ("decouple", "protocol")}
    return {"protocol": settings["decouple"], **kept}


def told_settings(
    of: Mapping[str, object], settings: Sequence[Mapping[str, object]]
) -> frozenset[str]:
    """Keys that tell a run from others: all, unless decoupled runs are compared with ordinary ones.

    Then those are left out that only runs of the other kind have, and those in which the run
    differs from the other kind only for want of them there.
    """
    kinds = [[s for s in settings if _is_decoupled(s) is kind] for kind in (False, True)]
    keys = [frozenset(key for each in kind for key in each) for kind in kinds]
    if not all(kinds):
        return keys[0] | keys[1]
    own = kinds[_is_decoupled(of)]
    varies = {key for key in keys[0] | keys[1] if len({setting_text(s.get(key)) for s in own}) > 1}
    return keys[0] & keys[1] | varies


def differing_settings(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Keys that do not have the same value everywhere, in order of appearance, protocol first.

    Of decoupled runs the method, which stands in the protocol's place, comes first as well.
    """
    keys = dict.fromkeys(key for each in settings for key in each if key not in _NOT_TELLING)
    differing = [key for key in keys if len({setting_text(s.get(key)) for s in settings}) > 1]
    return sorted(differing, key=lambda key: key not in ("protocol", "decouple"))


def distinct_labels(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Name each run by the settings in which it differs from the others, protocol first.

    Runs with equal settings are numbered; a single run is named by its protocol. A decoupled run's
    method is its protocol here, and what only one of the two kinds of runs can be told names no
    run of the other kind.

    >>> distinct_labels([{"protocol": "async", "seed": 0}, {"protocol": "async", "seed": 1}])
    ['seed 0', 'seed 1']
    >>> distinct_labels([{"protocol": "async", "learners": 4}, {"decouple": "ddg:modules=2"}])
    ['async', 'ddg:modules=2']
    """
    told = [told_settings(each, settings) for each in settings]
    settings = [_with_protocol(each) for each in settings]
    keys = differing_settings(settings)
    labels = []
    for each, known in zip(settings, told, strict=True):
        parts = [
            setting_text(each.get(key))
            if key == "protocol"
            else f"{key.replace('_', ' ')} {setting_text(each.get(key))}"
            for key in keys
            if key == "protocol" or key in known
        ]
        labels.append(", ".join(parts) or setting_text(each.get("protocol", "run")))
    repeated = {label for label, count in Counter(labels).items() if count > 1}
    numbers: Counter[str] = Counter()
    for index, label in enumerate(labels):
        if label in repeated:
            numbers[label] += 1
            labels[index] = f"{label} #{numbers[label]}"
    return labels
