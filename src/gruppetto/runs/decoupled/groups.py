"""The order of a decoupled run's rows: groups of events, each of them up to one network version.

Events of a module come in the order of its column. Group v of a module is what it does after its
version v − 1 and up to its version v; group 0 is that it is ready. Rows are written group by group,
within a group module by module. So whole groups end exactly at a network version, and the order is
the same however the modules' clocks ran.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gruppetto.decoupled.schedule import Schedule
from gruppetto.protocols.messages import Event, ModuleUpdated
from gruppetto.trace import ModuleRow

__all__ = ["Group", "Groups"]


@dataclass
class Group:
    """What one module did for one version."""

    module: int
    #: With their run time.
    events: list[tuple[Event, float]] = field(default_factory=list)
    #: Of the update at their end; None where the module got ready, or did not come so far.
    row: ModuleRow | None = None


class Groups:
    """Takes events of modules as they come, and gives whole groups in order.

    Args:
        schedule: of the network.
        version: at which the modules begin; their first events, that they are ready, count in a run
            that begins at 0 only.
    """

    def __init__(self, schedule: Schedule, version: int = 0) -> None:
        self._schedule = schedule
        self._modules = range(1, schedule.num_modules + 1)
        self._whole: dict[int, deque[Group]] = {k: deque() for k in self._modules}
        self._open = {k: Group(k) for k in self._modules}
        self._is_ready = dict.fromkeys(self._modules, version == 0)
        #: The version that comes next.
        self.next = version + 1 if version else 0

    def take(self, module: int, event: Event, time: float, row: ModuleRow | None) -> None:
        """The next event of a module; ``row`` with the update."""
        if not self._is_ready[module]:
            self._is_ready[module] = True
            if isinstance(event, ModuleUpdated):
                return
        group = self._open[module]
        group.events.append((event, time))
        if isinstance(event, ModuleUpdated):
            group.row = row
            self._whole[module].append(group)
            self._open[module] = Group(module)

    def members(self, version: int) -> list[int]:
        """Modules that come to a version in a run that is not stopped."""
        lasts = {k: self._schedule.last_version(k) for k in self._modules}
        return [k for k, last in lasts.items() if last is None or version <= last]

    def pop(self) -> list[Group] | None:
        """The groups of the next version, module by module; None while they are not whole."""
        members = self.members(self.next)
        if not members or not all(self._whole[k] for k in members):
            return None
        self.next += 1
        return [self._whole[k].popleft() for k in members]

    def rest(self, module: int) -> Iterator[Group]:
        """What a module did beyond the last whole groups, the last of it perhaps unfinished."""
        yield from self._whole[module]
        if self._open[module].events:
            yield self._open[module]
