"""The one loop. Engines differ in how they start, send, wait and tell the time; never in this.

    wait for an event -> program.handle -> row written -> commands carried out -> and again

A row is written before its effect is published, so a killed run can be read up to its last effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, final

from gruppetto.protocols.messages import Command, Event, Finish, StopRequested
from gruppetto.trace import WorkRow

__all__ = ["Engine", "Journal", "Program"]


class Program(Protocol):
    """What an engine runs: the coordinator is one, a decoupled schedule is another."""

    def handle(self, event: Event) -> list[Command]:
        """Events in, commands out."""
        ...


class Journal(Protocol):
    """What is kept of a run while it goes on."""

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """Write the event down; nothing of it has been carried out yet."""
        ...

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """All commands have been sent and new weights published."""
        ...


class Engine(ABC):
    """Carries out commands and reports events.

    Subclasses implement :meth:`start`, :meth:`send`, :meth:`wait` and :meth:`now`. An engine may
    also report ``StopRequested`` itself, when its clock reaches a limit or nobody is left.
    """

    def __init__(self) -> None:
        self._stop_reason: str | None = None
        #: lease -> traceback of a failed computation, until the journal has taken it.
        self.tracebacks: dict[int, str] = {}
        #: Where the time of answered leases went, until the journal has taken it; engines with
        #: real processes only.
        self.work: list[WorkRow] = []
        #: Lost learners whose place another process took.
        self.num_restarted = 0

    @abstractmethod
    def start(self) -> None:
        """Bring the learners up; their ``LearnerJoined`` events follow from :meth:`wait`."""

    @abstractmethod
    def send(self, command: Command) -> None:
        """Carry out a command; for ``ApplyUpdate``, return when the version is published."""

    @abstractmethod
    def wait(self) -> Event:
        """The next event; events of one learner come in the order it caused them."""

    @abstractmethod
    def now(self) -> float:
        """Run time in seconds, evaluation excluded."""

    def request_stop(self, reason: str) -> None:
        """End the run at the next opportunity; the first reason given is the one recorded.

        Safe to call from a signal handler.
        """
        if self._stop_reason is None:
            self._stop_reason = reason

    @final
    def run(self, program: Program, journal: Journal) -> str:
        """Run a program to its ``Finish``.

        Returns:
            Why it finished.
        """
        self.start()
        while True:
            event = self.wait() if self._stop_reason is None else StopRequested(self._stop_reason)
            time = self.now()
            commands = program.handle(event)
            journal.record(event, commands, time)
            finished = None
            for command in commands:
                self.send(command)
                if isinstance(command, Finish):
                    finished = command.reason
            journal.carried_out(event, commands, time)
            if finished is not None:
                return finished
