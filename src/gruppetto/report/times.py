"""Where a run's time went: per update, and on each learner.

Traces of engines without processes have no work rows, and traces of before have no times per
update; both give None or an empty list here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final

from gruppetto.protocols.messages import LearnerJoined, LearnerLost
from gruppetto.report.data import ReportedRun, number_or_none
from gruppetto.trace import WorkRow

__all__ = ["Place", "Spent", "UpdateTime", "mean_spent", "places", "update_time"]

_PUSHED: Final = "pushed"


@dataclass(frozen=True)
class UpdateTime:
    """Run time per update."""

    measured: float
    #: What the same protocol takes with the delays drawn, if nothing else cost time.
    expected: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over expected."""
        return self.measured / self.expected if self.expected else None


def update_time(run: ReportedRun) -> UpdateTime | None:
    """The time per update that a run's end row tells; None without one."""
    measured = number_or_none(run.result("mean_update_time"))
    if measured is None:
        return None
    return UpdateTime(measured, number_or_none(run.result("expected_update_time")))


@dataclass(frozen=True)
class Spent:
    """Seconds of one learner, or of a mean one; together they are the run's time."""

    computing: float = 0.0
    #: Injected.
    delay: float = 0.0
    #: Computing and delay of leases that were cancelled or failed.
    cancelled: float = 0.0
    loading: float = 0.0
    #: For the server: for the weights, and until the protocol had work to give.
    waiting: float = 0.0
    #: Before a learner's first lease and after its last answer: starting, idle, dead.
    rest: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts())

    def parts(self) -> list[float]:
        """In the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class Place:
    """One of the run's learners, and those that replaced it."""

    learners: tuple[int, ...]
    spent: Spent

    @property
    def name(self) -> str:
        """Its numbers, at most three.

        >>> Place((2, 5, 7, 9), Spent()).name
        '2, 5 … 9'
        """
        numbers = [str(learner) for learner in self.learners]
        if len(numbers) > 3:
            return f"{numbers[0]}, {numbers[1]} … {numbers[-1]}"
        return ", ".join(numbers)


def places(run: ReportedRun) -> list[Place]:
    """What each of a run's learners did with the run's time; empty without work rows."""
    if not run.trace.work:
        return []
    place_of = _place_of_learners(run)
    rows: dict[int, list[WorkRow]] = {place: [] for place in sorted(set(place_of.values()))}
    for row in run.trace.work:
        rows[place_of[row.learner]].append(row)
    members = {
        place: tuple(learner for learner, its in sorted(place_of.items()) if its == place)
        for place in rows
    }
    return [Place(members[place], _sum(each, run.outcome.time)) for place, each in rows.items()]


def mean_spent(several: Sequence[Place]) -> Spent:
    """The mean over places, of which there is at least one."""
    columns = zip(*(place.spent.parts() for place in several), strict=True)
    return Spent(*(sum(column) / len(several) for column in columns))


def _place_of_learners(run: ReportedRun) -> dict[int, int]:
    """Learner -> the place it holds.

    A trace does not say whom a newcomer replaces. Taking the place that has been vacant longest
    gives every place one learner at a time, which is all that is needed here.
    """
    wanted = number_or_none(run.settings.get("learners"))
    place_of = {learner: learner for learner in range(int(wanted or 0))}
    vacant: deque[int] = deque()
    for event in _comings_and_goings(run):
        place = place_of.get(event.learner)
        if isinstance(event, LearnerLost):
            if place is not None:
                vacant.append(place)
        elif place is None:
            free = vacant.popleft() if vacant else _next_place(place_of)
            place_of[event.learner] = free
    for row in run.trace.work:  # of learners whose joining the trace does not tell
        if row.learner not in place_of:
            place_of[row.learner] = _next_place(place_of)
    return place_of


def _next_place(place_of: dict[int, int]) -> int:
    return max(place_of.values(), default=-1) + 1


def _comings_and_goings(run: ReportedRun) -> Iterator[LearnerJoined | LearnerLost]:
    names = (LearnerJoined.__name__, LearnerLost.__name__)
    for row in run.trace.events:
        if row.type in names:  # decoding the others would cost time in a long trace
            event = row.decode()
            assert isinstance(event, LearnerJoined | LearnerLost)
            yield event


def _sum(rows: Sequence[WorkRow], run_time: float) -> Spent:
    computing = delay = cancelled = loading = waiting = 0.0
    for row in rows:
        busy = row.delay + row.loading + row.computing
        # A process may have started, and waited, before the run's clock did.
        waiting += min(row.waiting, max(0.0, row.time - busy))
        loading += row.loading
        if row.outcome == _PUSHED:
            computing += row.computing
            delay += row.delay
        else:
            cancelled += row.computing + row.delay
    accounted = computing + delay + cancelled + loading + waiting
    rest = max(0.0, run_time - accounted)
    return Spent(computing, delay, cancelled, loading, waiting, rest)
