"""When each pass begins and ends, given how long passes take. Pure: no torch, no clock.

A pass begins when its module is free and what it needs is over (:meth:`Schedule.needs`). A module
is free once the message of its last pass has found a slot; a ring between two modules has
``capacity`` slots each way, and a slot is free once the receiver has begun the pass that takes the
message. Messages themselves take no time.

All of this is maxima and sums, so the times do not depend on the order in which they are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from gruppetto.decoupled.methods import Keeps
from gruppetto.decoupled.schedule import Action, Schedule
from gruppetto.errors import ImpossibleEvent, InvalidSetting

__all__ = ["Held", "Pass", "Predicted", "Timeline", "held", "period", "simulate"]


class Pass(NamedTuple):
    """One pass on the timeline, seconds; what it waited for since its module's last pass ended."""

    action: Action
    start: float
    end: float
    #: What the module before sends, and what the module after sends.
    for_inputs: float
    for_gradients: float
    #: Room in a ring, and barriers.
    for_others: float


class Timeline:
    """The passes of all modules in time.

    Args:
        schedule: of the network.
        forward: seconds of a forward pass of module 1..K, each > 0.
        backward: seconds of a backward pass, step included.
        version: at which a run is resumed: all before, and what is in flight then, is over.
        time: when it is resumed.

    Raises:
        InvalidSetting: not one positive time per module.
    """

    def __init__(
        self,
        schedule: Schedule,
        forward: Sequence[float],
        backward: Sequence[float],
        version: int = 0,
        time: float = 0.0,
    ) -> None:
        for name, seconds in (("forward", forward), ("backward", backward)):
            if len(seconds) != schedule.num_modules or not all(
                isfinite(s) and s > 0 for s in seconds
            ):
                raise InvalidSetting(
                    f"pass times: expected {schedule.num_modules} positive seconds {name}, one per "
                    f"module, got {', '.join(f'{s:g}' for s in seconds)}"
                )
        self.schedule = schedule
        self._seconds = {"F": tuple(forward), "B": tuple(backward)}
        self._version = version
        self._time = time
        self._run: dict[Action, Pass] = {}
        self._reach = max(schedule.delays) + schedule.capacity + 3
        planned = schedule.planned_stop
        #: The version at which every module stops, once that is known.
        self.stop = None if planned is None else planned.version
        #: module -> its last pass.
        self._last: dict[int, Pass] = {}

    def ready(self, action: Action) -> float | None:
        """When a pass, its module's next one, can begin; None while that is not known yet.

        It is not known while something it needs has not been run here, or while the module's last
        message waits for a slot that nobody is known to free.
        """
        moments = self._moments(action)
        return None if moments is None else max(moments)

    def run(self, action: Action) -> Pass:
        """Put a pass on the timeline.

        Raises:
            ImpossibleEvent: it cannot begin.
        """
        moments = self._moments(action)
        if moments is None:
            raise ImpossibleEvent(f"{action} cannot begin yet: {self.waits_for(action)}")
        free, room, barrier, _ = moments
        start = max(moments)
        others = max(room, barrier)
        waited = start - max(others, free)
        is_forward = action.kind == "F"
        done = Pass(
            action,
            start,
            start + self._seconds[action.kind][action.module - 1],
            waited if is_forward else 0.0,
            0.0 if is_forward else waited,
            max(others, free) - free,
        )
        self._run[action] = self._last[action.module] = done
        # Nobody is further behind than this.
        self._run.pop(dataclasses.replace(action, mini_batch=action.mini_batch - self._reach), None)
        return done

    def waits_for(self, action: Action) -> str:
        """In words, what keeps a pass from beginning."""
        needed = self.schedule.needs(action, self.stop)
        missing = [str(a) for a in needed if self._end(a) is None]
        if missing:
            return f"it needs {' and '.join(missing)}"
        last = self._last.get(action.module)
        taken = None if last is None else self._taker(last.action)
        if last is not None and taken is not None and self._start(taken) is None:
            return f"what {last.action} gave has no room before {taken} begins"
        return "it needs nothing"

    # -------------------------------------------------------------- helpers

    def _moments(self, action: Action) -> tuple[float, float, float, float] | None:
        """Module free, room for its message, barrier passed, what it needs there."""
        free = room = self._time
        last = self._last.get(action.module)
        if last is not None:
            free = room = last.end
            taken = self._taker(last.action)
            if taken is not None:
                began = self._start(taken)
                if began is None:
                    return None
                room = max(free, began)
        barrier = need = self._time
        direct = {Action(action.module - 1, "F", action.mini_batch)}
        direct |= {Action(action.module + 1, "B", action.mini_batch)}
        for needed in self.schedule.needs(action, self.stop):
            end = self._end(needed)
            if end is None:
                return None
            if needed in direct:
                need = max(need, end)
            else:
                barrier = max(barrier, end)
        return free, room, barrier, need

    def _taker(self, sent: Action) -> Action | None:
        """The pass that frees the slot which the message of a pass goes to."""
        module = sent.module + (1 if sent.kind == "F" else -1)
        earlier = sent.mini_batch - self.schedule.capacity
        if not 1 <= module <= self.schedule.num_modules or earlier < 0:
            return None
        return Action(module, sent.kind, earlier)

    def _was_before(self, action: Action) -> bool:
        """Whether a pass was over when the run was resumed."""
        delay = self.schedule.delay(action.module) if action.kind == "F" else 0
        return self._version > 0 and action.mini_batch < self._version + delay

    def _end(self, action: Action) -> float | None:
        if self._was_before(action):
            return self._time
        done = self._run.get(action)
        return None if done is None else done.end

    def _start(self, action: Action) -> float | None:
        if self._was_before(action):
            return self._time
        done = self._run.get(action)
        return None if done is None else done.start


@dataclass(frozen=True)
class Predicted:
    """What a schedule makes of pass times."""

    #: Seconds per mini-batch once under way.
    period: float
    #: Seconds from the first pass to the end of the last one.
    makespan: float
    #: Of module 1..K: the share of the period in which it computes.
    busy: tuple[float, ...]
    #: Of module 1..K: seconds waited in all for inputs, for gradients, for others.
    waited: tuple[tuple[float, float, float], ...]
    #: All passes, by their start.
    passes: tuple[Pass, ...]


def simulate(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], n: int = 64
) -> Predicted:
    """Run a schedule's first n mini-batches on a timeline.

    Args:
        schedule: of the network; its own number of mini-batches, if lower, holds instead of n.
        forward: seconds of a forward pass of module 1..K.
        backward: seconds of a backward pass.
        n: mini-batches.

    Returns:
        The period is taken over the second half of module 1's updates, those of the tail apart.

    Raises:
        InvalidSetting: modules wait for each other for ever, or times that are none.
    """
    total = n if schedule.num_mini_batches is None else min(n, schedule.num_mini_batches)
    bounded = Schedule(schedule.delays, total, schedule.tail, schedule.barrier, schedule.capacity)
    timeline = Timeline(bounded, forward, backward)
    passes = run_columns(timeline, [list(bounded.column(k)) for k in _modules(bounded)])
    spent = _period(bounded, passes)
    seconds = zip(forward, backward, strict=True)
    waited = []
    for module in _modules(bounded):
        own = [p for p in passes if p.action.module == module]
        waited.append(
            (
                sum(p.for_inputs for p in own),
                sum(p.for_gradients for p in own),
                sum(p.for_others for p in own),
            )
        )
    return Predicted(
        spent,
        max(p.end for p in passes),
        tuple((f + b) / spent for f, b in seconds),
        tuple(waited),
        tuple(sorted(passes, key=lambda p: (p.start, p.action))),
    )


def run_columns(timeline: Timeline, columns: Sequence[Sequence[Action]]) -> list[Pass]:
    """Run every column to its end.

    Raises:
        InvalidSetting: no module can go on.
    """
    passes: list[Pass] = []
    positions = [0] * len(columns)
    while True:
        moved = False
        for k, column in enumerate(columns):
            while positions[k] < len(column) and timeline.ready(column[positions[k]]) is not None:
                passes.append(timeline.run(column[positions[k]]))
                positions[k] += 1
                moved = True
        if all(p == len(column) for p, column in zip(positions, columns, strict=True)):
            return passes
        if not moved:
            stuck = [c[p] for p, c in zip(positions, columns, strict=True) if p < len(c)]
            reasons = "; ".join(f"{a}: {timeline.waits_for(a)}" for a in stuck)
            raise InvalidSetting(f"schedule: modules wait for each other for ever ({reasons})")


def _modules(schedule: Schedule) -> range:
    return range(1, schedule.num_modules + 1)


def _period(schedule: Schedule, passes: Sequence[Pass]) -> float:
    """Between two updates of module 1 in the middle of a run, on average."""
    ends = [p.end for p in passes if p.action.module == 1 and p.action.kind == "B"]
    steady = ends[: len(ends) - (schedule.delay(1) if schedule.tail == "drain" else 0)]
    if len(steady) < 3:
        total = max(p.end for p in passes)
        return total / (schedule.num_mini_batches or 1)
    first = len(steady) // 2 if len(steady) > 3 else 0
    return (steady[-1] - steady[first]) / (len(steady) - 1 - first)


def period(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> float:
    """Seconds per mini-batch once under way, in closed form, with rings that are long enough.

    Free-running: modules i..j are a loop that holds 1 + d_i − d_j mini-batches at a time, so

        max over i <= j of (F_i + B_i + ... + F_j + B_j) / (1 + d_i − d_j)

    which is the slowest module, max (F_k + B_k), wherever delays fall by at least one from module
    to module, and the sum of everything for backpropagation. With a barrier an iteration lasts
    until the last of its passes, max over k of F_1 + ... + F_k + B_k, where modules of the same
    delay run backward one after the other; for equal modules this is T_F + T_B / K (Huo et al.,
    section 3, whose backward passes begin after the last forward pass).

    >>> ddg = Schedule((1, 0))
    >>> period(ddg, (0.5, 0.5), (1.0, 1.0)), period(Schedule((0, 0)), (0.5, 0.5), (1.0, 1.0))
    (1.5, 3.0)
    """
    delays = schedule.delays
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    if not schedule.barrier:
        return max(
            sum(both[i : j + 1]) / (1 + delays[i] - delays[j])
            for i in range(len(both))
            for j in range(i, len(both))
        )
    longest, above = 0.0, 0.0
    for k in reversed(range(len(delays))):
        together = k + 1 < len(delays) and delays[k] == delays[k + 1]
        above = max(sum(forward[: k + 1]), above if together else 0.0) + backward[k]
        longest = max(longest, above)
    return longest


@dataclass(frozen=True)
class Held:
    """What a module keeps for mini-batches in flight at most, in pieces."""

    #: Graphs of its forward pass, inputs included.
    graphs: int
    #: Inputs without a graph.
    inputs: int
    #: Copies of its weights.
    weights: int


def held(schedule: Schedule, keeps: Keeps) -> tuple[Held, ...]:
    """Predicted memory of modules 1..K, at the beginning of a backward pass.

    Args:
        schedule: of the network.
        keeps: what the method keeps between passes; without a delay, the graph on live weights.

    >>> held(Schedule((1, 0)), "graph-on-copy")
    (Held(graphs=2, inputs=0, weights=2), Held(graphs=1, inputs=0, weights=0))
    >>> held(Schedule((1, 0)), "input")
    (Held(graphs=1, inputs=2, weights=0), Held(graphs=1, inputs=0, weights=0))
    """
    found = []
    for module in _modules(schedule):
        most = schedule.most_in_flight(module)
        if schedule.delay(module) == 0:
            found.append(Held(most, 0, 0))
        elif keeps == "input":
            found.append(Held(1, most, 0))
        else:  # copies also where the graph is on the live weights, for checkpoints
            found.append(Held(most, 0, most))
    return tuple(found)
