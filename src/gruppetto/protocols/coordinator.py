"""The parameter server's mind: ``handle(event) -> list[Command]``.

The law of this file: everything that decides who computes what, and when an update fires, lives
here, in the ledger and in the table of collect.py; no clock, no input or output, no tensors. The
same events in the same order give the same commands, anywhere.

Theory of operation
-------------------
A learner is in one of these places::

    expected --joined--> idle --Compute--> computing --push--> idle      (k-batch cells)
                          ^                    |
                          |                    +------push--> waiting    (distinct cells)
                          +---------------- update fires --------+

Losing a learner removes it from its place for good. After every event three questions are asked,
in this order:

1. Does an update fire?  It does when as many contributions are held as it waits for: min(K, what
   can still arrive). That number shrinks with deaths and at the tail, so nobody waits for what
   cannot come. Cells that cancel close all open leases with it. The update that ends the
   warm-up is hardsync's last: whoever it frees gets work by the protocol's rules. A bound may
   hold an update back, refuse what arrives, and close leases that the update makes too old.
2. Who is idle and can be given work?  After an update those who contributed to it come first,
   then the lowest learner number: a learner that is cancelled every time would otherwise take
   the lowest mini-batches with it again and again, and an epoch would trail. A bound may keep
   learners idle.
3. Is the run over?  When every mini-batch is applied, given up or dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

from gruppetto.errors import ImpossibleEvent
from gruppetto.protocols.clocks import Clocks
from gruppetto.protocols.collect import Hardsync, Protocol
from gruppetto.protocols.guard import Guard, LossWatch, NoGuard
from gruppetto.protocols.ledger import Lease, Ledger, OnLate
from gruppetto.protocols.messages import (
    CLOSED,
    NOT_FINITE,
    RESUMED,
    TOO_STALE,
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Contribution,
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
from gruppetto.staleness import (
    Factors,
    Modulation,
    NoModulation,
    Situation,
    StalenessStatistics,
)

__all__ = ["DIVERGED", "EPOCHS", "GIVEN_UP", "Coordinator"]

EPOCHS: Final = "epochs"
DIVERGED: Final = "diverged"
GIVEN_UP: Final = "given-up"

#: So many different mini-batches not finite, with no finite one between, are divergence.
_NOT_FINITE_LIMIT: Final = 3


class Coordinator:
    """Version, members, ledger, and one protocol, after hardsync where there is a warm-up.

    Args:
        protocol: who waits for whom.
        expected_learners: numbers of the learners the run starts with. Each counts as live until
            it has joined and died, or is reported lost.
        num_mini_batches: of the whole run; None for a run without end.
        modulation: computes the factors of the contributions.
        on_late: see :class:`Ledger`.
        max_attempts: see :class:`Ledger`.
        max_given_up: the run fails when more mini-batches than this are given up.
        warmup_mini_batches: hardsync collects until an update leaves at least so many applied,
            given up or dropped; 0 for no warm-up.
        guard: ends the run as diverged when its losses leave the sane range; None for none.
    """

    def __init__(
        self,
        protocol: Protocol,
        expected_learners: Iterable[int],
        num_mini_batches: int | None,
        *,
        modulation: Modulation | None = None,
        on_late: OnLate = "requeue",
        max_attempts: int = 3,
        max_given_up: int = 0,
        warmup_mini_batches: int = 0,
        guard: Guard | None = None,
    ) -> None:
        #: The run's, for all of it but the warm-up; measurements of progress may change it.
        self.protocol = protocol
        #: Whose rules hold now.
        self.current_protocol = Hardsync() if warmup_mini_batches > 0 else protocol
        self.warmup_mini_batches = warmup_mini_batches
        self._factors = Factors(modulation if modulation is not None else NoModulation())
        self.max_given_up = max_given_up
        self.ledger = Ledger(num_mini_batches, on_late=on_late, max_attempts=max_attempts)
        #: Server version: the number of updates.
        self.version = 0
        #: Staleness of everything applied.
        self.staleness = StalenessStatistics()
        #: Why the run ended; None while it goes on.
        self.finished: str | None = None
        self.num_samples_applied = 0
        self.num_cancelled = 0
        self.num_discarded = 0
        self.num_rejected = 0
        self.num_lost = 0

        self._expected = set(expected_learners)
        #: How many gradients of each live learner were applied.
        self.clocks = Clocks(self._expected)
        most = [p.most_to_wait(len(self._expected)) for p in (protocol, self.current_protocol)]
        #: Losses of the recent gradients.
        self.losses = LossWatch(guard or NoGuard(), len(self._expected), max(most))
        self._idle: set[int] = set()
        #: learner -> its open lease.
        self._computing: dict[int, int] = {}
        #: Learners with a held contribution, in the distinct cells.
        self._waiting: set[int] = set()
        self._ever_joined: set[int] = set()
        self._held: list[GradientPushed] = []
        #: Mini-batches that were not finite since the last finite gradient.
        self._not_finite: set[int] = set()
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            GradientPushed: self._on_gradient_pushed,
            GradientFailed: self._on_gradient_failed,
            LearnerJoined: self._on_learner_joined,
            LearnerLost: self._on_learner_lost,
            ProgressMeasured: self._on_progress_measured,
            StopRequested: self._on_stop_requested,
        }

    # -------------------------------------------------------------- looking

    @property
    def num_live(self) -> int:
        """P: learners that are here or still expected."""
        return len(self._expected) + len(self._idle) + len(self._computing) + len(self._waiting)

    @property
    def is_warming_up(self) -> bool:
        """Whether hardsync's rules hold instead of the protocol's."""
        return self.current_protocol is not self.protocol

    @property
    def num_held(self) -> int:
        """Contributions waiting for their update."""
        return len(self._held)

    @property
    def held_versions(self) -> list[int]:
        """Of the weights that held contributions were computed on."""
        return [push.version for push in self._held]

    @property
    def k(self) -> int:
        """K of today's learners and rules, whatever can still arrive."""
        return self.current_protocol.num_to_wait(self.num_live)

    def num_to_wait(self) -> int:
        """How many contributions the next update waits for: min(K, what can still arrive)."""
        live = self.num_live
        k = self.current_protocol.num_to_wait(live)
        return int(min(k, self._num_that_can_arrive(live)))

    def expected_mean_staleness(self) -> float:
        """Mean staleness in closed form for today's members and rules; measured where unknown."""
        known = self.current_protocol.expected_mean_staleness(self.num_live)
        return self.staleness.mean if known is None else known

    # ------------------------------------------------------------- handling

    def handle(self, event: Event) -> list[Command]:
        """Take one event, change state, and say what is to be done, in order.

        Raises:
            ImpossibleEvent: the event cannot have happened; nothing has changed.
        """
        return self._handlers[type(event)](event)

    def _on_gradient_pushed(self, event: GradientPushed) -> list[Command]:
        lease = self.ledger.leased.get(event.lease)
        if lease is None:
            return self._outdated(event.lease)
        if not lease.version <= event.version <= self.version:
            raise ImpossibleEvent(
                f"lease {event.lease} was given at version {lease.version} and the server is at "
                f"{self.version}; expected a version between, got {event.version}"
            )
        if event.num_samples < 1 or not math.isfinite(event.loss):
            raise ImpossibleEvent(
                f"lease {event.lease}: expected a finite loss over at least 1 sample, "
                f"got {event.loss} over {event.num_samples}"
            )
        self._not_finite.clear()
        staleness = self.version - event.version
        is_diverging = self.losses.add(event.loss, event.num_samples, staleness)
        if self.current_protocol.bound.refuses(staleness) and not is_diverging:
            return self._refuse(lease)
        self.ledger.push(event.lease)
        self._held.append(event)
        del self._computing[lease.learner]
        distinct = self.current_protocol.cell.distinct
        (self._waiting if distinct else self._idle).add(lease.learner)
        return self._stop(DIVERGED) if is_diverging else self._proceed([])

    def _refuse(self, lease: Lease) -> list[Command]:
        # Others first: the mini-batch is not to go to the learner that is too slow for it.
        others = set(self._idle)
        self._set_free(lease)
        self.num_discarded += 1
        return self._proceed([Discard(lease.number, TOO_STALE)], lease.mini_batch, others)

    def _on_gradient_failed(self, event: GradientFailed) -> list[Command]:
        lease = self.ledger.leased.get(event.lease)
        if lease is None:
            return self._outdated(event.lease)
        self.ledger.fail(event.lease)
        self.num_rejected += 1
        del self._computing[lease.learner]
        self._idle.add(lease.learner)
        if event.reason == NOT_FINITE:
            self._not_finite.add(lease.mini_batch)
            if len(self._not_finite) >= _NOT_FINITE_LIMIT:
                return self._stop(DIVERGED)
        return self._proceed([], avoid=lease.mini_batch)

    def _on_learner_joined(self, event: LearnerJoined) -> list[Command]:
        learner = event.learner
        if learner in self._ever_joined or learner < 0:
            raise ImpossibleEvent(
                f"learner {learner} cannot join: expected a number never used before"
            )
        self._ever_joined.add(learner)
        self._expected.discard(learner)
        self.clocks.join(learner)
        self._idle.add(learner)
        return self._proceed([])

    def _on_learner_lost(self, event: LearnerLost) -> list[Command]:
        learner = event.learner
        lease = self._computing.pop(learner, None)
        for place in (self._expected, self._idle, self._waiting):
            if learner in place:
                place.remove(learner)
                break
        else:
            if lease is None:
                raise ImpossibleEvent(
                    f"learner {learner} cannot be lost: expected one that has joined or is "
                    "expected, and is not lost already"
                )
        # A learner lost before it joined does not come back under its number.
        self._ever_joined.add(learner)
        self.num_lost += 1
        self.clocks.lose(learner)
        self.ledger.lose(learner, lease, is_failure=event.reason != RESUMED)
        return self._proceed([])

    def _on_progress_measured(self, event: ProgressMeasured) -> list[Command]:
        if event.loss is not None and not math.isfinite(event.loss):
            raise ImpossibleEvent(f"expected a finite loss, or None without one, got {event.loss}")
        adapted = self.protocol.measured(event.loss, self.num_live)
        if not self.is_warming_up:
            self.current_protocol = adapted
        self.protocol = adapted
        # With a smaller K than before, what is held may be enough.
        return self._proceed([])

    def _on_stop_requested(self, event: StopRequested) -> list[Command]:
        return self._stop(event.reason) if self.finished is None else []

    # ------------------------------------------------- the three questions

    def _proceed(
        self, commands: list[Command], avoid: int | None = None, first: Iterable[int] = ()
    ) -> list[Command]:
        if self.finished is not None:
            return commands
        if self.ledger.num_given_up > self.max_given_up:
            return self._stop(GIVEN_UP)
        contributors = set(first)
        is_enough = self._held and len(self._held) >= self.num_to_wait()
        if is_enough and self.current_protocol.bound.may_fire(self):
            commands.append(self._apply(contributors))
            if self.current_protocol.cell.cancels:
                commands.extend(self._cancel(list(self.ledger.leased.values())))
            self._end_warmup()
            commands.extend(self._cancel(self.current_protocol.bound.too_old(self)))
        if self._idle:
            commands.extend(self._give_work(contributors, avoid))
        if self.ledger.is_finished():
            self.finished = EPOCHS
            commands.append(Finish(EPOCHS))
        return commands

    def _num_that_can_arrive(self, live: int) -> float:
        held, leased = len(self._held), len(self.ledger.leased)
        to_do = self.ledger.num_to_do if live else 0
        if self.current_protocol.cell.distinct:
            # Waiting learners have brought theirs; the idle and the expected can bring one each.
            to_do = min(to_do, len(self._idle) + len(self._expected))
        return held + leased + to_do

    def _apply(self, contributors: set[int]) -> ApplyUpdate:
        mean, live = self.expected_mean_staleness(), self.num_live
        situations = [
            Situation(self.version - push.version, mean, live, self.version) for push in self._held
        ]
        contributions = []
        factors = self._factors.of(situations)
        for push, at, factor in zip(self._held, situations, factors, strict=True):
            self.staleness.add(at.staleness)
            self.num_samples_applied += push.num_samples
            contributions.append(
                Contribution(push.lease, push.version, at.staleness, push.num_samples, factor)
            )
        contributors |= self.clocks.tick(self.ledger.apply())
        self._held.clear()
        self._idle |= self._waiting
        self._waiting.clear()
        self.version += 1
        return ApplyUpdate(self.version, tuple(contributions))

    def _end_warmup(self) -> None:
        # Nowhere but between an update and the work after it. Hardsync has just applied all that
        # was held and cancelled the rest, so nothing is collected by one set of rules and counted
        # by the other.
        if self.ledger.num_settled >= self.warmup_mini_batches:
            self.current_protocol = self.protocol

    def _cancel(self, leases: list[Lease]) -> list[Command]:
        for lease in leases:
            self._set_free(lease)
        self.num_cancelled += len(leases)
        return [Cancel(lease.number) for lease in leases]

    def _set_free(self, lease: Lease) -> None:
        self.ledger.cancel(lease.number)
        del self._computing[lease.learner]
        self._idle.add(lease.learner)

    def _give_work(self, contributors: set[int], avoid: int | None) -> list[Command]:
        leases: list[Lease] = []
        order = sorted(self._idle, key=lambda n: (n not in contributors, n))
        bound = self.current_protocol.bound
        for learner in order:
            if not bound.may_start(learner, self):
                continue
            lease = self.ledger.lease(learner, self.version, avoid)
            if lease is None:
                break
            self._idle.remove(learner)
            self._computing[learner] = lease.number
            leases.append(lease)
        # Reserved last, and not at all while learners are still to come: what is worked on at one
        # time is then the next of the stream, as in SGD with P mini-batches at a time.
        commands: list[Command] = []
        for lease in leases:
            reserved = None if self._expected else self.ledger.reserve(lease.learner, avoid)
            commands.append(
                Compute(lease.number, lease.learner, lease.mini_batch, lease.version, reserved)
            )
        return commands

    # ------------------------------------------------------------- endings

    def _outdated(self, lease: int) -> list[Command]:
        if not self.ledger.was_given(lease):
            raise ImpossibleEvent(f"lease {lease} was never given")
        self.num_discarded += 1
        return [Discard(lease, CLOSED)]

    def _stop(self, reason: str) -> list[Command]:
        leases = self.ledger.stop()
        self.num_cancelled += len(leases)
        self._held.clear()
        self._idle.update(self._computing, self._waiting)
        self._computing.clear()
        self._waiting.clear()
        self.finished = reason
        return [*(Cancel(lease.number) for lease in leases), Finish(reason)]
