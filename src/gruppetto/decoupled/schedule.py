"""Schedules of decoupled backpropagation, as data. Pure: no torch, no clock, no processes.

The law of this file: a module's *column*, the order of its own passes, follows from its delay
alone. So the mathematics of a run does not depend on how modules wait for each other, nor on how
long anything takes; a schedule only decides who may begin when.

    module 1 (delay 2):  F0 F1 F2 B0 F3 B1 F4 B2 ...
    module 2 (delay 1):     F0 F1 B0 F2 B1 F3 B2 ...
    module 3 (delay 0):        F0 B0 F1 B1 F2 B2 ...

F(k, b) needs F(k − 1, b), and B(k, b) needs B(k + 1, b); each B is followed at once by the
module's optimizer step. Modules and their rings count from 1, mini-batches and versions from 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gruppetto.errors import ImpossibleEvent, InvalidSetting
from gruppetto.protocols.messages import (
    Backward,
    BackwardFinished,
    Command,
    Event,
    Finish,
    Forward,
    ForwardFinished,
    ModuleUpdated,
    PassFailed,
    Step,
    StopAt,
    StopPassedOn,
    StopRequested,
)

__all__ = ["COMPLETED", "UPDATES", "Action", "ModuleProgram", "NetworkProgram", "Schedule", "Tail"]

#: What happens to mini-batches in flight when the last one has been run forward.
Tail = Literal["drain", "drop"]
COMPLETED: Final = "epochs"
UPDATES: Final = "updates"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass: ``2F0`` is module 2's forward pass of mini-batch 0; B includes the step."""

    module: int
    kind: Literal["F", "B"]
    mini_batch: int

    def __str__(self) -> str:
        return f"{self.module}{self.kind}{self.mini_batch}"


@dataclass(frozen=True)
class Schedule:
    """Who runs what in which order, and who waits for whom.

    Args:
        delays: of modules 1..K: forward passes between a mini-batch's forward and its backward.
        num_mini_batches: of the run; None for a run that something else ends.
        tail: ``drain``: what is in flight at the end is applied; ``drop``: it is not.
        barrier: all modules wait for each other after each iteration, as in the DDG paper.
        capacity: mini-batches a ring between two modules holds.
        updates: the run stops once every module has this version, with what is in flight then
            left there for a run that is resumed; None for no such limit.

    Raises:
        InvalidSetting: no module, a negative delay, a last module that is late, no room in rings.
    """

    delays: tuple[int, ...]
    num_mini_batches: int | None = None
    tail: Tail = "drain"
    barrier: bool = False
    capacity: int = 2
    updates: int | None = None

    def __post_init__(self) -> None:
        if not self.delays or min(self.delays) < 0:
            raise InvalidSetting(
                f"schedule: expected delays >= 0, one per module, got {self.delays}"
            )
        if self.delays[-1] != 0:
            raise InvalidSetting(
                f"schedule: the last module is never late; expected delay 0, got {self.delays[-1]}"
            )
        if list(self.delays) != sorted(self.delays, reverse=True):
            raise InvalidSetting(
                f"schedule: a gradient cannot be there before it is made; expected delays that do "
                f"not grow towards the last module, got {self.delays}"
            )
        # When a run stops, a ring keeps what its sender is ahead of its receiver.
        apart = max((a - b for a, b in itertools.pairwise(self.delays)), default=0)
        if self.capacity < max(1, apart):
            raise InvalidSetting(
                f"schedule: expected capacity >= {max(1, apart)}, as neighbouring modules are "
                f"{apart} mini-batches apart, got {self.capacity}"
            )
        if self.num_mini_batches is not None and self.num_mini_batches < 1:
            raise InvalidSetting(
                f"schedule: expected at least one mini-batch, got {self.num_mini_batches}"
            )
        if self.updates is not None and self.updates < 1:
            raise InvalidSetting(f"schedule: expected at least one update, got {self.updates}")

    @property
    def num_modules(self) -> int:
        """K."""
        return len(self.delays)

    def delay(self, module: int) -> int:
        """Of module k = 1..K."""
        return self.delays[module - 1]

    def last_version(self, module: int) -> int | None:
        """Mini-batches that module k has applied when a run that is not stopped is over."""
        if self.num_mini_batches is None or self.tail == "drain":
            return self.num_mini_batches
        return max(0, self.num_mini_batches - self.delay(module))

    @property
    def planned_stop(self) -> StopAt | None:
        """Where the run stops by :attr:`updates`; None if it does not."""
        if self.updates is None:
            return None
        return self.reachable_stop(StopAt(self.updates, UPDATES))

    def reachable_stop(self, stop: StopAt) -> StopAt | None:
        """A stop that all modules can come to; None where some end before, and all go to the end.

        With ``tail=drop`` modules end at different versions.
        """
        last = self.last_version(1)
        return stop if last is None or stop.version <= last else None

    def next_action(self, module: int, num_forwards: int, version: int) -> Action | None:
        """What module k does next.

        Args:
            module: k.
            num_forwards: mini-batches it has run forward.
            version: mini-batches it has applied.

        Returns:
            None when it has done all.
        """
        has_more = self.num_mini_batches is None or num_forwards < self.num_mini_batches
        last = self.last_version(module)
        # With tail=drop a run may be too short for any update, but not for forward passes.
        if last is not None and version >= last and not has_more:
            return None
        if has_more and num_forwards <= version + self.delay(module):
            return Action(module, "F", num_forwards)
        return Action(module, "B", version)

    def column(self, module: int) -> Iterator[Action]:
        """All passes of module k, in order; endless without a number of mini-batches."""
        num_forwards = version = 0
        while (action := self.next_action(module, num_forwards, version)) is not None:
            yield action
            if action.kind == "F":
                num_forwards += 1
            else:
                version += 1

    def needs(self, action: Action, stop: int | None = None) -> list[Action]:
        """Passes of other modules that must be over before one can begin, barrier included.

        Args:
            action: the pass.
            stop: the version at which every module stops, if that is known: module 1 is the last to
                come to it, and does not wait at barriers for what others will not do.
        """
        module, batch = action.module, action.mini_batch
        needed = []
        if action.kind == "F" and module > 1:
            needed.append(Action(module - 1, "F", batch))
        if action.kind == "B" and module < self.num_modules:
            needed.append(Action(module + 1, "B", batch))
        if self.barrier and action.kind == "F" and module == 1 and batch > 0:
            for other in range(1, self.num_modules + 1):
                late = batch - 1 - self.delay(other)
                if stop is not None:
                    late = min(late, stop - 1)
                if late >= 0:
                    needed.append(Action(other, "B", late))
        return needed

    def most_in_flight(self, module: int) -> int:
        """Graphs (or inputs) that module k keeps at once, at most."""
        most = self.delay(module) + 1
        return most if self.num_mini_batches is None else min(most, self.num_mini_batches)

    def staleness(self, module: int, mini_batch: int) -> int:
        """Of the gradient of a mini-batch in module k: updates between its passes."""
        return min(self.delay(module), mini_batch)


class ModuleProgram:
    """One module's column as a program: events in, commands out.

    Args:
        schedule: of the network.
        module: k.
        version: at which it begins; above 0 when a run is resumed, with what was in flight then
            run forward already.
    """

    def __init__(self, schedule: Schedule, module: int, version: int = 0) -> None:
        self.schedule = schedule
        self.module = module
        self.version = version
        total = schedule.num_mini_batches
        ahead = version + schedule.delay(module) if version else 0
        #: Mini-batches run forward, the one that is under way included.
        self.num_forwards = ahead if total is None else min(ahead, total)
        self._current: Action | None = None
        #: Whether that one is a backward pass which is over, and its step is not.
        self._is_stepping = False
        self._stop = schedule.planned_stop
        #: Whether nothing was done since the last update, or the start.
        self.has_just_updated = True
        #: Why it has finished; None before.
        self.finished: str | None = None

    def handle(self, event: Event) -> list[Command]:
        """The next command.

        Raises:
            ImpossibleEvent: the event is not what this module was told to do; nothing changes.
        """
        if self.finished is not None:
            raise ImpossibleEvent(f"module {self.module} has finished; got {event}")
        match event:
            case StopRequested(reason):
                if self.module != 1:
                    raise ImpossibleEvent(f"module 1 chooses where a run stops; got {event}")
                last = self.schedule.last_version(self.module)
                if last is not None and self.num_forwards >= last:
                    return []  # the rest of its column is no longer than that of a stop
                return self.stop_at(StopAt(self.num_forwards, reason))
            case StopPassedOn(version, reason):
                return self.stop_at(StopAt(version, reason))
            case PassFailed(mini_batch=mini_batch, reason=reason):
                self._check(event, mini_batch, ("F", "B"))
                self.finished = reason
                return [Finish(reason)]
            case ForwardFinished(mini_batch=mini_batch, version=version):
                self._check(event, mini_batch, ("F",), version)
                self.has_just_updated = False
                return self._proceed()
            case BackwardFinished(mini_batch=mini_batch, version=version):
                self._check(event, mini_batch, ("B",), version)
                self.has_just_updated = False
                self._is_stepping = True
                return [Step(self.module, mini_batch)]
            case ModuleUpdated(version=version):
                if self._current is not None and not self._is_stepping:
                    raise ImpossibleEvent(f"{self._told} and has no step to take; got {event}")
                expected = self.version + self._is_stepping
                if version != expected:
                    raise ImpossibleEvent(f"expected version {expected}, got {event}")
                self.version = version
                self.has_just_updated = True
                return self._proceed()
        raise ImpossibleEvent(f"module {self.module} does not know {type(event).__name__}")

    def stop_at(self, stop: StopAt) -> list[Command]:
        """End once the module has a version; passed on to those downstream.

        Of several the lowest version holds; one that some module cannot come to is passed on, and
        changes nothing.
        """
        if self.finished is not None:
            return []
        if self._stop is not None and self._stop.version <= stop.version:
            return []
        if self.schedule.reachable_stop(stop) is None:
            return [stop]
        self._stop = stop
        commands: list[Command] = [stop]
        if self.version == stop.version:
            # What it was about to run forward, if anything, is of the time after.
            self.finished = stop.reason
            commands.append(Finish(stop.reason))
        return commands

    @property
    def _told(self) -> str:
        return f"module {self.module} was told {self._current or 'nothing'}"

    def _check(
        self, event: Event, mini_batch: int, kinds: tuple[str, ...], version: int | None = None
    ) -> None:
        """Whether it was told so; with a version: and reports its first end, at its version."""
        current = self._current
        if current is None or current.mini_batch != mini_batch or current.kind not in kinds:
            raise ImpossibleEvent(f"{self._told}; got {event}")
        if version is not None and (version != self.version or self._is_stepping):
            step = " and is stepping" if self._is_stepping else ""
            raise ImpossibleEvent(f"{self._told} at version {self.version}{step}; got {event}")

    def _proceed(self) -> list[Command]:
        reason = COMPLETED
        action = self.schedule.next_action(self.module, self.num_forwards, self.version)
        if self._stop is not None and self.version >= self._stop.version:
            action, reason = None, self._stop.reason
        self._current = action
        self._is_stepping = False
        if action is None:
            self.finished = reason
            return [Finish(reason)]
        if action.kind == "F":
            self.num_forwards += 1
            return [Forward(self.module, action.mini_batch)]
        return [Backward(self.module, action.mini_batch)]


class NetworkProgram:
    """All modules' programs as one, for an engine that runs all modules.

    On a ``StopAt`` the engine forgets the pass that a module of that version was told of.

    Args:
        schedule: of the network.
        version: at which all modules begin.
    """

    def __init__(self, schedule: Schedule, version: int = 0) -> None:
        numbers = range(1, schedule.num_modules + 1)
        self.modules = [ModuleProgram(schedule, k, version) for k in numbers]
        self._finished: list[str] = []

    def handle(self, event: Event) -> list[Command]:
        """Commands for the module the event is of; ``Finish`` once all modules have finished."""
        if isinstance(event, StopRequested):
            return self._stop(event)
        number = getattr(event, "module", None)
        if not isinstance(number, int) or not 1 <= number <= len(self.modules):
            raise ImpossibleEvent(f"expected an event of a module 1..{len(self.modules)}: {event}")
        commands = self.modules[number - 1].handle(event)
        return commands if isinstance(event, PassFailed) else self._gather(commands)

    def _stop(self, event: StopRequested) -> list[Command]:
        first, *others = self.modules
        if first.finished is not None:  # the others are about to finish, too
            return []
        versions = {module.version for module in self.modules}
        if len(versions) == 1 and all(module.has_just_updated for module in self.modules):
            # All stand at a version of the network: nothing has to go on.
            commands = first.stop_at(StopAt(versions.pop(), event.reason))
        else:
            commands = first.handle(event)
        for stop in [c for c in commands if isinstance(c, StopAt)]:
            for module in others:
                commands += [c for c in module.stop_at(stop) if not isinstance(c, StopAt)]
        return self._gather(commands)

    def _gather(self, commands: Sequence[Command]) -> list[Command]:
        kept: list[Command] = []
        for command in commands:
            if isinstance(command, Finish):
                self._finished.append(command.reason)
            else:
                kept.append(command)
        if len(self._finished) == len(self.modules):
            kept.append(Finish(self._finished[-1]))
        return kept
