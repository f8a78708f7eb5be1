"""The numbers of a decoupled run that follow from its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from gruppetto.decoupled.schedule import NetworkProgram
from gruppetto.protocols import GUARDS
from gruppetto.protocols.guard import LossWatch
from gruppetto.protocols.messages import Event, ForwardFinished
from gruppetto.runs.decoupled.parts import DecoupledParts
from gruppetto.staleness import MODULATIONS, StalenessStatistics
from gruppetto.trace import EventRow, MessageDigest, ModuleRow, UpdateRow, encode_message

__all__ = ["SECONDS", "ModuleSums", "Tally"]

#: Of a :class:`ModuleRow`, what is summed up.
SECONDS: Final = (
    "forward",
    "backward",
    "step",
    "loading",
    "waiting_for_inputs",
    "waiting_for_gradients",
    "waiting_for_others",
)


class ModuleSums:
    """One module's rows, summed up."""

    def __init__(self) -> None:
        self.updates = 0
        self.staleness = StalenessStatistics()
        self.seconds = dict.fromkeys(SECONDS, 0.0)

    def add(self, row: ModuleRow) -> None:
        """Count one update in."""
        self.updates += 1
        self.staleness.add(row.staleness)
        for key in SECONDS:
            self.seconds[key] += getattr(row, key)


class Tally:
    """Takes rows in, in the order of the trace.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: DecoupledParts) -> None:
        self._parts = parts
        # A limit is not part of what happened: a resumed run may have another.
        self.program = NetworkProgram(replace(parts.schedule, updates=None))
        self.events = MessageDigest()
        self.commands = MessageDigest()
        self.num_events = 0
        #: Run time of the newest event.
        self.time = 0.0
        #: Of the network: updates that every module still running has made.
        self.version = 0
        #: Mini-batches that module 1 has run forward.
        self.num_begun = 0
        self.staleness = StalenessStatistics()
        self.modules = {k: ModuleSums() for k in range(1, parts.method.modules + 1)}
        guard = GUARDS.parse(parts.settings.guard)
        self.watch = LossWatch(guard, parts.method.delay(1) + 1, 1)
        self.last_update: UpdateRow | None = None
        #: Of mini-batches that are not applied everywhere.
        self._losses: dict[int, float] = {}
        self._applies_to = MODULATIONS.parse(parts.settings.modulation).applies_to

    @property
    def num_applied(self) -> int:
        """Mini-batches that all modules have applied."""
        last = self._parts.last_version
        return self.version if last is None else min(self.version, last)

    @property
    def num_dropped(self) -> int:
        """Mini-batches that some modules have applied, and the others never will."""
        return self.version - self.num_applied

    @property
    def samples(self) -> int:
        """Of the mini-batches that all modules have applied."""
        return self._parts.samples_through(self.num_applied)

    @property
    def epoch(self) -> float:
        """The same in passes over the data."""
        return self.samples / self._parts.mini_batches.samples_per_epoch

    def event(self, event: Event, time: float, wall_time: float) -> EventRow:
        """Count an event in.

        Returns:
            Its row.
        """
        encoded = encode_message(event)
        self.time = max(self.time, time)
        self.events.add(event, encoded)
        for command in self.program.handle(event):
            self.commands.add(command)
        if isinstance(event, ForwardFinished):
            if event.loss is not None:
                self._losses[event.mini_batch] = event.loss
            self.num_begun += event.module == 1
        self.num_events += 1
        return EventRow(
            self.num_events - 1,
            time,
            wall_time,
            type(event).__name__,
            msgspec.Raw(encoded),
            self.commands.hexdigest()[:16],
        )

    def module(self, row: ModuleRow) -> None:
        """Count one module's update in."""
        self.modules[row.module].add(row)
        self.staleness.add(row.staleness)

    def update(self, rows: Sequence[ModuleRow]) -> UpdateRow:
        """Count the update of all modules in, whose rows these are, module by module.

        Returns:
            Its row.
        """
        self.version += 1
        mini_batch = self.version - 1
        parts = self._parts
        samples = parts.samples_through(self.version) - parts.samples_through(mini_batch)
        # A module without parameters has no learning rate.
        rates = [row.learning_rate for row in rows if row.learning_rate]
        effective = rates
        if self._applies_to == "gradient":
            effective = [row.learning_rate * row.factor for row in rows if row.learning_rate]
        update = UpdateRow(
            version=self.version,
            time=max(row.time for row in rows),
            samples=self.samples,
            epoch=self.epoch,
            learning_rate=rates[-1] if rates else 0.0,
            staleness=[row.staleness for row in rows],
            num_samples=[samples] * len(rows),
            factors=[row.factor for row in rows],
            learners=[row.module for row in rows],
            losses=[self._losses[mini_batch]] * len(rows),
            applied=self.num_applied,
            cancelled=0,
            discarded=0,
            given_up=0,
            dropped=self.num_dropped,
            effective_rate=sum(effective) / len(effective) if effective else 0.0,
        )
        self.updated(update)
        return update

    def updated(self, update: UpdateRow) -> None:
        """Count an update in whose row is there already."""
        self.version = update.version
        self.last_update = update
        loss = self._losses.pop(update.version - 1)
        self.watch.add(loss, update.num_samples[0], update.staleness[0])

    def per_module(self) -> list[dict[str, Any]]:
        """What each module did and how long it took, module by module."""
        return [
            {
                "module": number,
                "updates": sums.updates,
                "staleness": sums.staleness.mean,
                "max_staleness": sums.staleness.max,
                "utilisation": self._busy(sums) / self.time if self.time else None,
                **sums.seconds,
            }
            for number, sums in self.modules.items()
        ]

    def _busy(self, sums: ModuleSums) -> float:
        return sum(sums.seconds[key] for key in ("forward", "backward", "step"))
