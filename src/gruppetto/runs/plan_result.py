"""What a plan says: choices in order, one recommendation, and why, in a sentence."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gruppetto.delays import DELAYS, Empirical
from gruppetto.protocols import PROTOCOLS, Hardsync
from gruppetto.runs.plan_laws import Law
from gruppetto.runs.plan_pilot import Entry, rate_keywords
from gruppetto.theory.machines import Machines, slowest_ratio
from gruppetto.theory.planner import (
    center_and_band,
    decide,
    floor_ratio,
    may_be_best,
    pooled_spread,
)

__all__ = ["Assessment", "Plan", "PlanMaker", "delay_words"]

#: Where nothing is trained, times that differ by less are alike.
_ABOUT_AS_FAST: Final = 1.1
#: Losses and times closer than this are alike, where nobody reached the target.
_ALIKE: Final = 0.05


@dataclass(frozen=True)
class Assessment:
    """What a plan knows of one choice. Bands hold with 80 %; None for what is not known."""

    protocol: str
    #: Samples of one learner's mini-batch; None where nobody said.
    batch_size: int | None
    #: Multiplies the learning rate that hardsync has.
    learning_rate_factor: float
    #: Seconds, and whether by theory ("exact") or "simulated".
    update_time: float
    update_time_band: tuple[float, float]
    update_time_is: str
    #: Seconds.
    time_to_target: float | None
    time_to_target_band: tuple[float, float] | None
    #: Seconds after which a pilot run was stopped short of the target.
    time_is_above: float | None
    #: Updates to the target, over seeds.
    updates_to_target: float | None
    #: Pilot runs that count.
    seeds: int
    #: Mean, in updates.
    staleness: float
    #: Where the bound on the error ends, over where hardsync's does; a lower bound if stale.
    error_floor: float
    #: Virtual seconds that the first pilot run came to, and its test loss there.
    measured_time: float | None
    measured_loss: float | None


@dataclass(frozen=True)
class Plan:
    """What is recommended, and everything it rests on."""

    #: The law: spec, warnings, n, ...
    delay: dict[str, Any]
    learners: int
    target: str | None
    #: Best first.
    candidates: tuple[Assessment, ...]
    recommendation: Assessment
    #: A command line that trains so; None for a task without a name.
    command: str | None
    #: One sentence.
    why: str
    #: What else to know, each in a sentence.
    notes: tuple[str, ...]
    #: Epochs of training the pilot runs were allowed, and took.
    budget: float
    spent: float

    def as_dict(self) -> dict[str, Any]:
        """The object that ``gruppetto plan --json`` prints."""
        return {
            "delay": self.delay,
            "learners": self.learners,
            "target": self.target,
            "candidates": [_plain(vars(each)) for each in self.candidates],
            "recommendation": {**_plain(vars(self.recommendation)), "command": self.command},
            "why": self.why,
            "notes": list(self.notes),
            "budget": self.budget,
            "spent": self.spent,
            "report": None,
        }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


class PlanMaker:
    """Makes a plan of choices, their times per update and what pilot runs measured.

    Args:
        law: the delays.
        entries: the choices, plain hardsync first.
        batch_size: of hardsync; None where nobody said.
        task: its name; None for a task that has none, and for no task.
        base: what all runs are told.
        target: metric and value, if there is one.
        is_virtual: the command trains in virtual time, under the law; else on real machines.
    """

    def __init__(
        self,
        law: Law,
        entries: Sequence[Entry],
        batch_size: int | None,
        task: str | None,
        base: Mapping[str, Any],
        target: str | None,
        is_virtual: bool,
    ) -> None:
        self._law, self._entries, self._batch_size = law, list(entries), batch_size
        self._task, self._base, self._target, self._is_virtual = task, base, target, is_virtual
        self._p = law.machines.num_learners
        self._hardsync = self._entries[0]
        self._spread = 0.0

    # ------------------------------------------------------------ without training

    def by_time(self) -> Plan:
        """Ranked by seconds per mini-batch applied, one of staleness s counting as 1/(1 + s)."""
        entries = [entry for entry in self._entries if entry.choice.batch_size == self._size
                   and (entry.choice.rate_factor == 1.0)]  # fmt: skip
        fastest = min(self._seconds_each(entry) for entry in entries)
        # As good as the fastest, and closest to what hardsync's updates are.
        good = [e for e in entries if self._seconds_each(e) <= _ABOUT_AS_FAST * fastest]
        best = min(good, key=lambda e: (abs(math.log(self._floor(e))), e.choice.complexity))
        ranked = sorted(entries, key=lambda e: (self._seconds_each(e), e.choice.complexity))
        ranked = [best, *(entry for entry in ranked if entry is not best)]
        if best is self._hardsync:
            why = f"hardsync: {self._why_hardsync('a mini-batch')}"
        else:
            gain = self._seconds_each(self._hardsync) / self._seconds_each(best)
            why = (
                f"{_name(best)}: {gain:.2g} times as many mini-batches per second as hardsync, "
                f"stale ones counting for less, because {self._because(best)}"
            )
        why += "; which one learns fastest, only a task with a target can tell"
        return self._plan(ranked, best, why, (), 0.0, 0.0)

    def _floor(self, entry: Entry) -> float:
        hardsync, fresh = self._hardsync.choice, entry.update.fresh
        return floor_ratio(entry.choice, hardsync, self._p, fresh)

    @property
    def _size(self) -> int:
        return self._hardsync.choice.batch_size

    def _seconds_each(self, entry: Entry) -> float:
        k = entry.choice.protocol.num_to_wait(self._p)
        return entry.update.seconds * (1.0 + entry.update.staleness) / k

    # --------------------------------------------------------------- with training

    def by_target(self, budget: float, spent: float) -> Plan:
        """Ranked by seconds to the target.

        Args:
            budget: epochs that pilot runs were allowed.
            spent: epochs that they took.
        """
        reached = [entry for entry in self._entries if entry.updates]
        if not reached:
            return self._out_of_reach(budget, spent)
        # Those that share pilot runs count once.
        measured = {tuple(entry.updates.items()): entry.times for entry in reached}
        self._spread = pooled_spread(list(measured.values()))
        close = may_be_best([entry.times for entry in reached], self._spread)
        finalists = [entry for entry, is_close in zip(reached, close, strict=True) if is_close]
        if self._hardsync.updates and self._hardsync not in finalists:
            finalists.append(self._hardsync)
        best = self._decide(finalists)
        others = sorted((e for e in reached if e is not best), key=lambda e: e.center)
        rest = [entry for entry in self._entries if not entry.updates]
        ranked = [best, *others, *sorted(rest, key=_by_loss)]
        notes = []
        fastest = min(finalists, key=lambda entry: entry.center)
        if self._law.machines.are_constant and fastest is not best:
            low, high = self._ratio(fastest, best)
            if high < 1.0:
                notes.append(
                    f"{_name(fastest)} took {low:.2g} to {high:.2g} of hardsync's time in the "
                    "pilot runs: it makes more updates of fewer samples, as smaller mini-batches "
                    "would"
                )
        if max(len(entry.updates) for entry in reached) == 1:
            notes.append(
                "the budget was spent before anything was repeated: one seed decides, and bands "
                "hold what is usual between seeds"
            )
        return self._plan(ranked, best, self._why(best, fastest), notes, budget, spent)

    def _decide(self, finalists: Sequence[Entry]) -> Entry:
        times = [entry.center for entry in finalists]
        bands = [self._band(entry)[1] for entry in finalists]
        constant = self._law.machines.are_constant
        return finalists[decide([e.choice for e in finalists], times, bands, constant=constant)]

    def _band(self, entry: Entry) -> tuple[float, tuple[float, float]]:
        return center_and_band(entry.times, self._spread, update=entry.update)

    def _ratio(self, one: Entry, other: Entry) -> tuple[float, float]:
        """The band of one's time over the other's."""
        (a, (a_low, a_high)), (b, (b_low, b_high)) = self._band(one), self._band(other)
        down = math.hypot(math.log(a / a_low), math.log(b_high / b))
        up = math.hypot(math.log(a_high / a), math.log(b / b_low))
        return a / b * math.exp(-down), a / b * math.exp(up)

    def _out_of_reach(self, budget: float, spent: float) -> Plan:
        entries = sorted(self._entries, key=_by_loss)
        furthest = [entry for entry in entries if entry.depth == entries[0].depth]
        bound = furthest[0].loss + _ALIKE * abs(furthest[0].loss)
        time = (1.0 + _ALIKE) * furthest[0].horizon
        alike = [entry for entry in furthest if entry.loss <= bound and entry.horizon <= time]
        best = min(alike, key=lambda entry: (entry.choice.complexity, entry.loss))
        if self._law.machines.are_constant:
            best = self._hardsync
        entries = [best, *(entry for entry in entries if entry is not best)]
        why = (
            f"{_name(best)}: a loss of {best.loss:.3g} after {best.horizon:.3g} s, and the lowest "
            f"then was {furthest[0].loss:.3g}; {self._target} lies outside what a budget of "
            f"{budget:.3g} epochs measured, so nothing is known of the time to it"
        )
        return self._plan(entries, best, why, (), budget, spent)

    # ----------------------------------------------------------------------- words

    def _why(self, best: Entry, fastest: Entry) -> str:
        metric, _, value = (self._target or "").partition("=")
        goal = f"{metric} {value}"
        hardsync = self._hardsync
        if best.choice == hardsync.choice:
            reason = self._why_hardsync(goal)
            if fastest is not best and not self._law.machines.are_constant:
                low, high = self._ratio(fastest, best)
                reason = (
                    f"nothing is faster to {goal} beyond chance: the fastest, {_name(fastest)}, "
                    f"takes {fastest.center / best.center:.2g} of its time "
                    f"({low:.2g} to {high:.2g})"
                )
            return f"{_name(best)}: {reason}"
        if hardsync.updates:
            low, high = self._ratio(hardsync, best)
            gain = (
                f"{hardsync.center / best.center:.2g} times faster ({low:.2g} to {high:.2g}) than"
            )
        elif hardsync.at_least is not None and hardsync.at_least < math.inf:
            gain = f"more than {hardsync.at_least / best.center:.2g} times faster than"
        else:
            gain = "reaches the target, unlike"
        return f"{_name(best)}: {gain} hardsync to {goal}, because {self._because(best)}"

    def _why_hardsync(self, goal: str) -> str:
        if self._law.machines.are_constant:
            return "the delays do not vary, so nobody waits for anybody"
        return f"nothing is faster to {goal}"

    def _because(self, entry: Entry) -> str:
        k = entry.choice.protocol.num_to_wait(self._p)
        cell = entry.choice.protocol.cell
        if cell.distinct and k < self._p:
            slow = self._p - k
            ratio = slowest_ratio(entry.machines, slow)
            who = "the slowest takes" if slow == 1 else f"the slowest {slow} of {self._p} take"
            return f"{who} {ratio:.2g} times the median"
        seconds, all_of = entry.update.seconds, self._hardsync.update.seconds
        if seconds / k < all_of / self._p:
            return (
                f"a mini-batch is applied every {seconds / k:.3g} s, and by hardsync, which waits "
                f"for the slowest of {self._p}, every {all_of / self._p:.3g} s"
            )
        return (
            f"an update of {k} mini-batches comes every {seconds:.3g} s, and one of {self._p} "
            f"every {all_of:.3g} s"
        )

    def _assess(self, entry: Entry) -> Assessment:
        choice, update = entry.choice, entry.update
        center, band = self._band(entry) if entry.updates else (None, None)
        return Assessment(
            protocol=PROTOCOLS.format(choice.protocol),
            batch_size=None if self._batch_size is None else choice.batch_size,
            learning_rate_factor=choice.rate_factor,
            update_time=update.seconds,
            update_time_band=update.band,
            update_time_is=update.kind,
            time_to_target=center,
            time_to_target_band=band,
            time_is_above=_finite(entry.at_least),
            updates_to_target=entry.typical_updates if entry.updates else None,
            seeds=len(entry.updates),
            staleness=update.staleness,
            error_floor=self._floor(entry),
            measured_time=entry.horizon if entry.horizon > 0 else None,
            measured_loss=_finite(entry.loss),
        )

    def _plan(
        self, ranked: Sequence[Entry], best: Entry, why: str, notes: Sequence[str],
        budget: float, spent: float,
    ) -> Plan:  # fmt: skip
        return Plan(
            delay=self._law.as_dict(),
            learners=self._p,
            target=self._target,
            candidates=tuple(self._assess(entry) for entry in ranked),
            recommendation=self._assess(best),
            command=self._command(best),
            why=why,
            notes=tuple(notes),
            budget=budget,
            spent=spent,
        )

    def _command(self, entry: Entry) -> str | None:
        if self._task is None:
            return None
        words = ["gruppetto", "train", self._task]
        choice = entry.choice
        values: dict[str, Any] = {
            **{k: v for k, v in self._base.items() if isinstance(v, (str, int, float))},
            **rate_keywords(choice, self._p, self._base),
            "protocol": PROTOCOLS.format(choice.protocol),
            "learners": self._p,
            "batch_size": choice.batch_size,
            "target": self._target,
        }  # fmt: skip
        for key, value in values.items():
            if value is not None:
                words += [f"--{key.replace('_', '-')}", str(value)]
        if self._is_virtual:
            words += ["--engine", "virtual", *delay_words(entry.machines)]
        return shlex.join(words)


def delay_words(machines: Machines) -> list[str]:
    """``--delay`` for each law that can be written down.

    >>> from gruppetto.delays import Constant
    >>> delay_words(Machines(Constant(value=1.0), {2: Constant(value=3.0)}, 4))
    ['--delay', 'constant:value=1.0', '--delay', '2=constant:value=3.0']
    """
    words = []
    own = [(f"{learner}=", law) for learner, law in sorted(machines.own.items())]
    for prefix, law in [("", machines.law), *own]:
        if not isinstance(law, Empirical) or law.file:
            words += ["--delay", prefix + DELAYS.format(law)]
    return words


def _name(entry: Entry) -> str:
    text = PROTOCOLS.format(entry.choice.protocol)
    if not isinstance(entry.choice.protocol, Hardsync) and entry.choice.rate_factor != 1.0:
        text += f" with {entry.choice.rate_factor:.2g} of the learning rate"
    return text


def _by_loss(entry: Entry) -> tuple[float, float, float]:
    """Who came further in the race first, then the lower loss, then the shorter time."""
    return -entry.depth, entry.loss, entry.horizon


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
