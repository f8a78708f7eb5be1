"""What a run's updates would have taken if nothing but the injected delays cost time.

The same protocol over the same keyed delays, so the difference to what was measured is what
computing, messages and this machine cost. Two ways to the number:

* Cells that cancel: all learners start afresh after each update. What the update takes follows from
  the draws that come next on each slot, and how many jobs each had started is known of the run
  itself. So prediction and run take the same draws, update by update.
* Cells that go on: the whole run is simulated, in virtual time and without gradients. Where a
  millisecond changes who is K-th among learners that wait, the two part ways; over many updates
  that evens out, over two hundred it is about one per cent of chance.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from gruppetto.delays import KeyedDelays
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.protocols import Coordinator
from gruppetto.protocols.messages import (
    RESUMED,
    ApplyUpdate,
    Command,
    Compute,
    Contribution,
    Discard,
    Event,
    GradientFailed,
    LearnerJoined,
    LearnerLost,
)
from gruppetto.runs.parts import Parts, build_coordinator

__all__ = ["RoundTimes", "expected_update_time"]

#: Updates that are simulated; the mean of more tells nothing new.
_MAX_UPDATES: Final = 20_000


class _Draws(Protocol):
    def draw(self, slot: int, n: int) -> float: ...


class RoundTimes:
    """Seconds of every update of a run that cancels, by the draws that the run took.

    A round is what happens between two updates. It begins with a new job on each slot that is
    given work, and ends with as many contributions as the real one had. Left out are rounds in
    which a gradient failed, and those broken off by an interruption: the draws alone do not tell
    what these took.

    Memory grows with P, not with the number of updates. A round costs K log P.

    Args:
        delays: of the run.
        coordinator: of the run; it has handled the event given to :meth:`take`, and no later one.
        num_learners: P.
    """

    def __init__(self, delays: _Draws, coordinator: Coordinator, num_learners: int) -> None:
        self._delays = delays
        self._coordinator = coordinator
        #: Of all rounds that are told.
        self._seconds = 0.0
        self._num_rounds = 0
        #: Somebody was lost: who took which slot is not known here.
        self._is_lost = False
        #: The learner on slot 0; the others follow. Those before it are of an interrupted part.
        self._first_learner = 0
        self._jobs_started = [0] * num_learners
        self._begin()

    @classmethod
    def of(cls, parts: Parts) -> RoundTimes | None:
        """For a fresh run; None where the number is not to be had from rounds."""
        protocol, settings = parts.coordinator.protocol, parts.settings
        if settings.engine == "virtual" or not parts.has_delays:
            return None
        if not protocol.cell.cancels or protocol.measures_every is not None:
            return None
        return cls(parts.delays, parts.coordinator, settings.learners)

    @property
    def mean(self) -> float | None:
        """Seconds per round; None without a round, or once a learner was lost."""
        if self._is_lost or not self._num_rounds:
            return None
        return self._seconds / self._num_rounds

    def take(self, event: Event, commands: Sequence[Command]) -> None:
        """Take in an event and the commands that followed."""
        if isinstance(event, LearnerLost):
            self._is_whole = False
            self._is_lost = self._is_lost or event.reason != RESUMED
        elif isinstance(event, GradientFailed) and not any(
            isinstance(command, Discard) for command in commands
        ):
            self._is_whole = False
        for command in commands:
            if isinstance(command, Compute):
                slot = command.learner - self._first_learner
                # Those of before an interruption are gone, and draw nothing any more. Of a
                # replacement the slot is not known, and nothing is told any more.
                if 0 <= slot < len(self._jobs_started):
                    self._first_jobs.setdefault(slot, self._jobs_started[slot])
                    self._jobs_started[slot] += 1
            elif isinstance(command, ApplyUpdate):
                if self._is_whole and not self._is_lost:
                    self._seconds += self._round(len(command.contributions))
                    self._num_rounds += 1
                self._begin()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values."""
        return {"seconds": self._seconds, "rounds": self._num_rounds}

    def restore(self, saved: Mapping[str, Any], events: Iterable[Event]) -> None:
        """Go on where an interrupted run was; all its learners are lost, and new ones come.

        Args:
            saved: what its checkpoint holds: ``rounds`` as :meth:`state` gave it, missing in those
                of before; and ``jobs_started`` of each slot.
            events: of the run, up to the checkpoint.
        """
        state = saved.get("rounds")
        if state is not None:
            self._seconds, self._num_rounds = state["seconds"], state["rounds"]
        self._jobs_started = list(saved["jobs_started"])
        learners = [len(self._jobs_started) - 1]
        for event in events:
            if isinstance(event, LearnerJoined):
                learners.append(event.learner)
            elif isinstance(event, LearnerLost):
                self._is_lost = self._is_lost or event.reason != RESUMED
        self._first_learner = max(learners) + 1
        self._begin()
        self._is_whole = False

    def _begin(self) -> None:
        ledger = self._coordinator.ledger
        endless = ledger.num_mini_batches is None
        #: Mini-batches that this round can be given.
        self._num_left = float("inf") if endless else ledger.num_left
        self._is_distinct = self._coordinator.current_protocol.cell.distinct
        #: slot -> number of its first job in this round, in the order they were given.
        self._first_jobs: dict[int, int] = {}
        self._is_whole = True

    def _round(self, num_contributions: int) -> float:
        """When the last of so many contributions arrives, from the round's beginning."""
        lease = itertools.count()  # of what arrives together, what was given first counts first
        draw = self._delays.draw
        jobs = [(draw(slot, n), next(lease), slot, n) for slot, n in self._first_jobs.items()]
        heapq.heapify(jobs)
        can_start = 0 if self._is_distinct else self._num_left - len(jobs)
        for _ in range(num_contributions - 1):
            time, _, slot, n = heapq.heappop(jobs)
            if can_start > 0:
                can_start -= 1
                heapq.heappush(jobs, (time + draw(slot, n + 1), next(lease), slot, n + 1))
        return jobs[0][0]


class _NoGradient:
    loss = 0.0
    num_samples = 1


class _NoLearner:
    def compute(self, mini_batch: int, weights: object) -> _NoGradient:
        return _NoGradient()


class _NoServer:
    needs_past = False

    def snapshot(self) -> None:
        return None

    def apply(
        self,
        contributions: Sequence[Contribution],
        gradients: Sequence[Any],
        past: Sequence[Any] = (),
    ) -> None:
        pass


class _UpTo:
    """Stops after so many updates, and knows when the last one was."""

    def __init__(self, engine: VirtualEngine, num_updates: int) -> None:
        self._engine = engine
        self._num_updates = num_updates
        self.time = 0.0
        self.count = 0

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        pass

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        if any(isinstance(command, ApplyUpdate) for command in commands):
            self.time = time
            self.count += 1
            if self.count >= self._num_updates:
                self._engine.request_stop("enough")


def expected_update_time(
    parts: Parts, result: Mapping[str, Any], rounds: RoundTimes | None
) -> float | None:
    """Seconds per update by the delays drawn.

    Args:
        parts: of the run.
        result: its summary.
        rounds: of the run, where its protocol cancels; else as many updates as it made are
            simulated, 20,000 at most.

    Returns:
        None where no delay was injected or nothing was updated, where learners were lost and the
        delays tell too little, and where K follows a loss, which nothing tells without gradients.
        In a run that is simulated, an interruption counts as a loss of all learners.
    """
    if rounds is not None:
        return rounds.mean
    settings = parts.settings
    updates = min(int(result["updates"]), _MAX_UPDATES)
    if not parts.has_delays or result["learners_lost"] or not updates:
        return None
    if parts.coordinator.protocol.measures_every is not None:
        return None
    total = parts.coordinator.ledger.num_mini_batches
    per_epoch = parts.mini_batches.per_epoch
    coordinator = build_coordinator(settings, total, per_epoch)
    delays: KeyedDelays = parts.delays
    engine = VirtualEngine(_NoServer(), _NoLearner(), delays, settings.learners)
    counted = _UpTo(engine, updates)
    engine.run(coordinator, counted)
    return counted.time / counted.count if counted.count else None
