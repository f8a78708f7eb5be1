"""Each live learner's clock: how many of its own gradients were applied.

A learner that joins later starts at the slowest live clock: it owes nothing from before it came,
and is not ahead of anybody.
"""

from __future__ import annotations

from collections.abc import Iterable

from gruppetto.protocols.ledger import Lease

__all__ = ["Clocks"]


class Clocks:
    """The clocks of the live learners.

    Args:
        expected_learners: they count from the start, at 0.
    """

    def __init__(self, expected_learners: Iterable[int]) -> None:
        #: Of live learners, expected ones included.
        self.of = dict.fromkeys(expected_learners, 0)

    def __repr__(self) -> str:
        return f"Clocks({self.of})"

    def join(self, learner: int) -> None:
        """A learner is here."""
        self.of.setdefault(learner, min(self.of.values(), default=0))

    def lose(self, learner: int) -> None:
        """A learner is gone, and holds nobody any more."""
        del self.of[learner]

    def tick(self, leases: Iterable[Lease]) -> set[int]:
        """Gradients were applied.

        Returns:
            Whose.
        """
        learners = [lease.learner for lease in leases]
        for learner in learners:
            if learner in self.of:
                self.of[learner] += 1
        return set(learners)

    def lead(self, learner: int) -> int:
        """Clocks that a live learner is ahead of the slowest one."""
        return self.of[learner] - min(self.of.values())
