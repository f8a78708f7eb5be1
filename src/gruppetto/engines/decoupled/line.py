"""What a module's process and the caller tell each other: JSON datagrams, and snapshots in files.

Whoever computes must not wait for whoever evaluates: what the socket does not take waits in the
process, and goes when there is room.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
from array import array
from collections import deque
from typing import Final, NoReturn, TypeAlias

import msgspec

from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.engines.local.wire import receive_json, receive_with_files
from gruppetto.trace import ModuleRow

__all__ = [
    "Ended",
    "Handed",
    "Happened",
    "Line",
    "Ready",
    "Told",
    "read_snapshot",
    "receive_told",
    "snapshot_file",
]

#: Letters of a traceback; its end says most.
_MAX_TEXT: Final = 24_000


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The module is built, restored, and waits for the start."""


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """Events of one module, in order: all since its update before, this update included."""

    #: Type, fields, run time.
    events: list[tuple[str, msgspec.Raw, float]]
    #: Of the update at their end; None where they end otherwise.
    row: ModuleRow | None = None
    #: Of the failure at their end; empty where there is none.
    traceback: str = ""


class Handed(msgspec.Struct, frozen=True, tag="snapshot"):
    """The file with this message holds a snapshot."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The module has finished; nothing follows."""

    reason: str
    version: int
    #: Memory above what the process had when it was ready, at most: as predicted, and as seen;
    #: None where it is not known.
    predicted_bytes: int | None
    peak_bytes: int | None


Told: TypeAlias = Ready | Happened | Handed | Ended

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[Told]] = msgspec.json.Decoder(Told)


class Line:
    """A module's line to the caller: what it tells, and what it is told.

    Args:
        channel: to the caller.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        #: Each with the descriptor that goes with it, -1 for none.
        self._waiting: deque[tuple[bytes, int]] = deque()
        #: Descriptors -> the poll that waits for them.
        self._polls: dict[tuple[int, ...], select.poll] = {}
        #: Why the run is to end; None while nobody has asked.
        self.stop_reason: str | None = None
        #: When the run began by the clock that all processes of a machine share, and the run time
        #: it began with; None before.
        self.start: tuple[float, float] | None = None

    def tell(self, told: Told, descriptor: int = -1) -> None:
        """Send a message, now or later; an open file that goes with it is closed then."""
        if isinstance(told, Happened) and len(told.traceback) > _MAX_TEXT:
            told = msgspec.structs.replace(told, traceback=told.traceback[-_MAX_TEXT:])
        self._waiting.append((_ENCODER.encode(told), descriptor))
        self._flush()

    def hand_in(self, snapshot: Snapshot) -> None:
        """Send a snapshot."""
        self.tell(Handed(), snapshot_file(snapshot))

    def wait(self, descriptors: tuple[int, ...], seconds: float | None = None) -> None:
        """Sleep until one of these can be read, the caller says something, or time is over.

        Args:
            descriptors: event descriptors.
            seconds: at most; None for no limit.

        Raises:
            SystemExit: the caller is gone.
        """
        poll = self._polls.get(descriptors)
        if poll is None:
            poll = self._polls[descriptors] = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
        wanted = select.POLLIN | (select.POLLOUT if self._waiting else 0)
        poll.register(self._channel, wanted)
        mine = self._channel.fileno()
        for found, what in poll.poll(None if seconds is None else seconds * 1000.0):
            if found == mine and what & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._listen()
        self._flush()

    def empty(self) -> None:
        """Send all that waits for room.

        Raises:
            SystemExit: the caller is gone.
        """
        while self._waiting:
            self.wait(())

    def _listen(self) -> None:
        message, _ = receive_json(self._channel)
        if message is None:
            _gone()
        elif "start" in message:
            self.start = message["start"], message["time"]
        elif "stop" in message and self.stop_reason is None:
            self.stop_reason = message["stop"]

    def _flush(self) -> None:
        """Send what the socket takes now."""
        while self._waiting:
            data, descriptor = self._waiting[0]
            files = [] if descriptor < 0 else [descriptor]
            # Not socket.send_fds, which forgets the flag.
            along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
            try:
                self._channel.sendmsg([data], along, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                _gone()
            self._waiting.popleft()
            for file in files:
                os.close(file)


def _gone() -> NoReturn:
    sys.exit("the process that started this run is gone")


def receive_told(channel: socket.socket) -> tuple[Told | None, int]:
    """A module's next message and the file that came with it, -1 for none; None when it is gone."""
    data, descriptors = receive_with_files(channel, 1)
    told = _DECODER.decode(data) if data else None
    return told, descriptors[0] if descriptors else -1


def snapshot_file(snapshot: Snapshot) -> int:
    """The descriptor of a new anonymous file that holds a snapshot."""
    descriptor = os.memfd_create("gruppetto-snapshot", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(snapshot.to_bytes())
    return descriptor


def read_snapshot(descriptor: int) -> Snapshot:
    """The snapshot in a file, which is closed."""
    with contextlib.closing(os.fdopen(descriptor, "rb")):
        size = os.fstat(descriptor).st_size
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
            return Snapshot.from_bytes(mapped[:])
