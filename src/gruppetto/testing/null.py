"""A server and a learner that do no arithmetic: what is left of a run is who did what, when.

They check on their own that engines hand over the right things: a gradient is applied once, under
the version it was computed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gruppetto.protocols.messages import Contribution

__all__ = ["NullGradient", "NullLearner", "NullServer", "NullWeights"]


@dataclass(frozen=True, eq=False)
class NullWeights:
    """A version, by its number; weak references to it tell when an engine lets it go."""

    version: int


@dataclass(frozen=True, eq=False)
class NullGradient:
    """A gradient that knows where it comes from."""

    mini_batch: int
    version: int
    loss: float
    num_samples: int


class NullServer:
    """Counts updates.

    Attributes:
        version: updates taken.
        applied: mini-batches applied, in order.
        staleness: of each, at the time of its update.
        needs_past: False: it asks for no weights beside the gradients.
    """

    needs_past = False

    def __init__(self) -> None:
        self.version = 0
        self.applied: list[int] = []
        self.staleness: list[int] = []

    def snapshot(self) -> NullWeights:
        """The newest version."""
        return NullWeights(self.version)

    def apply(
        self,
        contributions: Sequence[Contribution],
        gradients: Sequence[NullGradient],
        past: Sequence[object] = (),
    ) -> None:
        """Take one update.

        Raises:
            AssertionError: a gradient is not the one its contribution speaks of.
        """
        for contribution, gradient in zip(contributions, gradients, strict=True):
            if gradient.version != contribution.version:
                raise AssertionError(
                    f"lease {contribution.lease} is applied as a gradient of version "
                    f"{contribution.version} and was computed on {gradient.version}"
                )
            if gradient.version + contribution.staleness != self.version:
                raise AssertionError(
                    f"lease {contribution.lease}: staleness {contribution.staleness} from version "
                    f"{gradient.version} to {self.version}"
                )
            self.applied.append(gradient.mini_batch)
            self.staleness.append(contribution.staleness)
        self.version += 1


@dataclass
class NullLearner:
    """Gradients at once: a constant loss over a constant number of samples."""

    loss: float = 1.0
    num_samples: int = 1
    #: (mini-batch, version) of every call.
    computed: list[tuple[int, int]] = field(default_factory=list)

    def compute(self, mini_batch: int, weights: NullWeights) -> NullGradient:
        """A gradient of a mini-batch at a version."""
        self.computed.append((mini_batch, weights.version))
        return NullGradient(mini_batch, weights.version, self.loss, self.num_samples)
