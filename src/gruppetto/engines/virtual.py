"""Real gradients, virtual time: the reference engine.

Time is a number that jumps to the next event. A gradient is computed when it *arrives*, on the
version it used, so cancelled work costs nothing. Same seed, same bits.

The agenda is a heap ordered by (time, rank, number): joins and losses before pushes, pushes of
the same moment in lease order. That key is the whole determinism story. Measurements of progress
come between the two and are not on the agenda: they are due for ever, and nothing waits for them.
"""

from __future__ import annotations

import heapq
import itertools
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gruppetto.delays import KeyedDelays
from gruppetto.engines.base import Engine
from gruppetto.engines.faults import Fault, FaultKind, FaultPlan
from gruppetto.engines.gradients import ComputesGradients, Gradients, HoldsWeights
from gruppetto.engines.measuring import Measuring
from gruppetto.errors import GruppettoError
from gruppetto.protocols.messages import (
    NOT_FINITE,
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Discard,
    Event,
    Finish,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
    LearnerLost,
    ProgressMeasured,
    StopRequested,
)
from gruppetto.training.learner import NotFinite

__all__ = ["LEARNERS_LOST", "MAX_TIME", "VirtualEngine", "compute_event", "failure_reason"]

LEARNERS_LOST: Final = "learners-lost"
MAX_TIME: Final = "max-time"

_NOTICE, _MEASUREMENT, _PUSH = 0, 1, 2  # ranks
#: Cancelled jobs that may lie on the agenda whatever its length.
_MANY: Final = 64


@dataclass(slots=True)
class _Job:
    """A mini-batch being computed."""

    compute: Compute
    fault: Fault | None
    #: The coordinator still counts on it.
    is_open: bool = True
    #: It will be delivered even when nobody counts on it any more.
    is_stubborn: bool = False
    #: A second delivery of a push: (version, loss, samples) of the first.
    pushed: tuple[int, float, int] | None = None


#: What the agenda holds: a learner's arrival or loss, or a job's delivery.
_Item: TypeAlias = LearnerJoined | LearnerLost | _Job


class VirtualEngine(Engine):
    """Runs all learners in this process, one gradient at a time.

    Args:
        server: holds weights.
        learner: computes every learner's gradients.
        delays: seconds per job.
        num_learners: learners 0 .. num_learners - 1 join at time 0.
        max_time: seconds; the run stops when the next event would be later.
        faults: what goes wrong.
        measuring: when progress is measured, for protocols that ask for it.
    """

    def __init__(
        self,
        server: HoldsWeights,
        learner: ComputesGradients,
        delays: KeyedDelays,
        num_learners: int,
        *,
        max_time: float | None = None,
        faults: FaultPlan | None = None,
        measuring: Measuring | None = None,
    ) -> None:
        super().__init__()
        self.gradients = Gradients(server, learner)
        self._delays = delays
        self._num_learners = num_learners
        self._max_time = max_time
        self._faults = faults
        self._measuring = measuring
        self._time = 0.0
        self._agenda: list[tuple[float, int, int, int, _Item]] = []
        self._count = itertools.count()
        #: lease -> its job, while the coordinator counts on it.
        self._open: dict[int, _Job] = {}
        self._slots = {learner: learner for learner in range(num_learners)}
        self._jobs_started = [0] * num_learners
        self._lost: set[int] = set()
        #: Learners whose loss is on the agenda; they are not lost a second time.
        self._doomed: set[int] = set()
        self._num_joined = 0
        #: Cancelled since the agenda was last cleared of them.
        self._num_cancelled = 0
        #: The lease whose gradient the last wait() kept; a Discard of it means that one.
        self._just_kept: int | None = None
        self._is_restored = False

    # -------------------------------------------------------- the four verbs

    def start(self) -> None:
        """All learners join at time 0; a restored engine is under way already."""
        if not self._is_restored:
            self.gradients.publish(0)
            self._invite()

    def now(self) -> float:
        """Virtual seconds."""
        return self._time

    def wait(self) -> Event:
        """Jump to the next event; compute its gradient if it is a push."""
        self._just_kept = None
        due = self._next_due()
        if due is None:
            if len(self._lost) < self._num_joined:
                raise GruppettoError(
                    "nothing is left to happen although learners are alive: the program waits "
                    "for what cannot arrive"
                )
            return StopRequested(LEARNERS_LOST)
        measuring = self._measures_next()
        if measuring is not None:
            due = measuring.next_at
        if self._max_time is not None and due > self._max_time:
            self._time = self._max_time
            return StopRequested(MAX_TIME)
        if measuring is not None:
            self._time = due
            return measuring.take(due)
        item = self._pop()
        if not isinstance(item, _Job):
            return item
        return self._deliver(item)

    def send(self, command: Command) -> None:
        """Carry out a command."""
        match command:
            case Compute():
                self.gradients.hold(command.version)
                self._start_job(command)
            case ApplyUpdate():
                self.gradients.apply(command)
            case Cancel():
                self._cancel(command.lease)
            case Discard():
                if command.lease == self._just_kept:
                    self.gradients.drop(command.lease)
            case Finish():
                self.gradients.drop_all()

    # --------------------------------------------------------------- resume

    def restore(
        self,
        history: Iterable[tuple[Event, Sequence[Command]]],
        versions: dict[int, Any],
        newest: int,
    ) -> None:
        """Bring a fresh engine to where another one was, without computing anything again.

        Args:
            history: the events so far, each with its commands.
            versions: version -> weights, of every version in use.
            newest: the newest of them.

        Raises:
            GruppettoError: the history is not what these delays and faults lead to.
        """
        self._is_restored = True
        self._invite()
        held: dict[int, Compute] = {}
        for event, commands in history:
            self._next_due()
            measuring, just_kept = self._measures_next(), None
            item = self._pop() if measuring is None else None
            if measuring is not None:
                if not isinstance(event, ProgressMeasured):
                    raise GruppettoError(
                        f"expected the trace to go on with a measurement, got {event}"
                    )
                self._time = measuring.next_at
                measuring.passed(self._time)
            elif isinstance(item, _Job):
                lease = item.compute.lease
                if not isinstance(event, GradientPushed | GradientFailed) or event.lease != lease:
                    raise GruppettoError(
                        f"expected the trace to go on with lease {lease}, got {event}"
                    )
                was_open = self._open.pop(lease, None) is not None
                if was_open and isinstance(event, GradientPushed):
                    held[lease] = item.compute
                    just_kept = lease
                self._after_delivery(item, event)
            elif item != event:
                raise GruppettoError(f"expected the trace to go on with {item}, got {event}")
            for command in commands:
                match command:
                    case Compute():
                        self.gradients.hold(command.version)
                        self._start_job(command)
                    case ApplyUpdate():
                        for contribution in command.contributions:
                            del held[contribution.lease]
                    case Cancel():
                        self._cancel(command.lease)
                    case Discard():
                        if command.lease == just_kept:
                            del held[command.lease]
        # Only now: while folding, versions come and go that the saved ones do not include.
        self.gradients.restore(versions, newest)
        for lease, compute in held.items():
            gradient = self.gradients.compute(compute.mini_batch, compute.version)
            self.gradients.keep(lease, compute.version, gradient)

    # -------------------------------------------------------------- helpers

    def _invite(self) -> None:
        for learner in range(self._num_learners):
            self._put(0.0, LearnerJoined(learner))

    def _put(self, time: float, item: _Item) -> None:
        rank, number = (_PUSH, item.compute.lease) if isinstance(item, _Job) else (_NOTICE, 0)
        # Both deliveries of a duplicated push may be due at once: the count breaks the tie.
        heapq.heappush(self._agenda, (time, rank, number, next(self._count), item))

    def _next_due(self) -> float | None:
        """When the next item is due, after throwing away what nobody will hear of."""
        while self._agenda:
            time, *_, item = self._agenda[0]
            if _is_wanted(item):
                return time
            heapq.heappop(self._agenda)
        return None

    def _measures_next(self) -> Measuring | None:
        """The measuring, where it comes before what is first on the agenda."""
        measuring = self._measuring
        if measuring is None:
            return None
        return measuring if (measuring.next_at, _MEASUREMENT) < self._agenda[0][:2] else None

    def _clear_agenda(self) -> None:
        """Drop the cancelled jobs that are due far in the future, before they pile up."""
        self._agenda = [entry for entry in self._agenda if _is_wanted(entry[-1])]
        heapq.heapify(self._agenda)
        self._num_cancelled = 0

    def _pop(self) -> _Item:
        self._time, *_, item = heapq.heappop(self._agenda)
        if isinstance(item, LearnerJoined):
            self._num_joined += 1
        elif isinstance(item, LearnerLost):
            self._lost.add(item.learner)
            for job in [j for j in self._open.values() if j.compute.learner == item.learner]:
                self._cancel(job.compute.lease)
        return item

    def _start_job(self, compute: Compute) -> None:
        slot = self._slots[compute.learner]
        n = self._jobs_started[slot]
        self._jobs_started[slot] = n + 1
        end = self._time + self._delays.draw(slot, n)
        fault = None if self._faults is None else self._faults.draw(slot, n)
        job = self._open[compute.lease] = _Job(compute, fault)
        if fault is None:
            self._put(end, job)
            return
        match fault.kind:
            case FaultKind.DIE:
                self._lose(compute.learner, end, "died", fault)
            case FaultKind.HANG:
                job.is_stubborn = True
                self._lose(compute.learner, end + fault.extra, "hung", fault)
                self._put(end + 2.0 * fault.extra, job)
            case FaultKind.REORDER:
                self._put(end + fault.extra, job)
            case _:
                job.is_stubborn = fault.kind is FaultKind.LATE
                self._put(end, job)

    def _lose(self, learner: int, time: float, reason: str, fault: Fault) -> None:
        if learner in self._doomed:
            return
        self._doomed.add(learner)
        self._put(time, LearnerLost(learner, reason))
        if fault.rejoin_after is not None:
            newcomer = len(self._slots)
            self._slots[newcomer] = self._slots[learner]
            self._put(time + fault.rejoin_after, LearnerJoined(newcomer))

    def _cancel(self, lease: int) -> None:
        job = self._open.pop(lease, None)
        if job is None:
            return
        job.is_open = False
        if not job.is_stubborn:
            self.gradients.release(job.compute.version)
            self._num_cancelled += 1
            if self._num_cancelled > max(_MANY, len(self._agenda) // 2):
                self._clear_agenda()

    def _deliver(self, job: _Job) -> Event:
        compute = job.compute
        if job.pushed is not None:
            return GradientPushed(compute.lease, *job.pushed)
        event, gradient = compute_event(self, self.gradients, compute, compute.version, job.fault)
        is_open = self._open.pop(compute.lease, None) is not None
        if gradient is not None and is_open:
            self.gradients.keep(compute.lease, compute.version, gradient)
            self._just_kept = compute.lease
        self._after_delivery(job, event)
        return event

    def _after_delivery(self, job: _Job, event: Event) -> None:
        """Bookkeeping of a delivered job; the same when a history is restored."""
        if job.pushed is not None:
            return
        job.is_open = job.is_stubborn = False
        self.gradients.release(job.compute.version)
        again = job.fault is not None and job.fault.kind is FaultKind.DUPLICATE
        if again and isinstance(event, GradientPushed):
            assert job.fault is not None
            numbers = (event.version, event.loss, event.num_samples)
            twin = _Job(job.compute, job.fault, is_stubborn=True, pushed=numbers)
            self._put(self._time + job.fault.extra, twin)


def _is_wanted(item: _Item) -> bool:
    return not isinstance(item, _Job) or item.is_open or item.is_stubborn


def failure_reason(error: BaseException) -> str:
    """One line for a GradientFailed."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def compute_event(
    engine: Engine, gradients: Gradients, compute: Compute, version: int, fault: Fault | None
) -> tuple[Event, Any]:
    """Compute a gradient; the event that reports it, and the gradient if there is one."""
    lease = compute.lease
    if fault is not None and fault.kind is FaultKind.FAIL:
        return GradientFailed(lease, "a fault of the plan"), None
    if fault is not None and fault.kind is FaultKind.NOT_FINITE:
        return GradientFailed(lease, NOT_FINITE), None
    try:
        gradient = gradients.compute(compute.mini_batch, version)
    except NotFinite:
        return GradientFailed(lease, NOT_FINITE), None
    except Exception as error:
        engine.tracebacks[lease] = traceback.format_exc()
        return GradientFailed(lease, failure_reason(error)), None
    return GradientPushed(lease, version, gradient.loss, gradient.num_samples), gradient
