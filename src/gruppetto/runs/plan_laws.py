"""The delays a plan is made for: given as laws, or fitted to what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from gruppetto.delays import DELAYS, Delay, Empirical, Fit, fit
from gruppetto.errors import InvalidSetting
from gruppetto.runs.measured import measured_delays
from gruppetto.runs.seconds import load_delay, read_seconds
from gruppetto.runs.settings import Settings, read_settings
from gruppetto.theory.machines import Machines
from gruppetto.trace.folder import read_config

__all__ = ["Law", "given_law", "law_of_trace"]

#: What other measurements might have said.
_RESAMPLES: Final = 20
#: Fewer times of a learner are too few for a law of its own.
_ENOUGH: Final = 5


@dataclass(frozen=True)
class Law:
    """The delays, and how they are known."""

    machines: Machines
    #: What to know about them, each in a sentence; the fits' warnings among them.
    notes: tuple[str, ...] = ()
    #: The fit to all times; None for laws that were given.
    common: Fit | None = None
    #: learner -> the fit to its own times, where learners differ.
    each: Mapping[int, Fit] = field(default_factory=dict)

    def resampled(self, seed: int) -> list[Machines]:
        """What other measurements might have said; nothing for laws that were given."""
        if self.common is None:
            return []
        rng = np.random.default_rng(seed)
        found = []
        for _ in range(_RESAMPLES):
            law = self.common.resample(rng)
            own = {learner: one.resample(rng) for learner, one in self.each.items()}
            found.append(Machines(law, own, self.machines.num_learners))
        return found

    def as_dict(self) -> dict[str, Any]:
        """The part ``delay`` of a plan."""
        common = self.common
        return {
            "spec": _spec(self.machines.law),
            "delays": {str(n): _spec(law) for n, law in sorted(self.machines.own.items())},
            "is_fitted": common is not None,
            "n": None if common is None else common.num_samples,
            "censored": None if common is None else common.num_censored,
            "gof_p": None if common is None else common.gof_p,
            "warnings": list(self.notes),
        }


def _spec(law: Delay) -> str:
    """How a law is written; ``empirical`` alone for measured times that no file of theirs holds."""
    if isinstance(law, Empirical) and not law.file:
        return "empirical"
    return DELAYS.format(law)


def given_law(
    delay: Delay | str | None, delays: Mapping[int, Delay | str], num_learners: int
) -> Law:
    """Laws that somebody gave.

    Raises:
        InvalidSetting: one that cannot be read, or is for a learner that does not exist.
    """
    own = {learner: load_delay(text) for learner, text in delays.items()}
    law = load_delay("constant:value=1" if delay is None else delay)
    return Law(Machines(law, own, num_learners))


def law_of_trace(
    trace: str | Path, num_learners: int | None, seed: int
) -> tuple[Law, Settings | None]:
    """Fit laws to a run's mini-batches, or to a file of seconds.

    Args:
        trace: the run's folder, or the file.
        num_learners: P; None for the run's, or 4.
        seed: of the fit's test.

    Returns:
        The law, and what the run was told; None of a file.

    Raises:
        UsageError: nothing there, or something that tells of no times.
    """
    path = Path(trace)
    run: Settings | None = None
    notes: tuple[str, ...] = ()
    if path.is_dir():
        measured = measured_delays(path)
        run = read_settings(Settings, read_config(path).settings)
        common = fit(measured.samples, measured.censored, seed=seed)
        notes = measured.notes
        samples, censored = measured.samples, measured.censored
    elif path.exists():
        common = fit(read_seconds(path), seed=seed)
        samples, censored = {}, {}
    else:
        raise InvalidSetting(f"trace: {path} does not exist; expected a run or a file of seconds")
    p = num_learners if num_learners is not None else 4 if run is None else run.learners
    each: dict[int, Fit] = {}
    if common.learners_differ:
        for learner, times in samples.items():
            if learner < p and times.size >= _ENOUGH:
                each[learner] = fit({learner: times}, {learner: censored.get(learner, np.empty(0))})
        notes += (f"so each of {len(each)} learners has a law of its own here",)
        if len(each) < p:
            notes += (f"{p - len(each)} learners were not measured and get the law of all",)
    own = {learner: _usable(one) for learner, one in each.items()}
    machines = Machines(_usable(common), own, p)
    return Law(machines, (*common.warnings, *notes), common, each), run


def _usable(found: Fit) -> Delay:
    """Its law, or the measured times where that has an infinite mean."""
    if math.isfinite(found.law.expectation()):
        return found.law
    return Empirical.of(found.times)
