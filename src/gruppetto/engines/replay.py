"""Re-feeds recorded events: only the gradients, and what follows from them, are made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from gruppetto.engines.base import Engine
from gruppetto.engines.gradients import ComputesGradients, Gradients, HoldsWeights
from gruppetto.engines.virtual import compute_event
from gruppetto.errors import ReplayMismatch
from gruppetto.protocols.messages import (
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
    ProgressMeasured,
)

__all__ = ["ReplayEngine"]


class ReplayEngine(Engine):
    """An engine whose events are those of a trace, whichever engine wrote it.

    Losses are recomputed and replace the recorded ones, so they count in the hashes.

    Args:
        server: holds weights.
        learner: computes gradients.
        events: (run time in seconds, event), in order.
        measure: the loss on the fixed training sample at the server's current weights, for
            protocols that ask for it.
    """

    def __init__(
        self,
        server: HoldsWeights,
        learner: ComputesGradients,
        events: Sequence[tuple[float, Event]],
        measure: Callable[[], float | None] | None = None,
    ) -> None:
        super().__init__()
        self._gradients = Gradients(server, learner)
        self._events = events
        self._measure = measure
        self._position = 0
        self._time = 0.0
        self._open: dict[int, Compute] = {}
        #: The first event that comes out differently now, in words.
        self.first_difference: str | None = None
        self._just_kept: int | None = None
        # A version is needed until the last push that was computed on it.
        self._uses = Counter(e.version for _, e in events if isinstance(e, GradientPushed))

    def start(self) -> None:
        """Publish the initial weights."""
        for version, uses in self._uses.items():
            for _ in range(uses):
                self._gradients.hold(version)
        self._gradients.publish(0)

    def now(self) -> float:
        """The recorded time of the last event."""
        return self._time

    def wait(self) -> Event:
        """The next recorded event.

        Raises:
            ReplayMismatch: the trace ends although the run goes on, or a push names a version
                that does not exist.
        """
        self._just_kept = None
        if self._position == len(self._events):
            raise ReplayMismatch("the trace ends before the run does")
        self._time, event = self._events[self._position]
        self._position += 1
        if isinstance(event, LearnerLost):
            self._open = {k: c for k, c in self._open.items() if c.learner != event.learner}
        if isinstance(event, GradientFailed):
            self._open.pop(event.lease, None)
        if isinstance(event, GradientPushed):
            return self._push(event)
        if isinstance(event, ProgressMeasured) and self._measure is not None:
            again = ProgressMeasured(self._measure())
            self._note_difference(event != again, f"{event.loss!r}", f"{again.loss!r}")
            return again
        return event

    def send(self, command: Command) -> None:
        """Carry out a command, as far as tensors are concerned."""
        match command:
            case Compute():
                self._open[command.lease] = command
            case ApplyUpdate():
                self._gradients.apply(command)
            case Cancel():
                self._open.pop(command.lease, None)
            case Discard():
                if command.lease == self._just_kept:
                    self._gradients.drop(command.lease)
            case Finish():
                if self._position != len(self._events):
                    raise ReplayMismatch("the run ends before the trace does")

    def _push(self, event: GradientPushed) -> Event:
        compute = self._open.pop(event.lease, None)
        if compute is None:  # too late: its loss was reported but never counted
            self._gradients.release(event.version)
            return event
        if not self._gradients.has(event.version):
            raise ReplayMismatch(
                f"the trace computes lease {event.lease} on version {event.version}, which does "
                "not exist then"
            )
        made, gradient = compute_event(self, self._gradients, compute, event.version, None)
        if gradient is None:
            raise ReplayMismatch(
                f"lease {event.lease} had a gradient in the trace and fails now: {made}"
            )
        self._gradients.keep(event.lease, event.version, gradient)
        self._just_kept = event.lease
        self._gradients.release(event.version)
        again = replace(event, loss=gradient.loss, num_samples=gradient.num_samples)
        self._note_difference(
            event != again,
            f"{event.loss!r} over {event.num_samples} samples",
            f"{again.loss!r} over {again.num_samples}",
        )
        return again

    def _note_difference(self, differs: bool, said: str, is_now: str) -> None:
        if differs and self.first_difference is None:
            self.first_difference = (
                f"event row {self._position - 1} says loss {said}, and it is {is_now}"
            )
