"""A seeded plan of what goes wrong: the cheapest place to find protocol mistakes.

Each job (the n-th of a slot) draws from its own keyed stream whether it meets a fault, and which;
so a failing seed replays, and a fault does not move the faults after it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields

from gruppetto.delays import keyed_uniforms
from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = ["FAULT_PLANS", "Fault", "FaultKind", "FaultPlan"]


class FaultKind(enum.Enum):
    """What can happen to a job."""

    #: The learner is lost when the job would have finished.
    DIE = "die"
    #: It never finishes; the learner is reported lost later, and may still push after that.
    HANG = "hang"
    #: A cancel is not noticed: the push comes all the same.
    LATE = "late"
    #: The push is delivered twice.
    DUPLICATE = "duplicate"
    #: The push is held up on its way, others overtake it.
    REORDER = "reorder"
    #: Computing raises an exception.
    FAIL = "fail"
    #: The gradient is not finite.
    NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its kind, how long what it delays takes, and when the learner returns."""

    kind: FaultKind
    #: Seconds.
    extra: float
    #: Seconds after the loss; None for never.
    rejoin_after: float | None


FAULT_PLANS: Registry[FaultPlan] = Registry("fault plan")


@FAULT_PLANS.register("random")
@dataclass(frozen=True)
class FaultPlan:
    """Faults at random: the share of jobs that meet each kind.

    >>> FaultPlan(seed=1, die=1.0, rejoin=0.0).draw(slot=0, n=0).kind
    <FaultKind.DIE: 'die'>
    """

    seed: int = 0
    die: float = 0.0
    hang: float = 0.0
    late: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    fail: float = 0.0
    not_finite: float = 0.0
    #: Share of lost learners that return, under a new number.
    rejoin: float = 1.0
    #: Seconds; what a fault delays, it delays by up to twice this.
    extra: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "seed":
                continue
            top = math.inf if field.name == "extra" else 1.0
            if not 0.0 <= value <= top or not math.isfinite(value):
                raise InvalidSetting(
                    f"fault plan: expected {field.name} from 0 to {top:g}, got {value}"
                )
        total = sum(getattr(self, kind.value) for kind in FaultKind)
        if total > 1.0 + 1e-9:
            raise InvalidSetting(
                f"fault plan: expected shares that sum to at most 1, got {total:g}"
            )

    def draw(self, slot: int, n: int) -> Fault | None:
        """The fault of the n-th job of a slot, if it meets one."""
        # The key's high bit keeps these apart from the delays of the same seed.
        which, extra, returns = keyed_uniforms(self.seed, slot + 2**63, 3 * n, 3)
        for kind in FaultKind:
            share = getattr(self, kind.value)
            if which < share:
                rejoin = 2.0 * self.extra * float(returns) if returns < self.rejoin else None
                return Fault(kind, 2.0 * self.extra * float(extra), rejoin)
            which -= share
        return None
