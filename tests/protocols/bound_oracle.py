"""A second opinion on bounds, sharing no logic with gruppetto.protocols.bounded.

Whether gradients can all be in time is counted, deadline by deadline, instead of putting them in
order; clocks are kept from the contributions seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: What each bound must reach in random runs, or they test less than they say.
CORNERS = {
    "discard": ("refused",),
    "restart": ("restarted",),
    "wait": ("held back", "kept idle", "more than K at once"),
    "clocks": ("kept idle",),
}
#: The protocols that take max_staleness.
BOUNDABLE = ("k-async", "k-batch-async", "softsync", "async")


class BoundModel:
    """The bound of a spec: its kind, or None, and its number."""

    def __init__(self, spec: str) -> None:
        self.kind: str | None = None
        self.s = 0
        #: Of live learners.
        self.clocks: dict[int, int] = {}
        if found := re.search(r"max_staleness=(\d+)", spec):
            given = re.search(r"on_stale=(\w+)", spec)
            self.kind, self.s = given[1] if given else "restart", int(found[1])
        elif found := re.match(r"ringmaster:r=(\d+)", spec):
            self.kind, self.s = "restart", int(found[1]) - 1
        elif found := re.match(r"ssp:s=(\d+)", spec):
            self.kind, self.s = "clocks", int(found[1])

    def limits_staleness(self) -> bool:
        return self.kind in ("discard", "restart", "wait")

    def refuses(self, staleness: int) -> bool:
        return self.kind == "discard" and staleness > self.s

    def is_too_old(self, staleness: int) -> bool:
        return self.kind == "restart" and staleness > self.s

    def may_fire(self, under_way: Iterable[int], version: int, k: int) -> bool:
        """Whether what is under way could still be applied after an update of ``version``."""
        return self.kind != "wait" or self._fit(under_way, version + 1, k)

    def may_start(self, learner: int, others: Iterable[int], version: int, k: int) -> bool:
        """Whether a learner may start beside gradients, held and under way, of these versions."""
        if self.kind == "clocks":
            return all(self.clocks[learner] <= clock + self.s for clock in self.clocks.values())
        return self.kind != "wait" or self._fit([*others, version], version, k)

    def _fit(self, versions: Iterable[int], first: int, k: int) -> bool:
        deadlines = [version + self.s for version in versions]
        return all(
            sum(other <= deadline for other in deadlines) <= k * (deadline - first + 1)
            for deadline in deadlines
        )

    # -------------------------------------------------------------- clocks

    def joined(self, learner: int) -> None:
        if learner not in self.clocks:
            self.clocks[learner] = min(self.clocks.values()) if self.clocks else 0

    def lost(self, learner: int) -> None:
        self.clocks.pop(learner)

    def applied(self, learner: int) -> None:
        if learner in self.clocks:
            self.clocks[learner] += 1
