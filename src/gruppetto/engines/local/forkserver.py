"""The caller's side of the fork server: started once, on first use, private to this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import deque
from typing import Any, ClassVar, Final

from gruppetto.engines.local.wire import is_readable, pair, receive_json, send_json
from gruppetto.errors import RunFailed, TaskError, UsageError

__all__ = ["ForkServer", "Template"]

#: Seconds that the fork server has to end when the caller exits.
_PATIENCE: Final = 5.0


class ForkServer:
    """A process that has imported torch and forks templates; reused by all runs of the caller.

    Args:
        get_ready: ``module:function`` that it calls first, to import what its children need.

    Raises:
        UsageError: this system cannot run it.
    """

    _current: ClassVar[ForkServer | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, get_ready: str) -> None:
        if not hasattr(os, "memfd_create"):
            raise UsageError(
                "the local engine needs Linux (anonymous shared memory); "
                "use --engine virtual on this system"
            )
        self._owner = os.getpid()
        self._control, theirs = pair()
        self._is_ready = False
        self._is_gone = False
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from gruppetto.engines.local.forking import main; "
            f"main({theirs.fileno()}, {get_ready!r})"
        )
        flags = [f"-W{option}" for option in sys.warnoptions]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Ctrl-C in a terminal is for the caller, who ends the run in good order.
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.close)

    @classmethod
    def shared(cls, get_ready: str) -> ForkServer:
        """The one of this process; started if there is none, or the last one has died."""
        with cls._lock:
            current = cls._current
            if current is not None and current._owner != os.getpid():
                current._control.close()  # this process is a fork of the owner
                current = None
            if current is not None and (current._is_gone or current._process.poll() is not None):
                current.close()
                atexit.unregister(current.close)
                current = None
            if current is None:
                current = cls._current = cls(get_ready)
            return current

    def template(self, prepare: str, payload: bytes) -> Template:
        """A process that has prepared something and forks others.

        Args:
            prepare: ``module:function``, from the payload to the prepared object.
            payload: whatever that takes.

        Raises:
            TaskError: preparing failed.
            RunFailed: the fork server is gone.
        """
        ours, theirs = pair()
        surroundings = {
            "path": sys.path,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
        }
        file = os.memfd_create("gruppetto-payload", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(file), "wb") as writer:
            pickle.dump(surroundings, writer)
            writer.write(payload)
        try:
            with self._lock:
                self._wait_until_ready()
                role = "gruppetto.engines.local.forking:template"
                request = {"role": role, "arguments": {"prepare": prepare}}
                with contextlib.suppress(OSError):  # it is gone, which expecting finds out
                    send_json(self._control, request, [theirs.fileno(), file])
                self._expect("forked")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(file)
        return Template(ours)

    def close(self) -> None:
        """End it and all it has forked."""
        if self._owner != os.getpid():
            return
        self._control.close()
        if not self._is_ready:  # still importing, for a run that never came
            self._process.kill()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> None:
        if not self._is_ready:
            self._expect("ready")
            self._is_ready = True

    def _expect(self, key: str) -> Any:
        while True:
            message, _ = receive_json(self._control)
            if message is None:
                self._is_gone = True
                raise RunFailed("the fork server ended before it could start the run's processes")
            if key in message:
                return message[key]


class Template:
    """A prepared process, as its caller sees it.

    Args:
        control: its socket.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ended: deque[tuple[int, int]] = deque()

    def fileno(self) -> int:
        """To wait on until :meth:`take_ended` has news."""
        return self._control.fileno()

    def wait_until_prepared(self) -> None:
        """Return when it has prepared.

        Raises:
            UsageError: preparing failed with an error of the user's.
            RunFailed: it is gone.
        """
        message = self._receive()
        if "error" in message:
            if message["type"] in ("TaskError", "InvalidSetting"):
                raise TaskError(message["error"])
            sys.stderr.write(message["traceback"])
            raise TaskError(
                "the task cannot be loaded in another process: "
                f"{message['type']}: {message['error']}; give it as path/to/file.py:name"
            )

    def fork(self, role: str, descriptors: list[int], **arguments: Any) -> int:
        """Fork a process that runs a role.

        Args:
            role: ``module:function``, called with the prepared object, the descriptors, and the
                arguments.
            descriptors: open files it is given.
            **arguments: JSON values.

        Returns:
            Its process id.
        """
        with contextlib.suppress(OSError):  # it is gone, which receiving finds out
            send_json(self._control, {"role": role, "arguments": arguments}, descriptors)
        while True:
            message = self._receive()
            if "forked" in message:
                pid: int = message["forked"]
                return pid
            self._ended.append((message["exited"], message["status"]))

    def kill(self, pid: int) -> None:
        """Kill a process it has forked, if that has not ended; :meth:`take_ended` tells of it."""
        with contextlib.suppress(OSError):  # the template is gone, and its children with it
            send_json(self._control, {"kill": pid}, [])

    def take_ended(self) -> list[tuple[int, int]]:
        """Processes that have ended, with their exit codes (a signal's number negative); call when
        :meth:`fileno` is readable, or after a fork.

        Raises:
            RunFailed: the template itself is gone, and with it all it had forked.
        """
        while is_readable(self._control, 0.0):
            message = self._receive()
            self._ended.append((message["exited"], message["status"]))
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def close(self) -> None:
        """Kill what it has forked, and end it."""
        self._control.close()

    def _receive(self) -> dict[str, Any]:
        message, _ = receive_json(self._control)
        if message is None:
            raise RunFailed("the process that starts all others of a run is gone, and they with it")
        return message
