"""The journal in a module's process: what happens goes to the caller, who writes the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec

from gruppetto.decoupled.module import Module
from gruppetto.engines.decoupled.line import Ended, Happened, Line
from gruppetto.engines.decoupled.local import ModuleEngine
from gruppetto.engines.decoupled.peak import PeakMemory
from gruppetto.protocols.messages import (
    Command,
    Event,
    ModuleUpdated,
    PassFailed,
    StopPassedOn,
)
from gruppetto.trace.rows import encode_message

__all__ = ["HandsIn", "ModuleJournal"]

#: Version -> what a module hands in when it has it: nothing, its weights, or all it resumes from.
HandsIn: TypeAlias = Callable[[int], Literal["nothing", "weights", "state"]]


class ModuleJournal:
    """Tells the caller of events, one message per update, and hands in snapshots.

    Args:
        engine: whose events these are.
        module: the engine's.
        line: to the caller.
        hands_in: at which versions what is handed in.
        peak: measures the process's memory.
        predicted_bytes: that it takes at most.
    """

    def __init__(
        self,
        engine: ModuleEngine,
        module: Module,
        line: Line,
        hands_in: HandsIn,
        peak: PeakMemory,
        predicted_bytes: int,
    ) -> None:
        self._engine = engine
        self._module = module
        self._line = line
        self._hands_in = hands_in
        self._peak = peak
        self._predicted_bytes = predicted_bytes
        #: Since the last update.
        self._events: list[tuple[str, msgspec.Raw, float]] = []
        self._has_failed = False
        #: Of the newest snapshot with state.
        self._handed_in = -1

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """Note an event; at an update, tell all since the one before and hand in a snapshot."""
        if isinstance(event, StopPassedOn):
            return  # follows from what module 1 was told
        self._events.append((type(event).__name__, msgspec.Raw(encode_message(event)), time))
        if isinstance(event, ModuleUpdated):
            self._tell(time)
            self._hand_in(self._hands_in(event.version))
        elif isinstance(event, PassFailed):
            self._has_failed = True
            self._tell(time)

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """Passes are run when they are waited for: there is nothing to say here."""

    def end(self, reason: str) -> None:
        """The module has finished: hand in its last snapshot, and wait until all is sent."""
        self._tell(self._engine.now())
        if not self._has_failed and self._handed_in != self._module.version:
            self._hand_in("state")
        version, peak = self._module.version, self._peak.read()
        self._line.tell(Ended(reason, version, self._predicted_bytes, peak))
        self._line.empty()

    def _tell(self, time: float) -> None:
        if not self._events:
            return
        row = None
        if self._engine.rows:
            row = msgspec.structs.replace(self._engine.rows.pop(), time=time)
        text = self._engine.tracebacks.pop(self._module.number, "")
        events, self._events = self._events, []
        self._line.tell(Happened(events, row, text))

    def _hand_in(self, what: Literal["nothing", "weights", "state"]) -> None:
        if what == "nothing":
            return
        if what == "state":
            self._handed_in = self._module.version
        self._line.hand_in(self._module.snapshot(with_state=what == "state"))
