"""Every exception Gruppetto raises on purpose.

* GruppettoError
  x UsageError                  the caller asked for something impossible   (exit 2)
    + InvalidSetting            a value that cannot be used; also a ValueError
    + TaskError                 a task that cannot be loaded or trained
    + RunFolderError            a folder that cannot be written, or holds no (or already a) run
    + TraceError                a trace that cannot be read, or belongs to another program
  x RunFailed                   the run started and could not finish        (exit 1)
    + Diverged                  losses left the sane range, or gradients were not finite
    + TooManyGivenUp            mini-batches failed again and again
    + LearnersLost              nobody is left to compute
    + ReplayMismatch            re-fed events do not reproduce the recorded run
  x ImpossibleEvent             an engine reported what cannot have happened (a bug in the engine)

A message says what was expected, what came, and what to do, in one sentence.
"""

from __future__ import annotations

__all__ = [
    "Diverged",
    "GruppettoError",
    "ImpossibleEvent",
    "InvalidSetting",
    "LearnersLost",
    "ReplayMismatch",
    "RunFailed",
    "RunFolderError",
    "TaskError",
    "TooManyGivenUp",
    "TraceError",
    "UsageError",
]


class GruppettoError(Exception):
    """Base of everything raised on purpose; catch it to catch them all."""


class UsageError(GruppettoError):
    """The request itself cannot be carried out; nothing was started or written."""


class InvalidSetting(UsageError, ValueError):
    """A setting is unknown, malformed, or outside its range."""


class TaskError(UsageError):
    """A task cannot be loaded (missing file, syntax error, no Task) or cannot be trained."""


class RunFolderError(UsageError):
    """A run folder cannot be written, holds a run already, or holds none."""


class TraceError(UsageError):
    """A trace cannot be read: not a trace, of another format, or damaged before its last row."""


class RunFailed(GruppettoError):
    """A run started and ended without reaching its goal.

    Attributes:
        stopped_by: the machine-readable reason, as in the JSON output.
        result: the summary of what was done, empty where nothing was.
    """

    stopped_by = "failed"

    def __init__(self, message: str, result: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.result = result if result is not None else {}


class Diverged(RunFailed):
    """Losses left the range of the guard, or gradients of several mini-batches were not finite."""

    stopped_by = "diverged"


class TooManyGivenUp(RunFailed):
    """More mini-batches failed ``max_attempts`` times than ``max_given_up`` allows."""

    stopped_by = "given-up"


class LearnersLost(RunFailed):
    """No learner is left and none will return."""

    stopped_by = "learners-lost"


class ReplayMismatch(RunFailed):
    """A replay did not reproduce what the trace recorded."""

    stopped_by = "mismatch"


class ImpossibleEvent(GruppettoError):
    """An event that cannot have happened: a lease never given, a version from the future.

    The receiving state machine has not changed. Seeing this means that an engine, or an edited
    trace, is wrong.
    """
