"""Timing without training: protocols and numbers of learners side by side, as ``simulate`` does.

Loads neither torch nor a task. A repeat is the same simulation with the next seed; of several
repeats the median counts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gruppetto.delays import DELAYS, Delay, KeyedDelays
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS, Protocol
from gruppetto.runs.measured import load_delay
from gruppetto.runs.progress import Progress
from gruppetto.theory.runtime import update_time
from gruppetto.theory.timing import Timing, simulate

__all__ = ["simulate_all"]

#: Jobs, about, from which on a progress bar is worth showing.
_MANY_JOBS: Final = 1_000_000


@dataclass(frozen=True)
class _Case:
    """One line of the result."""

    protocol: Protocol
    num_learners: int
    law: Delay
    own: Mapping[int, Delay]

    @property
    def jobs_per_update(self) -> int:
        """About how many delays are drawn for one update."""
        k = self.protocol.num_to_wait(self.num_learners)
        return max(k, self.num_learners) if self.protocol.cell.cancels else k

    def delays(self, seed: int) -> KeyedDelays:
        return KeyedDelays(seed, self.law, self.own, self.num_learners)


def simulate_all(
    protocols: Sequence[str],
    learners: Sequence[int],
    *,
    delay: str = "constant:value=1",
    delays: Mapping[int, str] | None = None,
    updates: int = 10_000,
    seed: int = 0,
    repeats: int = 1,
    progress: bool | None = None,
) -> list[dict[str, Any]]:
    """Simulate every protocol with every number of learners; nothing runs before all is checked.

    Args:
        protocols: names with keys.
        learners: numbers of learners.
        delay: the law of everybody's seconds per mini-batch.
        delays: learner -> its own law.
        updates: of each simulation.
        seed: of the first repeat; the same for all, so that they meet the same delays.
        repeats: with the seeds from ``seed`` on.
        progress: whether to show a bar; None where it takes long and somebody looks.

    Returns:
        One record for each pair, with the keys of ``gruppetto simulate --json``.

    Raises:
        InvalidSetting: whatever cannot work, in one sentence.
    """
    if repeats < 1:
        raise InvalidSetting(f"repeats: expected at least 1, got {repeats}")
    if updates < 1:
        raise InvalidSetting(f"updates: expected at least 1, got {updates}")
    law = load_delay(delay)
    own = {learner: load_delay(text) for learner, text in (delays or {}).items()}
    cases = [
        _Case(PROTOCOLS.parse(protocol), num_learners, law, own)
        for protocol, num_learners in itertools.product(protocols, learners)
    ]
    for case in cases:
        if case.num_learners < 1:
            raise InvalidSetting(f"learners: expected at least 1, got {case.num_learners}")
        case.protocol.check(case.num_learners)
        case.delays(seed)
    jobs = [updates * case.jobs_per_update for case in cases]
    if progress is None and repeats * sum(jobs) < _MANY_JOBS:
        progress = False
    with Progress("simulate", repeats * updates * len(cases), progress) as bar:
        return [
            _record(case, updates, range(seed, seed + repeats), bar, number * repeats * updates)
            for number, case in enumerate(cases)
        ]


def _record(
    case: _Case, updates: int, seeds: Sequence[int], bar: Progress, done: int
) -> dict[str, Any]:
    """One case, all of its repeats; ``done`` updates of other cases are behind us."""
    timings = []
    for number, seed in enumerate(seeds):
        before = done + number * updates

        def show(made: int, time: float, before: int = before) -> None:
            bar.advance(before + made, made, time)

        timings.append(
            simulate(case.protocol, case.delays(seed), case.num_learners, updates, progress=show)
        )
    expected = update_time(case.protocol, case.law, case.num_learners, laws=case.own)
    times = [timing.mean_update_time for timing in timings]
    return {
        "protocol": PROTOCOLS.format(case.protocol),
        "learners": case.num_learners,
        **_medians(timings),
        "expected_update_time": expected.seconds,
        "expected_is": expected.kind,
        "delay": DELAYS.format(case.law),
        "delays": {str(learner): DELAYS.format(law) for learner, law in case.own.items()},
        "seed": seeds[0],
        "repeats": len(seeds),
        "update_time_range": [_finite(min(times)), _finite(max(times))],
        "report": None,
    }


def _medians(timings: Sequence[Timing]) -> dict[str, Any]:
    """Each number's median, whole numbers staying whole; None for one that is not finite."""
    columns = [asdict(timing) for timing in timings]
    found: dict[str, Any] = {}
    for key in columns[0]:
        values = [column[key] for column in columns]
        whole = all(isinstance(value, int) for value in values)
        found[key] = statistics.median_low(values) if whole else _finite(statistics.median(values))
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
