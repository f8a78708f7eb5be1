"""Random runs of the virtual engine with faults, watched by the oracle after every event.

A run is made from one seed: protocol, learners, laws of delay, shares of faults, and how it ends.
Nothing is trained: server and learner are null. To see a failing seed again, with its events:

    PYTHONPATH=tests/protocols python tests/engines/fault_runs.py SEED
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bound_oracle import BOUNDABLE
from driver import LOSSES, Watched, draw_settings
from oracle import RULES, Settings

from gruppetto.delays import DELAYS, KeyedDelays
from gruppetto.engines.faults import Fault, FaultKind, FaultPlan
from gruppetto.engines.measuring import Measuring
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.errors import GruppettoError
from gruppetto.protocols.messages import (
    NOT_FINITE,
    Cancel,
    Command,
    Compute,
    Event,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
    LearnerLost,
    StopRequested,
)
from gruppetto.testing import NullLearner, NullServer

LAWS = (
    "constant:value=1.0",
    "exponential:mean=1.0",
    "uniform:low=0.5,high=1.5",
    "pareto:shape=1.5,scale=0.5",
    "bimodal:fast=1.0,slow=7.0,p_slow=0.2",
)


@dataclass(frozen=True)
class Plan:
    """Everything a run is made of."""

    settings: Settings
    law: str
    laws: dict[int, str]
    faults: FaultPlan
    max_time: float | None
    stop_at: int | None


class CountedPlan:
    """A fault plan that counts the kinds it hands out."""

    def __init__(self, plan: FaultPlan, seen: Counter[str]) -> None:
        self._plan = plan
        self._seen = seen

    def draw(self, slot: int, n: int) -> Fault | None:
        """See :class:`FaultPlan`."""
        fault = self._plan.draw(slot, n)
        self._seen[f"drawn {fault.kind.value}" if fault else "no fault drawn"] += 1
        return fault


class FaultyRun:
    """One run: the program and the journal of an engine, both of them suspicious."""

    def __init__(self, plan: Plan) -> None:
        settings = plan.settings
        self.plan = plan
        self.watched = Watched(settings)
        self.seen: Counter[str] = self.watched.seen
        self.server, self.learner = NullServer(), NullLearner()
        delays = KeyedDelays(
            plan.faults.seed,
            DELAYS.parse(plan.law),
            {learner: DELAYS.parse(law) for learner, law in plan.laws.items()},
            settings.learners,
        )
        counted: Any = CountedPlan(plan.faults, self.seen)
        self.engine = VirtualEngine(
            self.server,
            self.learner,
            delays,
            settings.learners,
            max_time=plan.max_time,
            faults=counted,
            measuring=self._measuring(plan),
        )
        self.given: dict[int, Compute] = {}
        self.cancelled: set[int] = set()
        self.pushed: set[int] = set()
        self.time = 0.0

    @staticmethod
    def _measuring(plan: Plan) -> Measuring | None:
        """For AdaSync, losses drawn at random, often enough to hit pushes of the same moment."""
        if not plan.settings.protocol.startswith("adasync"):
            return None
        rng = random.Random(plan.faults.seed)
        return Measuring(rng.choice([0.25, 1.0, 3.0]), lambda: rng.choice(LOSSES))

    # ------------------------------------------- the program of the engine

    def handle(self, event: Event) -> list[Command]:
        """Through the coordinator, the oracle, and a comparison of the two."""
        if isinstance(event, GradientPushed):
            self._check_push(event)
        commands = self.watched.send(event)
        self._count(event)
        for command in commands:
            if isinstance(command, Compute):
                self.given[command.lease] = command
            elif isinstance(command, Cancel):
                self.cancelled.add(command.lease)
        return commands

    def _check_push(self, event: GradientPushed) -> None:
        leased = self.given[event.lease]
        assert event.version == leased.version, f"{event} is not of the version of {leased}"
        assert (leased.mini_batch, leased.version) in self.learner.computed[-1:] or (
            event.lease in self.pushed
        ), f"{event} was not computed just now"

    def _count(self, event: Event) -> None:
        seen, model = self.seen, self.watched.model
        match event:
            case LearnerLost(_, reason):
                seen[reason] += 1
            case LearnerJoined(learner):
                seen["rejoined"] += learner >= self.plan.settings.learners
            case GradientFailed(_, reason):
                seen["not finite" if reason == NOT_FINITE else "failed"] += 1
            case GradientPushed(lease):
                seen["pushed twice"] += lease in self.pushed
                seen["pushed after its cancel"] += lease in self.cancelled
                gone = self.given[lease].learner in model.gone
                seen["pushed after its learner was lost"] += gone and lease not in self.pushed
                quiet = lease not in self.pushed and lease not in self.cancelled and not gone
                overtaken = any(lease < other for other in self.pushed)
                constant = self.plan.law.startswith("constant") and not self.plan.laws
                seen["overtaken on its way"] += quiet and constant and overtaken
                self.pushed.add(lease)
            case _:
                pass

    # ------------------------------------------- the journal of the engine

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """Time never goes back."""
        assert time >= self.time, f"time goes back from {self.time} to {time}"
        self.time = time

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """The server has taken every update; ask for a stop where the plan says so."""
        assert self.server.version == self.watched.coordinator.version
        if len(self.watched.log) == self.plan.stop_at:
            self.engine.request_stop("callback")

    # ------------------------------------------------------------ the whole

    def run(self) -> str:
        """From the start to the end, and everything that must hold then."""
        reason = self.engine.run(self, self)
        model, ledger = self.watched.model, self.watched.coordinator.ledger
        assert reason == model.finished
        allowed = {"epochs", "given-up", "diverged", "learners-lost"}
        allowed |= {"max-time"} if self.plan.max_time is not None else set()
        allowed |= {"callback"} if self.plan.stop_at is not None else set()
        assert reason in allowed, f"ended by {reason}, expected one of {sorted(allowed)}"
        if reason == "learners-lost":
            assert not model.here and not model.expected, "learners are alive"
        if reason == "epochs":
            assert ledger.num_left == 0
        if reason == "max-time":
            assert self.time == self.plan.max_time
        total = model.total if model.total is not None else len(model.place)
        counted = ledger.num_applied + ledger.num_given_up + ledger.num_dropped + ledger.num_left
        assert counted == total, f"{counted} mini-batches are accounted for of {total}"
        assert len(set(self.server.applied)) == len(self.server.applied) == ledger.num_applied
        assert sum(self.server.staleness) == self.watched.coordinator.staleness.total
        self.seen[f"ended by {reason}"] += 1
        self._drain()
        return reason

    def _drain(self) -> None:
        """Let what is still on its way arrive: then nothing but the newest version is alive."""
        self.engine._max_time = None
        for _ in range(10_000):
            try:
                event = self.engine.wait()
            except GruppettoError:  # nothing is left to happen
                break
            if isinstance(event, StopRequested):
                break
            for command in self.handle(event):
                self.engine.send(command)
        else:
            raise AssertionError("events without end after the end")
        alive = set(self.engine.gradients.in_use())
        assert alive == {self.server.version}, f"versions {alive} are alive at the end"
        assert not self.engine.gradients._arrived, "gradients are kept after the end"
        assert not self.engine.gradients._holders, "versions are held after the end"


def draw_plan(seed: int) -> Plan:
    """A run's plan, from its seed; consecutive seeds go through all protocols."""
    rng = random.Random(seed)
    names = sorted(RULES)
    name = names[seed % len(names)]
    # Every other run of those that can have a bound has one.
    bounds = [None, None, None, "discard", "restart", "wait"]
    bound = bounds[seed // len(names) % len(bounds)] if name in BOUNDABLE else None
    settings = draw_settings(rng, name, bound)
    settings = replace(settings, max_given_up=rng.choice([0, 3, 100, 100]))
    law = rng.choice(LAWS)
    laws = {n: rng.choice(LAWS) for n in range(settings.learners) if rng.random() < 0.15}
    kinds = rng.sample(list(FaultKind), k=rng.randint(0, len(FaultKind)))
    shares = {kind.value: rng.choice([0.02, 0.1, 0.1, 0.3]) for kind in kinds}
    scale = max(1.0, sum(shares.values()) / rng.uniform(0.2, 0.9))
    faults = FaultPlan(
        seed=seed,
        rejoin=rng.choice([0.0, 0.5, 1.0, 1.0]),
        extra=rng.choice([0.0, 0.3, 1.0, 1.0, 5.0]),
        **{kind: share / scale for kind, share in shares.items()},
    )
    ends = settings.mini_batches is not None
    max_time = rng.uniform(0.0, 30.0) if rng.random() < (0.15 if ends else 0.7) else None
    stop_at = rng.randint(1, 120) if rng.random() < 0.1 or not (ends or max_time) else None
    return Plan(settings, law, laws, faults, max_time, stop_at)


def run_seed(seed: int) -> FaultyRun:
    """One run from its seed.

    Raises:
        AssertionError: something is wrong; the message says how to see it again.
    """
    run = FaultyRun(draw_plan(seed))
    try:
        run.run()
    except Exception as error:
        what = str(error) if isinstance(error, AssertionError) else repr(error)
        raise AssertionError(
            f"{what}\nin {run.plan}, event {len(run.watched.log)}: {run.watched.last}\n"
            f"replay it with: PYTHONPATH=tests/protocols python "
            f"tests/engines/fault_runs.py {seed}"
        ) from error
    return run


def _show(seed: int) -> None:
    run = FaultyRun(draw_plan(seed))
    print(run.plan)
    try:
        print("ended by", run.run())
    finally:
        for n, (event, commands) in enumerate(run.watched.log):
            print(n, event)
            for command in commands:
                print("       ", command)


if __name__ == "__main__":
    _show(int(sys.argv[1]))
