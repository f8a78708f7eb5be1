"""Seeded mistakes in decoupled/schedule.py: what would we notice if a rule were broken?

python tests/decoupled/schedule_mutants.py        prints the table
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from columns import check, scenario_of

import gruppetto.decoupled.schedule as real

SOURCE = Path(real.__file__)
MAX_SEEDS = 120


@dataclass(frozen=True)
class Mutant:
    """An edit: ``old`` occurs once in the file and becomes ``new``."""

    name: str
    old: str
    new: str
    breaks: str


MUTANTS = (
    Mutant(
        "one forward pass less ahead",
        "has_more and num_forwards <= version + self.delay(module)",
        "has_more and num_forwards < max(1, version + self.delay(module))",
        "d + 1 forward passes before the first backward pass",
    ),
    Mutant(
        "one forward pass more ahead",
        "has_more and num_forwards <= version + self.delay(module)",
        "has_more and num_forwards <= version + self.delay(module) + 1",
        "never more in flight than predicted",
    ),
    Mutant(
        "every module as late as the first",
        "return self.delays[module - 1]",
        "return self.delays[0]",
        "each module has a delay of its own",
    ),
    Mutant(
        "the tail is dropped",
        'self.num_mini_batches is None or self.tail == "drain"',
        "self.num_mini_batches is None",
        "drain applies what is in flight",
    ),
    Mutant(
        "the tail is drained",
        'self.num_mini_batches is None or self.tail == "drain"',
        "True",
        "drop applies nothing after the last forward pass",
    ),
    Mutant(
        "a short run is empty",
        "version >= last and not has_more",
        "version >= last",
        "with tail=drop a module without updates runs forward for the others",
    ),
    Mutant(
        "one graph too few",
        "most = self.delay(module) + 1",
        "most = max(1, self.delay(module))",
        "d + 1 in flight",
    ),
    Mutant(
        "staleness from the start",
        "return min(self.delay(module), mini_batch)",
        "return self.delay(module)",
        "the first d mini-batches are less late",
    ),
    Mutant(
        "nothing is in flight when resumed",
        "ahead = version + schedule.delay(module) if version else 0",
        "ahead = version",
        "what was in flight has been run forward",
    ),
    Mutant(
        "in flight before anything ran",
        "ahead = version + schedule.delay(module) if version else 0",
        "ahead = version + schedule.delay(module)",
        "at version 0 nothing has been run",
    ),
    Mutant(
        "events after the end",
        '            raise ImpossibleEvent(f"module {self.module} has finished; got {event}")\n',
        "            return []\n",
        "impossible events raise",
    ),
    Mutant(
        "a late stop counts",
        "                if last is not None and self.num_forwards >= last:\n"
        "                    return []",
        "                if False:\n                    return []",
        "at the end of a run everything is applied",
    ),
    Mutant(
        "stops at the version of now",
        "self.stop_at(StopAt(self.num_forwards, reason))",
        "self.stop_at(StopAt(self.version, reason))",
        "no module is beyond the version of the stop",
    ),
    Mutant(
        "any version is believed",
        "version is not None and (version != self.version or self._is_stepping)",
        "self._is_stepping",
        "passes are at the version the module has",
    ),
    Mutant(
        "a pass may end twice",
        "(version != self.version or self._is_stepping)",
        "version != self.version",
        "impossible events raise",
    ),
    Mutant(
        "any mini-batch is believed",
        "current is None or current.mini_batch != mini_batch or current.kind not in kinds",
        "current is None or current.kind not in kinds",
        "impossible events raise",
    ),
    Mutant(
        "any pass is believed",
        "current is None or current.mini_batch != mini_batch or current.kind not in kinds",
        "current is None or current.mini_batch != mini_batch",
        "impossible events raise",
    ),
    Mutant(
        "ready twice",
        "if self._current is not None and not self._is_stepping:",
        "if False:",
        "impossible events raise",
    ),
    Mutant(
        "refused too late",
        "                expected = self.version + self._is_stepping\n",
        "                expected = self.version + self._is_stepping\n"
        "                self.has_just_updated = not self.has_just_updated\n",
        "impossible events change nothing",
    ),
    Mutant(
        "an update too far",
        "if version != expected:",
        "if version < expected:",
        "updates are one by one",
    ),
    Mutant(
        "no step is ordered",
        "return [Step(self.module, mini_batch)]",
        "return []",
        "each backward pass is followed by its step",
    ),
    Mutant(
        "a stop is not passed on",
        "commands: list[Command] = [stop]\n",
        "commands: list[Command] = []\n",
        "all modules stop",
    ),
    Mutant(
        "who is there already goes on",
        "        if self.version == stop.version:\n",
        "        if False:\n",
        "a module at the version of the stop ends at once",
    ),
    Mutant(
        "ends before the version of the stop",
        "        if self.version == stop.version:\n",
        "        if self.version + 1 >= stop.version:\n",
        "all modules end at one version",
    ),
    Mutant(
        "a stop that cannot be reached",
        "return stop if last is None or stop.version <= last else None",
        "return stop",
        "with tail=drop modules end apart, and no stop is among them",
    ),
    Mutant(
        "updates forgotten",
        "if self.updates is None:",
        "if True:",
        "a run of so many updates ends there",
    ),
    Mutant(
        "stopped at any time",
        "len(versions) == 1 and all(module.has_just_updated for module in self.modules)",
        "len(versions) == 1",
        "what was run forward is no part of an older version",
    ),
    Mutant(
        "only the first module stops",
        "            for module in others:\n",
        "            for module in others[:0]:\n",
        "all modules stop",
    ),
    Mutant(
        "finished when the first is",
        "if len(self._finished) == len(self.modules):",
        "if self._finished:",
        "the run ends when all modules have",
    ),
    Mutant(
        "a stop twice",
        "if self._stop is not None and self._stop.version <= stop.version:",
        "if False:",
        "of several stops the lowest version holds",
    ),
)


def mutated(mutant: Mutant | None) -> ModuleType:
    """The module of schedules, loaded beside the real one, with a mistake in it."""
    text = SOURCE.read_text(encoding="utf-8")
    if mutant is not None:
        text = text.replace(mutant.old, mutant.new)
    module = ModuleType("mutated_schedule")
    # Dataclasses look their module up.
    sys.modules[module.__name__] = module
    exec(compile(text, str(SOURCE), "exec"), module.__dict__)
    return module


def judge(mutant: Mutant | None) -> str | None:
    """What notices a mistake first; None when nothing does."""
    code = mutated(mutant)
    for seed in range(MAX_SEEDS if mutant is not None else MAX_SEEDS // 2):
        try:
            check(code, scenario_of(seed))
        except Exception as error:
            return f"run {seed}: {type(error).__name__}: {str(error).splitlines()[:1]}"
    return None


if __name__ == "__main__":
    for one in MUTANTS:
        print(f"{one.name:36} {judge(one) or 'LIVES'}")
