"""How long each module's passes take: given, measured, or by counted operations. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from gruppetto.decoupled.methods import Method
from gruppetto.errors import InvalidSetting

__all__ = ["PassTimes"]


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the passes of modules 1..K.

    Args:
        forward: one per module.
        backward: one per module, the optimizer step included, and in methods that replay the
            forward pass also that.

    Raises:
        InvalidSetting: no module, not as many of one as of the other, or a time not above 0.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.forward or len(self.forward) != len(self.backward):
            raise InvalidSetting(
                f"pass times: expected a forward and a backward time per module, got "
                f"{len(self.forward)} and {len(self.backward)}"
            )
        for seconds in (*self.forward, *self.backward):
            if not (isfinite(seconds) and seconds > 0):
                raise InvalidSetting(f"pass times: expected seconds > 0, got {seconds}")

    @classmethod
    def from_operations(cls, operations: Sequence[float]) -> PassTimes:
        """Share one second forward and two backward out by what each module computes.

        That backward passes take twice as long is what is usual where inputs have gradients.

        Args:
            operations: of modules 1..K, in any unit. One that computes nothing counts as a
                millionth of the network.

        Raises:
            InvalidSetting: no module, or a negative number.

        >>> PassTimes.from_operations([1, 3])
        PassTimes(forward=(0.25, 0.75), backward=(0.5, 1.5))
        """
        if not operations or min(operations) < 0:
            raise InvalidSetting(
                f"pass times: expected operations >= 0, one number per module, got "
                f"{', '.join(f'{n:g}' for n in operations) or 'none'}"
            )
        total = float(sum(operations))
        shares = [max(n / total, 1e-6) if total else 1 / len(operations) for n in operations]
        return cls(tuple(shares), tuple(2 * share for share in shares))

    def of(self, method: Method) -> PassTimes:
        """The times under a method: where it replays, a backward pass takes a forward pass more.

        Args:
            method: with as many modules.
        """
        if method.keeps != "input":
            return self
        late = [delay > 0 for delay in method.delays]
        times = zip(self.forward, self.backward, late, strict=True)
        return PassTimes(self.forward, tuple(b + f if replays else b for f, b, replays in times))

    @property
    def sequential(self) -> float:
        """Seconds per mini-batch of backpropagation, where nothing overlaps."""
        return sum(self.forward) + sum(self.backward)
