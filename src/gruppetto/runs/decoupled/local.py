"""The caller's side of a decoupled run with real processes: starts, listens, stops them."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time as clock
from typing import Any, Final

import msgspec

from gruppetto.engines.decoupled.device_slots import tidy
from gruppetto.engines.decoupled.line import (
    Ended,
    Handed,
    Happened,
    Ready,
    read_snapshot,
    receive_told,
    snapshot_file,
)
from gruppetto.engines.local.wire import is_readable, pair, send_json
from gruppetto.errors import RunFailed
from gruppetto.protocols.messages import EVENTS, ModuleUpdated, PassFailed
from gruppetto.runs.decoupled.collector import Collector
from gruppetto.runs.decoupled.ending import Memory
from gruppetto.runs.decoupled.parts import DecoupledParts
from gruppetto.runs.decoupled.roles import PREPARE, TRAIN
from gruppetto.runs.decoupled.saved import Saved
from gruppetto.runs.local.roles import pack
from gruppetto.runs.local.supervisor import how_it_ended, open_template
from gruppetto.runs.parts import Ingredients

__all__ = ["LocalRun"]

#: Seconds between looks at evaluations when nothing else happens.
_BEAT: Final = 0.2


class LocalRun:
    """Runs a network's modules in processes of their own.

    Args:
        parts: of the run.
        ingredients: of the parts.
        saved: where an interrupted run was that goes on now.
        pin: keep each module to one core of those that the run may use.

    Raises:
        UsageError: the task cannot be sent to other processes, or loaded there.
    """

    def __init__(
        self,
        parts: DecoupledParts,
        ingredients: Ingredients,
        saved: Saved | None,
        *,
        pin: bool = False,
    ) -> None:
        self._saved = saved
        self._pin = pin
        self._modules = range(1, parts.method.modules + 1)
        self._channels: dict[int, socket.socket] = {}
        self._modules_by_pid: dict[int, int] = {}
        self._num_ready = 0
        self._ended: dict[int, Ended] = {}
        self._failure: PassFailed | None = None
        self._stop_reason: str | None = None
        self._template = open_template(PREPARE, pack(parts.settings, ingredients))
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def request_stop(self, reason: str) -> None:
        """End the run at a version of the whole network; safe to call from a signal handler."""
        if self._stop_reason is None:
            self._stop_reason = reason
            os.write(self._wake, b"!")

    def run(self, collector: Collector) -> tuple[str, Memory]:
        """Start everything, and return when all modules have ended or a pass has failed.

        Args:
            collector: told everything.

        Returns:
            Why they ended, and what the modules took of memory.

        Raises:
            RunFailed: a process died.
        """
        try:
            with selectors.DefaultSelector() as selector:
                self._start()
                for channel in self._channels.values():
                    selector.register(channel, selectors.EVENT_READ)
                selector.register(self._template, selectors.EVENT_READ)
                selector.register(self._awake, selectors.EVENT_READ)
                while not self._is_over():
                    ready = {key.fileobj for key, _ in selector.select(_BEAT)}
                    if self._awake in ready:
                        os.read(self._awake, 4096)
                        self._tell(1, {"stop": self._stop_reason})
                    for number, channel in self._channels.items():
                        if channel in ready and not self._hear(number, collector):
                            selector.unregister(channel)
                    self._see_ends(collector)
                    collector.poll()
        except RunFailed as error:
            where = str(collector.folder.path)
            error.result = error.result or {"run": where, "stopped_by": RunFailed.stopped_by}
            raise
        finally:
            self.close()
        reason = self._ended[1].reason if self._failure is None else self._failure.reason
        ended = self._ended.items()
        return reason, {number: (told.predicted_bytes, told.peak_bytes) for number, told in ended}

    def close(self) -> None:
        """End whatever still runs."""
        self._stop_reason = self._stop_reason or "ended"  # the pipe is closed to handlers
        self._template.close()
        for process in self._modules_by_pid:
            tidy(process)
        for channel in self._channels.values():
            channel.close()
        for descriptor in (self._awake, self._wake):
            with contextlib.suppress(OSError):  # closed before
                os.close(descriptor)

    # -------------------------------------------------------------- starting

    def _start(self) -> None:
        saved = self._saved
        for number in self._modules:
            ours, theirs = pair()
            self._channels[number] = ours
            with theirs, contextlib.ExitStack() as stack:
                files = [theirs.fileno()]
                if saved is not None:
                    files.append(snapshot_file(saved.snapshots[number]))
                    stack.callback(os.close, files[1])
                pid = self._template.fork(TRAIN, files, number=number, pin=self._pin)
            self._modules_by_pid[pid] = number

    def _begin(self) -> None:
        """All are ready: their clocks start, at the same moment."""
        before = 0.0 if self._saved is None else self._saved.time
        start = {"start": clock.perf_counter(), "time": before}
        for number in self._modules:
            self._tell(number, start)

    def _tell(self, number: int, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended; the template will say how
            send_json(self._channels[number], message, [])

    # ------------------------------------------------------------- listening

    def _is_over(self) -> bool:
        if self._failure is not None:
            return self._failure.module in self._ended
        return len(self._ended) == len(self._modules)

    def _hear(self, number: int, collector: Collector) -> bool:
        """All that a module has said; False when nothing more will come."""
        channel = self._channels[number]
        while is_readable(channel, 0.0):
            told, descriptor = receive_told(channel)
            match told:
                case None:
                    return False
                case Ready():
                    self._num_ready += 1
                    if self._num_ready == len(self._modules):
                        self._begin()
                case Happened():
                    self._take(told, collector)
                case Handed():
                    collector.take_snapshot(read_snapshot(descriptor))
                case Ended():
                    self._ended[number] = told
        return True

    def _take(self, told: Happened, collector: Collector) -> None:
        for name, raw, time in told.events:
            event = msgspec.json.decode(raw, type=EVENTS[name])
            row = told.row if isinstance(event, ModuleUpdated) else None
            collector.take(event, time, row, told.traceback)
            if isinstance(event, PassFailed):
                self._failure = self._failure or event

    def _see_ends(self, collector: Collector) -> None:
        """Processes that have ended, though their modules had not.

        Raises:
            RunFailed: one has.
        """
        for pid, code in self._template.take_ended():
            number = self._modules_by_pid[pid]
            self._hear(number, collector)  # what it had said before
            is_expected = number in self._ended or self._failure is not None
            if not is_expected:
                raise RunFailed(
                    f"module {number} of {len(self._modules)} (process {pid}) "
                    f"{how_it_ended(code)}; the run in {collector.folder.path} can be resumed "
                    "from its last checkpoint"
                )
