"""A decoupled run in virtual time: all modules in this process, one pass after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gruppetto.decoupled.module import Module
from gruppetto.decoupled.schedule import NetworkProgram
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.engines.decoupled.virtual import VirtualModules
from gruppetto.protocols.messages import (
    Command,
    Event,
    ForwardFinished,
    ModuleUpdated,
    PassFailed,
)
from gruppetto.runs.decoupled.ending import Memory
from gruppetto.runs.decoupled.parts import DecoupledParts, Mark
from gruppetto.runs.decoupled.saved import Saved
from gruppetto.trace import ModuleRow
from gruppetto.training.task import to_device

__all__ = ["Listens", "VirtualRun"]


class Listens(Protocol):
    """Who is told what modules do: :class:`gruppetto.runs.decoupled.collector.Collector` is one."""

    def marks(self, version: int) -> Mark:
        """What modules hand in at a version, besides their state at the end."""
        ...

    def take(self, event: Event, time: float, row: ModuleRow | None, traceback: str) -> None:
        """An event of any module."""
        ...

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """What a module handed in."""
        ...


class VirtualRun:
    """Runs a network's modules in virtual time.

    Args:
        parts: of the run.
        saved: where an interrupted run was that goes on now.
    """

    def __init__(self, parts: DecoupledParts, saved: Saved | None) -> None:
        settings = parts.settings
        modules = [parts.network.module(k) for k in range(1, parts.method.modules + 1)]
        sent: dict[int, Mapping[int, tuple[Any, int]]] = {}
        if saved is not None:

            def fetch(mini_batch: int) -> tuple[Any, int]:
                batch, num_samples = parts.mini_batches.fetch(mini_batch, parts.device)
                return to_device(batch, parts.device), num_samples

            for module in modules:
                sent[module.number] = module.restore(saved.snapshots[module.number], fetch)
        self._modules = modules
        self._engine = VirtualModules(
            modules,
            parts.mini_batches,
            parts.schedule,
            settings.read_pass_times().of(parts.method),
            device=parts.device,
            max_time=settings.max_time,
            time=0.0 if saved is None else saved.time,
        )
        if saved is not None:
            self._engine.restore(sent)
        self._program = NetworkProgram(parts.schedule, 0 if saved is None else saved.version)

    def request_stop(self, reason: str) -> None:
        """End the run in good order; safe to call from a signal handler."""
        self._engine.request_stop(reason)

    def run(self, collector: Listens) -> tuple[str, Memory]:
        """Run to the end.

        Args:
            collector: told everything.

        Returns:
            Why it ended, and what mini-batches in flight took of memory.
        """
        journal = _Journal(collector, self._engine, self._modules, self._program)
        reason = self._engine.run(self._program, journal)
        return reason, {
            m.number: (m.predicted_bytes, journal.most[m.number]) for m in self._modules
        }

    def close(self) -> None:
        """Nothing is left behind."""


class _Journal:
    """Tells the collector of every event, and hands snapshots in."""

    def __init__(
        self,
        collector: Listens,
        engine: VirtualModules,
        modules: Sequence[Module],
        program: NetworkProgram,
    ) -> None:
        self._collector = collector
        self._engine = engine
        self._modules = modules
        self._program = program
        self._has_ended = [False] * len(modules)
        #: Module -> bytes that its mini-batches in flight took at most.
        self.most = {module.number: 0 for module in modules}

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        # Before commands are carried out: modules still are what the event says.
        row, text = None, ""
        match event:
            case ForwardFinished(module=number):
                held = self._modules[number - 1].held_bytes
                self.most[number] = max(self.most[number], held)
            case ModuleUpdated():
                row = self._engine.rows.pop() if self._engine.rows else None
            case PassFailed(module=number):
                text = self._engine.tracebacks.pop(number, "")
            case _:
                pass
        self._collector.take(event, time, row, text)
        if isinstance(event, PassFailed):
            return
        if isinstance(event, ModuleUpdated):
            self._hand_in(event)
        for module in self._modules:
            if (
                self._program.modules[module.number - 1].finished
                and not self._has_ended[module.number - 1]
            ):
                self._has_ended[module.number - 1] = True
                self._collector.take_snapshot(module.snapshot(with_state=True))

    def _hand_in(self, event: ModuleUpdated) -> None:
        mark = self._collector.marks(event.version)
        is_last = self._program.modules[event.module - 1].finished is not None
        if mark != "nothing" and not is_last:
            module = self._modules[event.module - 1]
            self._collector.take_snapshot(module.snapshot(with_state=mark == "state"))

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        """Everything was told before."""
