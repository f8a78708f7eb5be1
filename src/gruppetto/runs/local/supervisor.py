"""The caller's side of a local run: starts processes, replaces lost ones, shows progress, stops.

It follows the trace file for progress; the server process alone writes it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections import Counter
from typing import Any, Final

import gruppetto.errors as errors
from gruppetto.engines.local.forkserver import ForkServer, Template
from gruppetto.engines.local.wire import is_readable, pair, receive_json, send_json
from gruppetto.errors import RunFailed
from gruppetto.runs.evaluation import is_evaluated
from gruppetto.runs.execute import Run, history_of, stopping_on_signals
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.journal import Listener
from gruppetto.runs.local import GET_READY
from gruppetto.runs.local.follow import Follower
from gruppetto.runs.local.roles import EVALUATE, LEARN, PREPARE, SERVE, pack
from gruppetto.runs.parts import Ingredients, Parts
from gruppetto.runs.progress import Progress
from gruppetto.runs.settings import Settings
from gruppetto.trace import read_trace
from gruppetto.trace.files import segment_files

__all__ = ["Supervisor", "how_it_ended", "open_template", "prepare_processes", "run_locally"]

#: Seconds between looks at the trace when nothing else happens.
_BEAT: Final = 0.2


def prepare_processes(settings: Settings, ingredients: Ingredients) -> Template:
    """A process that has loaded the task and forks the others; close it when the run is over.

    Raises:
        UsageError: the task cannot be sent or loaded there.
    """
    return open_template(PREPARE, pack(settings, ingredients))


def open_template(prepare: str, payload: bytes) -> Template:
    """A process that has prepared something; close it when the run is over.

    Args:
        prepare: ``module:function``, from the payload to the prepared object.
        payload: whatever that takes.

    Raises:
        UsageError: it cannot be prepared there.
    """
    try:
        template = ForkServer.shared(GET_READY).template(prepare, payload)
    except RunFailed:  # it has ended since the last run, and nobody knew
        template = ForkServer.shared(GET_READY).template(prepare, payload)
    try:
        template.wait_until_prepared()
    except BaseException:
        template.close()
        raise
    return template


def run_locally(
    parts: Parts,
    template: Template,
    folder: RunFolder,
    bar: Progress,
    on_event: Listener | None,
    next_learner: int | None,
) -> Run:
    """Run to the end.

    Args:
        parts: of the run, fresh; they take the trained weights at the end.
        template: prepared.
        folder: of the run.
        bar: shown meanwhile.
        on_event: told every row after it is written, in this process.
        next_learner: the first number that no learner has had, when a run is resumed.

    Raises:
        RunFailed: the run ended without its goal; its folder holds what there is.
    """
    supervisor = Supervisor(parts, template, folder, bar, on_event)
    with stopping_on_signals(supervisor.request_stop, folder):
        supervisor.run(next_learner)
    trace = read_trace(folder.trace)
    assert trace.end is not None
    histogram = Counter(staleness for row in trace.updates for staleness in row.staleness)
    if trace.events and trace.updates:
        _, tensors, plain = folder.load_checkpoint()
        parts.server.load(tensors, plain["server"])
    return Run(
        folder=folder,
        result=trace.end.result,
        model=parts.server.release_model(),
        history=history_of(trace.evaluations),
        staleness=dict(sorted(histogram.items())),
    )


class Supervisor:
    """Watches the processes of one run.

    Args:
        parts, template, folder, bar, on_event: see :func:`run_locally`.
    """

    def __init__(
        self,
        parts: Parts,
        template: Template,
        folder: RunFolder,
        bar: Progress,
        on_event: Listener | None,
    ) -> None:
        self._settings = parts.settings
        self._parts = parts
        self._template = template
        self._folder = folder
        self._bar = bar
        self._on_event = on_event
        self._server, self._server_end = pair()
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._stop_reason: str | None = None
        self._is_stopped = False
        #: Nothing more comes from the server.
        self._is_deaf = False
        #: The server has written the last row of the trace.
        self._has_ended = False
        self._failure: RunFailed | None = None
        self._server_pid = self._evaluator_pid = -1
        #: Process id -> learner and its slot.
        self._learners: dict[int, tuple[int, int]] = {}
        self._next_learner = 0
        self._num_restarts = 0

    def request_stop(self, reason: str) -> None:
        """End the run in good order; safe to call from a signal handler."""
        if self._stop_reason is None:
            self._stop_reason = reason
            os.write(self._wake, b"!")

    def run(self, next_learner: int | None) -> None:
        """Start everything and return when the run has ended.

        Raises:
            RunFailed: it ended without its goal.
        """
        try:
            follower = self._start(next_learner)
            with selectors.DefaultSelector() as selector:
                for source in (self._server, self._template, self._awake):
                    selector.register(source, selectors.EVENT_READ)
                while self._server_pid >= 0:
                    ready = {key.fileobj for key, _ in selector.select(_BEAT)}
                    if self._awake in ready:
                        os.read(self._awake, 4096)
                        self._tell({"stop": self._stop_reason})
                    self._hear_server()
                    if self._is_deaf and self._server in ready:
                        selector.unregister(self._server)
                    self._see_ends()
                    self._follow(follower)
            self._follow(follower)
        except RunFailed as error:  # the template is gone
            error.result = error.result or self._no_result()
            raise
        finally:
            self._stop_reason = self._stop_reason or "ended"  # the pipe is closed to handlers
            self._template.close()
            self._server.close()
            self._server_end.close()
            os.close(self._awake)
            os.close(self._wake)
        if self._failure is not None:
            raise self._failure

    # -------------------------------------------------------------- starting

    def _start(self, next_learner: int | None) -> Follower:
        segment = self._folder.trace / f"{len(segment_files(self._folder.trace)):03d}.jsonl"
        ends = [self._server_end]
        evaluator: tuple[socket.socket, socket.socket] | None = None
        if self._settings.evaluate == "live" and is_evaluated(self._parts):
            evaluator = pair()
            ends.append(evaluator[0])
        self._server_pid = self._template.fork(
            SERVE,
            [end.fileno() for end in ends],
            folder=str(self._folder.path),
            is_resumed=next_learner is not None,
            is_heard=self._on_event is not None,
        )
        self._server_end.close()
        if evaluator is not None:
            self._evaluator_pid = self._template.fork(EVALUATE, [evaluator[1].fileno()])
            for end in evaluator:
                end.close()
        self._next_learner = next_learner or 0
        for slot in range(self._settings.learners):
            self._start_learner(slot)
        return Follower(segment)

    def _start_learner(self, slot: int) -> None:
        learner, self._next_learner = self._next_learner, self._next_learner + 1
        ours, theirs = pair()
        with ours, theirs:
            self._tell({"joins": learner, "slot": slot}, [ours.fileno()])
            pid = self._template.fork(LEARN, [theirs.fileno()], learner=learner)
        self._learners[pid] = learner, slot

    # -------------------------------------------------------------- watching

    def _tell(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        with contextlib.suppress(OSError):  # it has ended; the template will say how
            send_json(self._server, message, descriptors or [])

    def _hear_server(self) -> None:
        """All that it has said."""
        while not self._is_deaf and is_readable(self._server, 0.0):
            message, _ = receive_json(self._server)
            if message is None:
                # Whoever ends from now on ends because the server did.
                self._is_deaf = self._is_stopped = True
            elif "stopped" in message:
                self._is_stopped = True
                # What they compute now is for nothing, and takes cores from the evaluation.
                for pid in self._learners:
                    self._template.kill(pid)
            elif "ended" in message:
                self._has_ended = True
            elif "failed" in message:
                kind = getattr(errors, message["failed"])
                self._failure = kind(message["message"], message["result"])
            elif "warning" in message:
                self._bar.warn(message["warning"])

    def _see_ends(self) -> None:
        # Again, because starting a replacement may take further ends in.
        while ended := self._template.take_ended():
            # What made them end, the server had said before.
            self._hear_server()
            for pid, code in ended:
                self._see_end(pid, code)

    def _see_end(self, pid: int, code: int) -> None:
        if pid == self._server_pid:
            self._server_pid = -1
            if self._failure is None and not self._has_ended:
                self._failure = RunFailed(
                    f"the server process {how_it_ended(code)}; the run in {self._folder.path} can "
                    "be resumed from its last checkpoint",
                    self._no_result(),
                )
        elif pid == self._evaluator_pid:
            if not self._is_stopped:
                self._bar.warn(f"the process that evaluates {how_it_ended(code)}")
        elif pid in self._learners:
            learner, slot = self._learners.pop(pid)
            if not self._is_stopped:
                self._replace(learner, slot, pid, code)

    def _no_result(self) -> dict[str, Any]:
        return {"run": str(self._folder.path), "stopped_by": RunFailed.stopped_by}

    def _replace(self, learner: int, slot: int, pid: int, code: int) -> None:
        reason = how_it_ended(code)
        has_more = self._num_restarts < self._settings.max_restarts
        if has_more:
            self._num_restarts += 1
            self._tell({"coming": True})
        self._tell({"lost": learner, "reason": reason})
        text = f"learner {learner} (process {pid}) {reason}"
        if has_more:
            of = f"{self._num_restarts} of {self._settings.max_restarts} restarts"
            self._bar.warn(f"{text}; learner {self._next_learner} takes its place ({of})")
            self._start_learner(slot)
        else:
            self._bar.warn(f"{text}; the run goes on with {len(self._learners) or 'none'}")

    def _follow(self, follower: Follower) -> None:
        for row in follower.rows():
            follower.show(row, self._bar)
            if self._on_event is not None and self._on_event(row) is True:
                self.request_stop("callback")


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
