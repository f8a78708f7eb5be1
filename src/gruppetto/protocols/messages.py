"""Events (past tense, what happened) and commands (imperative, what to do now).

Numbers only, never tensors: a log of events replays anywhere. Engines stamp time; protocols never
see it. A *lease* (an integer never reused) names one piece of work: this mini-batch, by this
learner, on this version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = [
    "CLOSED",
    "COMMANDS",
    "EVENTS",
    "NOT_FINITE",
    "RESUMED",
    "TOO_STALE",
    "ApplyUpdate",
    "Backward",
    "BackwardFinished",
    "Cancel",
    "Command",
    "Compute",
    "Contribution",
    "Discard",
    "Event",
    "Finish",
    "Forward",
    "ForwardFinished",
    "GradientFailed",
    "GradientPushed",
    "LearnerJoined",
    "LearnerLost",
    "ModuleUpdated",
    "PassFailed",
    "ProgressMeasured",
    "Step",
    "StopAt",
    "StopPassedOn",
    "StopRequested",
]

#: Reason of a :class:`GradientFailed` whose loss or gradient was infinite or not a number.
NOT_FINITE: Final = "not finite"
#: Reason of a :class:`LearnerLost` when a run goes on without its old learners: no mini-batch is to
#: blame for it.
RESUMED: Final = "the run was resumed"
#: Reason of a :class:`Discard` of what belongs to a closed lease.
CLOSED: Final = "the lease is closed"
#: Reason of a :class:`Discard` that closes its lease: the gradient is staler than the bound allows.
TOO_STALE: Final = "too stale"


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class LearnerJoined:
    """A learner is ready for its first mini-batch. A returning learner has a new number."""

    learner: int


@dataclass(frozen=True, slots=True)
class LearnerLost:
    """A learner's process is gone; what it held in hand will not arrive."""

    learner: int
    reason: str


@dataclass(frozen=True, slots=True)
class GradientPushed:
    """A gradient has arrived.

    ``version`` is the one the gradient was computed on: at least the leased one, and the truth.
    ``loss`` is the mean over ``num_samples`` samples, and finite.
    """

    lease: int
    version: int
    loss: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class GradientFailed:
    """Fetching, forward, loss or backward failed; the learner is alive and free."""

    lease: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProgressMeasured:
    """The loss on a fixed training sample, measured by the engine for adaptive protocols.

    None where it was infinite or not a number: a trace cannot hold those.
    """

    loss: float | None


@dataclass(frozen=True, slots=True)
class StopRequested:
    """End the run now: a limit was reached, or somebody asked."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForwardFinished:
    """Decoupled backpropagation: a module has run a mini-batch forward.

    Modules count from 1. ``version`` is the module's own: mini-batches it had applied. ``loss`` is
    the mean over the samples, from the last module; None from the others.
    """

    module: int
    mini_batch: int
    version: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class BackwardFinished:
    """A module has run a mini-batch backward; ``version`` is its own just before the step."""

    module: int
    mini_batch: int
    version: int


@dataclass(frozen=True, slots=True)
class ModuleUpdated:
    """A module has this version now; its first one when it is ready to start."""

    module: int
    version: int


@dataclass(frozen=True, slots=True)
class PassFailed:
    """A pass of a module failed, or gave something that is not finite; nothing was applied."""

    module: int
    mini_batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopPassedOn:
    """The module upstream has passed a :class:`StopAt` on. Never recorded: it follows from the
    ``StopRequested`` that module 1 was told."""

    version: int
    reason: str


Event: TypeAlias = (
    LearnerJoined
    | LearnerLost
    | GradientPushed
    | GradientFailed
    | ProgressMeasured
    | StopRequested
    | ForwardFinished
    | BackwardFinished
    | ModuleUpdated
    | PassFailed
    | StopPassedOn
)


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Compute:
    """Have a learner compute the gradient of a mini-batch at a version (or a newer one).

    ``next_mini_batch`` is reserved for the same learner, for prefetching; None while learners are
    still expected, and near the end.
    """

    lease: int
    learner: int
    mini_batch: int
    version: int
    next_mini_batch: int | None


@dataclass(frozen=True, slots=True)
class Cancel:
    """A lease is closed; its learner should stop as soon as it can. A push may still come."""

    lease: int


@dataclass(frozen=True, slots=True)
class Discard:
    """A push or failure that came too late, or a push too stale: throw the gradient away."""

    lease: int
    reason: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """One gradient of an update.

    ``staleness`` is the server's version just before applying, minus ``version``. ``factor`` is
    s = rate / base rate from the modulation; None where it needs tensors, then the server fills it.
    """

    lease: int
    version: int
    staleness: int
    num_samples: int
    factor: float | None


@dataclass(frozen=True, slots=True)
class ApplyUpdate:
    """Sum these contributions in this order, take one optimizer step, publish as ``version``."""

    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over; nothing follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forward:
    """Have a module run a mini-batch forward, once its inputs are there."""

    module: int
    mini_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Have a module run a mini-batch backward, once the gradient of its outputs is there."""

    module: int
    mini_batch: int


@dataclass(frozen=True, slots=True)
class Step:
    """Have a module apply the gradient of the mini-batch it has just run backward."""

    module: int
    mini_batch: int


@dataclass(frozen=True, slots=True)
class StopAt:
    """Tell the modules downstream that the run ends for each once it has this version."""

    version: int
    reason: str


Command: TypeAlias = (
    Compute | Cancel | Discard | ApplyUpdate | Finish | Forward | Backward | Step | StopAt
)

EVENTS: Final[dict[str, type[Event]]] = {
    cls.__name__: cls
    for cls in (
        LearnerJoined,
        LearnerLost,
        GradientPushed,
        GradientFailed,
        ProgressMeasured,
        StopRequested,
        ForwardFinished,
        BackwardFinished,
        ModuleUpdated,
        PassFailed,
    )
}
COMMANDS: Final[dict[str, type[Command]]] = {
    cls.__name__: cls
    for cls in (
        Compute,
        Cancel,
        Discard,
        ApplyUpdate,
        Finish,
        Forward,
        Backward,
        Step,
        StopAt,
    )
}
