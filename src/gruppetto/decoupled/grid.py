"""Schedules as text: actions and columns that parse back, and a grid of modules by steps. Pure.

In a grid every pass takes one step, so that it shows who waits for whom, not for how long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal, cast

from gruppetto.decoupled.schedule import Action, Schedule
from gruppetto.decoupled.timeline import Timeline
from gruppetto.errors import InvalidSetting

__all__ = ["Column", "format_columns", "grid", "parse_action", "parse_columns", "validate"]

#: The passes of one module, in order.
Column = Sequence[Action]

_ACTION: Final = re.compile(r"(\d+)([FB])(\d+)")


def parse_action(text: str) -> Action:
    """Read a pass: module, F or B, mini-batch.

    Raises:
        InvalidSetting: the text is not of that form.

    >>> parse_action("2F0")
    Action(module=2, kind='F', mini_batch=0)
    >>> str(parse_action("2F0"))
    '2F0'
    """
    found = _ACTION.fullmatch(text)
    if found is None or int(found[1]) < 1:
        raise InvalidSetting(
            f"schedule: expected a pass like 2F0 (module, F or B, mini-batch), got {text!r}"
        )
    return Action(int(found[1]), cast(Literal["F", "B"], found[2]), int(found[3]))


def parse_columns(text: str) -> tuple[tuple[Action, ...], ...]:
    """Read columns, one line per module; empty lines do not count.

    Raises:
        InvalidSetting: something on a line is not a pass.
    """
    lines = [line.split() for line in text.splitlines()]
    return tuple(tuple(parse_action(word) for word in words) for words in lines if words)


def format_columns(columns: Iterable[Column]) -> str:
    """Columns as text, one line per module; :func:`parse_columns` reads it back.

    >>> print(format_columns([Schedule((0,), 2).column(1)]))
    1F0 1B0 1F1 1B1
    """
    return "\n".join(" ".join(str(action) for action in column) for column in columns)


def grid(schedule: Schedule, n: int = 4) -> str:
    """The first n mini-batches, a row per module and a column per step; a dot is idle.

    >>> print(grid(Schedule((1, 0)), n=3))
    step      0  1  2  3  4  5  6  7
    module 1  F0 F1 .  B0 F2 B1 .  B2
    module 2  .  F0 B0 F1 B1 F2 B2
    """
    bounded = _first(schedule, n)
    return _Steps(bounded, _columns(bounded)).draw()


def validate(schedule: Schedule, columns: Sequence[Column] | None = None) -> None:
    """Check a schedule, or other columns of passes by the rules of a schedule.

    In every module forward and backward passes each go by mini-batch, a mini-batch is run backward
    after forward, and no more than ``delay + 1`` are in flight; and nobody waits for ever.

    Args:
        schedule: gives delays, numbers, barrier and rings.
        columns: of modules 1..K; None for the schedule's own.

    Raises:
        InvalidSetting: what is wrong, with a grid in which ``!`` marks the passes that fail.
    """
    if columns is None:
        schedule = _first(schedule, 2 * max(schedule.delays) + schedule.capacity + 4)
        columns = _columns(schedule)
    if len(columns) != schedule.num_modules:
        raise InvalidSetting(
            f"schedule: expected {schedule.num_modules} columns, one per module, got {len(columns)}"
        )
    for module, column in enumerate(columns, 1):
        wrong = _first_mistake(schedule, module, column)
        if wrong is not None:
            position, reason = wrong
            cut = [list(c) for c in columns]
            failing = cut[module - 1][position]
            del cut[module - 1][position:]
            drawn = _Steps(schedule, cut).draw({module: failing})
            raise InvalidSetting(f"schedule: {failing} {reason}\n{drawn}")
    steps = _Steps(schedule, columns)
    if steps.stuck:
        reasons = "; ".join(f"{a}: {steps.timeline.waits_for(a)}" for a in steps.stuck.values())
        drawn = steps.draw(steps.stuck)
        raise InvalidSetting(f"schedule: modules wait for each other for ever ({reasons})\n{drawn}")


def _first(schedule: Schedule, n: int) -> Schedule:
    total = n if schedule.num_mini_batches is None else min(n, schedule.num_mini_batches)
    return Schedule(schedule.delays, total, schedule.tail, schedule.barrier, schedule.capacity)


def _columns(schedule: Schedule) -> list[list[Action]]:
    return [list(schedule.column(k)) for k in range(1, schedule.num_modules + 1)]


def _first_mistake(schedule: Schedule, module: int, column: Column) -> tuple[int, str] | None:
    """Where a column first breaks a rule, and which."""
    num_forwards = version = 0
    total = schedule.num_mini_batches
    for position, action in enumerate(column):
        expected = num_forwards if action.kind == "F" else version
        if action.module != module:
            return position, f"is in the column of module {module}"
        if action.mini_batch != expected:
            return position, f"is out of order: expected {module}{action.kind}{expected}"
        if total is not None and action.mini_batch >= total:
            return position, f"is beyond the last mini-batch: the run has {total}"
        if action.kind == "F":
            num_forwards += 1
            most = schedule.most_in_flight(module)
            if num_forwards - version > most:
                return position, f"would make {most + 1} in flight: the delay allows {most}"
        elif action.mini_batch >= num_forwards:
            return position, "is before its forward pass"
        else:
            version += 1
    return None


class _Steps:
    """Columns put on a timeline whose passes take one step each, as far as they go."""

    def __init__(self, schedule: Schedule, columns: Sequence[Column]) -> None:
        ones = [1.0] * schedule.num_modules
        self.timeline = Timeline(schedule, ones, ones)
        #: module -> step -> pass.
        self._rows: dict[int, dict[int, Action]] = {k: {} for k in range(1, len(columns) + 1)}
        waiting = {k: list(column) for k, column in enumerate(columns, 1)}
        moved = True
        while moved:
            moved = False
            for module, left in waiting.items():
                while left and self.timeline.ready(left[0]) is not None:
                    done = self.timeline.run(left.pop(0))
                    self._rows[module][int(done.start)] = done.action
                    moved = True
        #: module -> the pass that can never begin.
        self.stuck = {module: left[0] for module, left in waiting.items() if left}

    def draw(self, failing: dict[int, Action] | None = None) -> str:
        """The grid; failing passes come with a mark in the step after all that could be run."""
        rows = {module: dict(row) for module, row in self._rows.items()}
        last = max((step for row in rows.values() for step in row), default=-1)
        cells = {
            module: {step: f"{a.kind}{a.mini_batch}" for step, a in row.items()}
            for module, row in rows.items()
        }
        for module, action in (failing or {}).items():
            cells[module][last + 1] = f"!{action.kind}{action.mini_batch}"
        steps = 1 + max((step for row in cells.values() for step in row), default=-1)
        texts = [[str(step) for step in range(steps)]]
        for row in cells.values():
            end = max(row, default=-1)
            texts.append([row.get(step, ".") for step in range(end + 1)])
        width = max((len(text) for line in texts for text in line), default=1)
        labels = ["step", *(f"module {module}" for module in cells)]
        indent = max(len(label) for label in labels) + 2
        return "\n".join(
            (f"{label:{indent}}" + " ".join(f"{text:{width}}" for text in line)).rstrip()
            for label, line in zip(labels, texts, strict=True)
        )
