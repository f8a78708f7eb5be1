"""The processes that fork others: the fork server, and one template per run.

Both are this same loop: wait for a request on a socket, fork, run a named function in the child,
report how children end. A template differs in that it has prepared something (loaded a task,
built a model, mapped memory) that its children find ready. No thread is ever started before a
fork, and tensors are computed with one thread here, so that children start from a sound state.

When the caller is gone, however it ended, its sockets close: everything ends, children first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeAlias

from gruppetto.engines.local.process import die_with_parent
from gruppetto.engines.local.wire import readable, receive_json, send_json

__all__ = ["Role", "fork", "main", "template"]

#: What a forked process runs: the template's prepared object, the files it was given, arguments.
Role: TypeAlias = Callable[..., None]

#: Seconds a child has to end by itself once the caller is gone.
_GRACE: Final = 2.0
#: Letters of an error's text; a message must not be longer than its reader takes.
_MAX_TEXT: Final = 8_000


def main(descriptor: int, get_ready: str) -> None:
    """The fork server. Imports what its children need, then waits for requests.

    Args:
        descriptor: of its end of the control socket.
        get_ready: ``module:function``, called without arguments before anything is forked.
    """
    # Results go to standard output, and only the caller writes results.
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _find(get_ready)()
    control = socket.socket(fileno=descriptor)
    send_json(control, {"ready": True}, [])
    _serve(control, None, grace=_GRACE)
    # The caller waits for this process to end: no time for an interpreter to tidy up.
    sys.stderr.flush()
    os._exit(0)


def template(nothing: None, descriptors: list[int], prepare: str) -> None:
    """Role of a template: prepare from a payload in an anonymous file, then serve requests.

    Args:
        nothing: the fork server has prepared nothing.
        descriptors: the control socket, and a file with the caller's import path, working
            directory and environment, pickled, and then the payload.
        prepare: ``module:function`` that makes the payload's bytes the prepared object.
    """
    with socket.socket(fileno=descriptors[0]) as control:
        try:
            prepared = _prepare(descriptors[1], prepare)
        except BaseException as error:
            told = {
                "error": str(error)[-_MAX_TEXT:],
                "type": type(error).__name__,
                "traceback": traceback.format_exc()[-_MAX_TEXT:],
            }
            send_json(control, told, [])
            return
        send_json(control, {"ready": True}, [])
        _serve(control, prepared, grace=0.0)


def _prepare(descriptor: int, prepare: str) -> Any:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        surroundings = pickle.load(file)
        # What follows may need the caller's own modules.
        sys.path[:] = surroundings["path"]
        os.environ.clear()
        os.environ.update(surroundings["environment"])
        os.chdir(surroundings["folder"])
        payload = file.read()
    return _find(prepare)(payload)


def _serve(control: socket.socket, prepared: Any, grace: float) -> None:
    """Fork what is asked for and report what ends, until the other end is gone."""
    awake, wake = os.pipe()
    for descriptor in (awake, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    children: set[int] = set()
    while True:
        ready = readable([control.fileno(), awake], None)
        if awake in ready:
            _drain(awake)
            for pid, status in _reap(children):
                _report(control, {"exited": pid, "status": status})
        if control.fileno() in ready:
            request, descriptors = receive_json(control)
            if request is None:
                _end(children, awake, grace)
                return
            if "kill" in request:
                if request["kill"] in children:
                    os.kill(request["kill"], signal.SIGKILL)
                continue
            pid = _fork(control, (awake, wake), prepared, request, descriptors)
            children.add(pid)
            _report(control, {"forked": pid})
            for descriptor in descriptors:
                os.close(descriptor)


def _fork(
    control: socket.socket,
    pipes: tuple[int, int],
    prepared: Any,
    request: dict[str, Any],
    descriptors: list[int],
) -> int:
    parent = os.getpid()
    pid = fork()
    if not pid:
        _be_child(parent, control, pipes, prepared, request, descriptors)
    return pid


def _be_child(
    parent: int,
    control: socket.socket,
    pipes: tuple[int, int],
    prepared: Any,
    request: dict[str, Any],
    descriptors: list[int],
) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in pipes:
        os.close(descriptor)
    control.close()
    die_with_parent(parent)
    _run_and_exit(_find(request["role"]), prepared, descriptors, request["arguments"])


def _run_and_exit(
    role: Role, prepared: Any, descriptors: list[int], arguments: dict[str, Any]
) -> NoReturn:
    code = 1
    try:
        role(prepared, descriptors, **arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        # Not sys.exit: what the parent has open and registered is not this process's to close.
        os._exit(code)


def fork() -> int:
    """``os.fork``, without its warning about threads: those of linear algebra libraries are here
    from the start, and these libraries take care of forks themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _find(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


def _reap(children: set[int]) -> list[tuple[int, int]]:
    """Children that have ended, with their exit codes; negative for a signal."""
    ended = []
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children.discard(pid)
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _report(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more; the loop will see it
        send_json(control, message, [])


def _end(children: set[int], awake: int, grace: float) -> None:
    """The caller is gone: templates have noticed and end by themselves, others are killed."""
    until = time.monotonic() + grace
    while children and (left := until - time.monotonic()) > 0:
        readable([awake], left)
        _drain(awake)
        _reap(children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
