"""What became of each learner's work: a fold over events and the commands that answered them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.protocols.messages import (
    TOO_STALE,
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Discard,
    Event,
    Finish,
    GradientFailed,
    GradientPushed,
    LearnerLost,
)

__all__ = ["Account", "LearnerAccount"]


@dataclass(slots=True)
class LearnerAccount:
    """One learner's leases, each counted once: applied, cancelled, failed, lost, stale, or left."""

    learner: int
    #: Mini-batches handed to it, each time counted.
    leases: int = 0
    #: Gradients of it in updates, their samples, and their staleness.
    applied: int = 0
    samples: int = 0
    staleness: int = 0
    max_staleness: int = 0
    #: Leases cancelled: by an update, or as the run was stopped.
    cancelled: int = 0
    #: Of these, the ones that were open as the run was stopped.
    stopped: int = 0
    #: Leases that ended in a failure or a gradient that was not finite.
    rejected: int = 0
    #: Leases open when it was lost.
    lost: int = 0
    #: Leases that ended in a gradient staler than the bound allows.
    too_stale: int = 0
    #: Answers that came too late to be used; of leases that are cancelled or lost already, and
    #: those that are too stale.
    discarded: int = 0

    @property
    def mean_staleness(self) -> float:
        """Of its applied gradients; 0.0 without any."""
        return self.staleness / self.applied if self.applied else 0.0

    @property
    def left(self) -> int:
        """Leases neither applied nor ended otherwise: in hand or held, or returned by a stop."""
        ended = self.applied + self.cancelled + self.rejected + self.lost + self.too_stale
        return self.leases - ended


class Account:
    """Per learner, what was handed out and what it came to."""

    def __init__(self) -> None:
        #: learner -> its account, in order of its first lease.
        self.learners: dict[int, LearnerAccount] = {}
        #: The learner of each lease ever given, which are numbered from 0 on.
        self._learner_of: list[int] = []
        self._open: set[int] = set()

    def count(self, event: Event, commands: Sequence[Command]) -> None:
        """Take an event and its commands in."""
        if isinstance(event, GradientPushed):
            self._open.discard(event.lease)
        elif isinstance(event, GradientFailed):
            if event.lease in self._open:
                self._open.remove(event.lease)
                self._of(event.lease).rejected += 1
        elif isinstance(event, LearnerLost):
            lost = [lease for lease in self._open if self._learner_of[lease] == event.learner]
            self._open.difference_update(lost)
            if lost:
                self.learners[event.learner].lost += len(lost)
        stops = any(isinstance(c, Finish) for c in commands)
        stops = stops and not any(isinstance(c, ApplyUpdate) for c in commands)
        for command in commands:
            self._carry_out(command, stops)

    def _carry_out(self, command: Command, stops: bool) -> None:
        match command:
            case Compute():
                self._learner_of.append(command.learner)
                self._open.add(command.lease)
                account = self.learners.get(command.learner)
                if account is None:
                    account = self.learners[command.learner] = LearnerAccount(command.learner)
                account.leases += 1
            case Cancel():
                self._open.remove(command.lease)
                self._of(command.lease).cancelled += 1
                self._of(command.lease).stopped += stops
            case Discard():
                self._of(command.lease).discarded += 1
                self._of(command.lease).too_stale += command.reason == TOO_STALE
            case ApplyUpdate():
                for contribution in command.contributions:
                    account = self._of(contribution.lease)
                    account.applied += 1
                    account.samples += contribution.num_samples
                    account.staleness += contribution.staleness
                    account.max_staleness = max(account.max_staleness, contribution.staleness)

    def _of(self, lease: int) -> LearnerAccount:
        return self.learners[self._learner_of[lease]]
