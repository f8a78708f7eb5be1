"""When a run has left the sane range: a fold over the losses of the gradients that were pushed.

What is compared is the mean loss of the most recent gradients with the loss at the start. Both are
made so that a few odd mini-batches say nothing: the start is the median of the first gradients,
most of which were computed on the initial weights, and a recent loss counts as at most twice as far
off as is allowed, so that it takes half of the recent ones to be out of range. Nothing but events
goes in, so a replayed or resumed run decides alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = ["GUARDS", "Guard", "LossGuard", "LossWatch", "NoGuard"]

#: Gradients that tell the loss at the start, at least.
_MIN_START = 8
#: Recent gradients that are looked at: at least so many, two of each learner, ten updates. Momentum
#: overshoots for some updates, and gradients are stale for as many as there are learners.
_MIN_RECENT, _PER_LEARNER, _UPDATES = 20, 2, 10
#: A loss counts as at most so many times the allowed distance from the start.
_MOST = 2.0


@dataclass(frozen=True)
class Guard:
    """A rule for how far the loss may rise above that of the start."""

    def reach(self, start: float, spread: float) -> float:
        """How far above ``start`` the mean of recent losses may be, > 0; infinite for any.

        Args:
            start: typical loss of the first gradients.
            spread: typical distance of these from it, >= 0.
        """
        raise NotImplementedError


GUARDS: Registry[Guard] = Registry("guard")


@GUARDS.register("loss")
@dataclass(frozen=True)
class LossGuard(Guard):
    """Ends a run whose recent losses are `factor` times those at the start.

    The allowed rise is (factor − 1) times the largest of three: the loss at the start; `floor`,
    for losses that start near 0; and the spread of the first losses, for those that scatter
    around 0. A negative loss counts by its size.

    >>> LossGuard().reach(2.5, 0.25), LossGuard().reach(0.01, 0.0), LossGuard().reach(-8.0, 3.0)
    (7.5, 3.0, 24.0)
    """

    factor: float = 4.0
    floor: float = 1.0

    def __post_init__(self) -> None:
        if not (self.factor > 1 and math.isfinite(self.factor)):
            raise InvalidSetting(
                f"guard loss: expected factor > 1 and finite, got factor={self.factor}; "
                "guard off allows any loss"
            )
        if not (self.floor > 0 and math.isfinite(self.floor)):
            raise InvalidSetting(
                f"guard loss: expected floor > 0 and finite, got floor={self.floor}"
            )

    def reach(self, start: float, spread: float) -> float:
        return (self.factor - 1.0) * max(abs(start), spread, self.floor)


@GUARDS.register("off")
@dataclass(frozen=True)
class NoGuard(Guard):
    """Allows any finite loss; only gradients that are not finite end a run."""

    def reach(self, start: float, spread: float) -> float:
        return math.inf


class LossWatch:
    """Follows the losses of a run, and says when its guard is to end it.

    Args:
        guard: how far they may rise.
        num_learners: P.
        num_to_wait: K, gradients of one update.
    """

    def __init__(self, guard: Guard, num_learners: int, num_to_wait: int) -> None:
        self.guard = guard
        #: Gradients that tell the loss at the start.
        self.start_size = max(_MIN_START, num_learners)
        #: Gradients that count as recent.
        self.window = max(_MIN_RECENT, _PER_LEARNER * num_learners, _UPDATES * num_to_wait)
        #: Loss at the start; None until it is known.
        self.start: float | None = None
        self._reach = math.inf
        #: (loss, samples, staleness), at most `window`.
        self.recent: deque[tuple[float, int, int]] = deque()
        #: Samples of the recent ones, and the sum over them of distances from the start, where 1
        #: is as far as is allowed.
        self._samples = 0
        self._distance = 0.0

    def __repr__(self) -> str:
        return f"LossWatch({vars(self)})"

    # -------------------------------------------------------------- following

    def add(self, loss: float, num_samples: int, staleness: int) -> bool:
        """Count a gradient that was pushed in.

        Args:
            loss: mean over its samples, finite.
            num_samples: >= 1.
            staleness: versions that the server was ahead of it.

        Returns:
            Whether the losses have left the sane range.
        """
        if len(self.recent) == self.window:
            old, samples, _ = self.recent.popleft()
            self._samples -= samples
            self._distance -= self._distance_of(old, samples)
        self.recent.append((loss, num_samples, staleness))
        self._samples += num_samples
        if self.start is not None:
            self._distance += self._distance_of(loss, num_samples)
        elif len(self.recent) == self.start_size:
            self._begin()
        return self.is_out_of_range

    @property
    def is_out_of_range(self) -> bool:
        """Whether the recent losses, as many as it takes, are further up than the guard allows."""
        return len(self.recent) == self.window and self._distance > self._samples

    def _begin(self) -> None:
        losses = [loss for loss, *_ in self.recent]
        self.start = start = _lower_median(losses)
        self._reach = self.guard.reach(start, _lower_median([abs(x - start) for x in losses]))
        self._distance = sum(self._distance_of(loss, n) for loss, n, _ in self.recent)

    def _distance_of(self, loss: float, num_samples: int) -> float:
        if self.start is None or not math.isfinite(self._reach):
            return 0.0
        return num_samples * min(_MOST, max(-_MOST, (loss - self.start) / self._reach))

    # ---------------------------------------------------------------- looking

    @property
    def loss(self) -> float | None:
        """Sample-weighted mean of the recent losses as they are; None before the first."""
        if not self.recent:
            return None
        # Shares first: a sum of losses may overflow where their mean does not.
        return sum(loss * (n / self._samples) for loss, n, _ in self.recent)

    @property
    def mean_staleness(self) -> float:
        """Of the recent gradients; 0.0 before the first."""
        return sum(s for *_, s in self.recent) / len(self.recent) if self.recent else 0.0

    @property
    def max_staleness(self) -> int:
        """Of the recent gradients; 0 before the first."""
        return max((s for *_, s in self.recent), default=0)


def _lower_median(values: Sequence[float]) -> float:
    # Where learners have started to diverge among the first gradients, the lower half has not.
    return sorted(values)[(len(values) - 1) // 2]
