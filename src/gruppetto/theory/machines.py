"""How long P learners take: for a mini-batch, for an update, for a run of so many updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from gruppetto.delays import DELAYS, Constant, Delay, Empirical, KeyedDelays
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import Protocol
from gruppetto.theory.runtime import fresh_fraction, update_time
from gruppetto.theory.timing import simulate, update_blocks

__all__ = [
    "Machines",
    "RunTimes",
    "UpdateTime",
    "scaled_law",
    "slowest_ratio",
    "time_updates",
]

#: Fields of laws that are seconds; the others have no unit.
_SECONDS: Final = ("value", "mean", "shift", "scale", "low", "high", "median", "fast", "slow")
#: Updates that are simulated where theory has no exact time.
_UPDATES: Final = 3000
#: Draws of each learner that tell who is slow.
_DRAWN: Final = 2000
#: Runs that tell what is typical; updates that are simulated at first, and jobs of all at most.
_RUNS: Final = 32
_FIRST: Final = 32
_JOBS: Final = 100_000


@dataclass(frozen=True)
class Machines:
    """How long P learners take for a mini-batch of the usual size."""

    law: Delay
    #: learner -> its own law.
    own: Mapping[int, Delay]
    num_learners: int

    def of_size(self, share: float) -> Machines:
        """The same with all times multiplied: those of a smaller or larger mini-batch."""
        if share == 1.0:
            return self
        own = {learner: scaled_law(law, share) for learner, law in self.own.items()}
        return replace(self, law=scaled_law(self.law, share), own=own)

    def keyed(self, seed: int) -> KeyedDelays:
        """The draws of a run with this seed."""
        return KeyedDelays(seed, self.law, self.own, self.num_learners)

    @property
    def laws(self) -> list[Delay]:
        """One law per learner."""
        return [self.own.get(learner, self.law) for learner in range(self.num_learners)]

    @property
    def are_constant(self) -> bool:
        """Every mini-batch of every learner takes the same."""
        laws = self.laws
        return isinstance(laws[0], Constant) and all(law == laws[0] for law in laws)

    def check(self) -> None:
        """Refuse what no plan can be made for.

        Raises:
            InvalidSetting: fewer than one learner, a law for one that does not exist, or an
                infinite mean or no time at all.
        """
        if self.num_learners < 1:
            raise InvalidSetting(f"learners: expected at least 1, got {self.num_learners}")
        self.keyed(0)
        for law in dict.fromkeys(self.laws):
            if law.finite_expectation("a plan") <= 0.0:
                raise InvalidSetting(
                    f"delay {DELAYS.format(law)} takes no time; expected seconds above 0 for a plan"
                )


def scaled_law(law: Delay, factor: float) -> Delay:
    """The law of ``factor`` times the seconds.

    >>> from gruppetto.delays import ShiftedExponential
    >>> scaled_law(ShiftedExponential(shift=1.0, mean=0.5), 2.0)
    ShiftedExponential(shift=2.0, mean=1.0)
    """
    if isinstance(law, Empirical):
        return Empirical.of([factor * seconds for seconds in law.seconds])
    names = [field.name for field in fields(law) if field.name in _SECONDS]
    return replace(law, **{name: factor * getattr(law, name) for name in names})


def slowest_ratio(machines: Machines, num_slowest: int, *, seed: int = 0) -> float:
    """How much longer the slowest few of P take than the median of all, both on average.

    >>> machines = Machines(Constant(value=1.0), {2: Constant(value=3.0)}, 4)
    >>> slowest_ratio(machines, 1)
    3.0
    """
    delays = machines.keyed(seed)
    p = machines.num_learners
    drawn = np.sort([[delays.draw(slot, n) for n in range(_DRAWN)] for slot in range(p)], axis=0)
    median = float(np.median(drawn, axis=0).mean())
    return float(drawn[p - num_slowest :].mean()) / median if median > 0 else math.inf


@dataclass(frozen=True)
class UpdateTime:
    """Seconds per update of a long run."""

    seconds: float
    #: (low, high); both equal where theory is exact and the law is given.
    band: tuple[float, float]
    #: "exact" where theory has it, "simulated" elsewhere.
    kind: str
    #: Mean staleness, in updates.
    staleness: float
    #: Share of applied gradients that are fresh.
    fresh: float


def time_updates(
    protocol: Protocol, machines: Machines, others: Sequence[Machines] = (), *, seed: int = 0
) -> UpdateTime:
    """Seconds per update: by theory where it is exact, simulated elsewhere.

    Args:
        protocol: who waits for whom.
        machines: how long mini-batches take.
        others: what other measurements might have said of them; the band is made of these.
        seed: of the simulation.
    """
    p, law = machines.num_learners, machines.law
    exact = update_time(protocol, law, p, laws=machines.own)
    late = protocol.expected_mean_staleness(p) or 0.0
    fresh = fresh_fraction(protocol, law, p) if not machines.own else None
    if exact.kind == "exact" and exact.seconds is not None:
        seconds, band = exact.seconds, (exact.seconds, exact.seconds)
        share = fresh.value if fresh is not None and fresh.kind == "exact" else None
        if share is None:
            few = simulate(protocol, machines.keyed(seed), p, _UPDATES // 3)
            share = few.fresh_fraction
    else:
        repeats = [simulate(protocol, machines.keyed(seed + i), p, _UPDATES // 3) for i in range(3)]
        times = [timing.mean_update_time for timing in repeats]
        seconds, band = sum(times) / 3.0, (min(times), max(times))
        share = sum(timing.fresh_fraction for timing in repeats) / 3.0
    if others:
        seen = [_mean_time(protocol, other, seed) for other in others]
        low, high = np.quantile(seen, [0.1, 0.9])
        band = (min(float(low), seconds), max(float(high), seconds))
    kind = "exact" if exact.kind == "exact" else "simulated"
    return UpdateTime(seconds, band, kind, late, share)


def _mean_time(protocol: Protocol, machines: Machines, seed: int) -> float:
    exact = update_time(protocol, machines.law, machines.num_learners, laws=machines.own)
    if exact.kind == "exact" and exact.seconds is not None:
        return exact.seconds
    # The same seed for all: what differs are the laws.
    found = simulate(protocol, machines.keyed(seed), machines.num_learners, _UPDATES // 6)
    return found.mean_update_time


class RunTimes:
    """When a run typically makes its n-th update.

    Updates times the mean seconds of one are too many seconds for a short run: where a few
    mini-batches take very long, most short runs meet none of them, and in the asynchronous cells
    the first updates differ from later ones. So runs are simulated, and the geometric mean of their
    times is taken. Far out, updates follow each other by the mean.

    Args:
        protocol: who waits for whom.
        machines: how long mini-batches take.
        mean: seconds per update of a long run.
        seed: of the simulated runs, the first of consecutive ones.

    >>> from gruppetto.protocols import KBatchAsync
    >>> times = RunTimes(KBatchAsync(k=2), Machines(Constant(value=2.0), {}, 3), 4 / 3)
    >>> [round(times.at(n), 9) for n in (1, 2, 3, 4)]
    [2.0, 4.0, 4.0, 6.0]
    >>> times.count(4.0), times.count(4.5)
    (2, 4)
    """

    def __init__(
        self, protocol: Protocol, machines: Machines, mean: float, *, seed: int = 0
    ) -> None:
        self._protocol, self._machines, self._mean, self._seed = protocol, machines, mean, seed
        each = protocol.num_to_wait(machines.num_learners)
        if protocol.cell.cancels:
            each += machines.num_learners
        #: Updates of a simulated run, at most.
        self._most = max(_FIRST, _JOBS // (_RUNS * each))
        self._seconds = np.empty(0)

    def at(self, updates: int) -> float:
        """Seconds until so many updates, at least 1, are made."""
        self._simulate(updates)
        known = min(updates, self._seconds.size)
        return float(self._seconds[known - 1]) + (updates - known) * self._mean

    def count(self, seconds: float) -> int:
        """The first update that is typically made so many seconds into a run, or later."""
        seconds *= 1.0 - 1e-9
        while not self._seconds.size or self._seconds[-1] < seconds:
            if self._seconds.size == self._most:
                beyond = seconds - float(self._seconds[-1])
                return self._most + math.ceil(beyond / self._mean)
            self._simulate(self._seconds.size + 1)
        return int(np.searchsorted(self._seconds, seconds)) + 1

    def _simulate(self, updates: int) -> None:
        """See to it that the first so many are known, as far as they are simulated."""
        if updates <= self._seconds.size or self._seconds.size == self._most:
            return
        length = min(self._most, max(_FIRST, 2 ** math.ceil(math.log2(updates))))
        logs = np.zeros(length)
        for run in range(_RUNS):
            delays = self._machines.keyed(self._seed + run)
            blocks = update_blocks(self._protocol, delays, self._machines.num_learners, length)
            times = np.concatenate([block.times for block in blocks])
            # An update may take no time, where measured times are 0.
            logs += np.log(np.maximum(times, np.finfo(float).tiny))
        self._seconds = np.exp(logs / _RUNS)
