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

import numpy as np
import numpy.typing as npt

from gruppetto.delays import DELAYS, Delay, KeyedDelays
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS, Cell, Protocol
from gruppetto.protocols.bounded import UNBOUNDED
from gruppetto.runs.progress import Progress
from gruppetto.runs.seconds import load_delay
from gruppetto.theory.runtime import update_time
from gruppetto.theory.timing import Timing, check_simulated, simulate_counting

__all__ = ["simulate_all", "swept_protocols"]

#: Jobs, about, from which on a progress bar is worth showing.
_MANY_JOBS: Final = 1_000_000
#: (distinct, cancels) -> the protocol that a cell is called by.
_CELLS: Final = {
    (True, True): "k-sync",
    (False, True): "k-batch-sync",
    (True, False): "k-async",
    (False, False): "k-batch-async",
}
#: Values of K in a sweep.
_SWEPT: Final = 8
#: Updates, and delays, that a share of cancelled work is estimated from.
_WORK_UPDATES: Final = 2_000
_WORK_JOBS: Final = 500_000


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
    sweep: bool = False,
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
        sweep: besides, all of :func:`swept_protocols` for each number of learners.
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
    for num_learners in learners:
        if num_learners < 1:
            raise InvalidSetting(f"learners: expected at least 1, got {num_learners}")
    pairs = list(itertools.product(protocols, learners))
    if sweep:
        pairs += [(name, number) for number in learners for name in swept_protocols(number)]
    cases = [
        _Case(PROTOCOLS.parse(protocol), num_learners, law, own)
        for protocol, num_learners in dict.fromkeys(pairs)
    ]
    for case in cases:
        check_simulated(case.protocol, case.num_learners)
        case.delays(seed)
    jobs = [updates * case.jobs_per_update for case in cases]
    if progress is None and repeats * sum(jobs) < _MANY_JOBS:
        progress = False
    with Progress("simulate", repeats * updates * len(cases), progress) as bar:
        return [
            _record(case, updates, range(seed, seed + repeats), bar, number * repeats * updates)
            for number, case in enumerate(cases)
        ]


def swept_protocols(num_learners: int) -> list[str]:
    """The four cells, each with up to eight K from 1 to P, evenly spaced in their logarithms.

    >>> [name.partition("=")[2] for name in swept_protocols(20) if name.startswith("k-sync")]
    ['1', '2', '4', '6', '8', '13', '20']
    >>> len(swept_protocols(4))
    16
    """
    steps = [num_learners ** (n / (_SWEPT - 1)) for n in range(_SWEPT)]
    if num_learners <= _SWEPT:
        steps = [float(k) for k in range(1, num_learners + 1)]
    return [f"{cell}:k={k}" for cell in _CELLS.values() for k in dict.fromkeys(map(round, steps))]


def _record(
    case: _Case, updates: int, seeds: Sequence[int], bar: Progress, done: int
) -> dict[str, Any]:
    """One case, all of its repeats; ``done`` updates of other cases are behind us."""
    timings, histograms = [], []
    for number, seed in enumerate(seeds):
        before = done + number * updates

        def show(made: int, time: float, before: int = before) -> None:
            bar.advance(before + made, made, time)

        timing, histogram = simulate_counting(
            case.protocol, case.delays(seed), case.num_learners, updates, progress=show
        )
        timings.append(timing)
        histograms.append(histogram)
    expected = update_time(case.protocol, case.law, case.num_learners, laws=case.own)
    times = [timing.mean_update_time for timing in timings]
    return {
        "protocol": PROTOCOLS.format(case.protocol),
        "learners": case.num_learners,
        **_medians(timings),
        "expected_update_time": expected.seconds,
        "expected_is": expected.kind,
        "expected_why": expected.why,
        "cell": _cell_name(case.protocol.cell),
        "is_bounded": case.protocol.bound is not UNBOUNDED,
        "k": case.protocol.num_to_wait(case.num_learners),
        "cancelled_time_fraction": _cancelled_share(case, seeds[0], timings),
        "staleness_histogram": _pooled(histograms),
        "delay": DELAYS.format(case.law),
        "delays": {str(learner): DELAYS.format(law) for learner, law in case.own.items()},
        "seed": seeds[0],
        "repeats": len(seeds),
        "update_time_range": [_finite(min(times)), _finite(max(times))],
        "report": None,
        "png": None,
    }


def _cell_name(cell: Cell) -> str:
    return _CELLS[cell.distinct, cell.cancels]


def _pooled(histograms: Sequence[npt.NDArray[np.int64]]) -> list[int]:
    """Contributions per staleness over all repeats."""
    total = np.zeros(max(map(len, histograms)), dtype=np.int64)
    for histogram in histograms:
        total[: len(histogram)] += histogram
    return [int(count) for count in total]


def _cancelled_share(case: _Case, seed: int, timings: Sequence[Timing]) -> float:
    """Share of the learners' time that goes into mini-batches that are cancelled, or discarded.

    Under a bound it is what the simulations counted.
    In k-sync each of the P - K that are cancelled has computed from one update to the next. In
    k-batch-sync the rest is what did not go into the K applied, estimated from updates of its own.
    """
    cell, p = case.protocol.cell, case.num_learners
    k = case.protocol.num_to_wait(p)
    if not cell.cancels:
        shares = [t.lost_time / (p * t.total_time) for t in timings if t.total_time > 0.0]
        return statistics.median(shares or [0.0])
    if cell.distinct:
        return (p - k) / p
    rng = np.random.default_rng(seed)
    width = math.ceil(k / p) + 2  # mini-batches of each learner that are drawn at a time
    rounds = max(20, min(_WORK_UPDATES, _WORK_JOBS // (p * width)))
    seconds = np.empty((rounds, p, 0))
    while True:
        uniforms = rng.uniform(2.0**-53, 1.0, size=(p, rounds * width))
        more = [case.own.get(i, case.law).quantile(uniforms[i]) for i in range(p)]
        more_seconds = np.stack([each.reshape(rounds, width) for each in more], axis=1)
        seconds = np.concatenate([seconds, more_seconds], axis=2)
        ends = np.cumsum(seconds, axis=2)
        flat = ends.reshape(rounds, -1)
        first = np.argpartition(flat, k - 1, axis=1)[:, :k]
        fires = np.take_along_axis(flat, first, axis=1).max(axis=1)
        # Nobody had more to do by then than was drawn.
        if seconds.shape[2] >= k or (ends[:, :, -1].min(axis=1) >= fires).all():
            break
    total = p * float(fires.sum())
    useful = float(np.take_along_axis(seconds.reshape(rounds, -1), first, axis=1).sum())
    return max(0.0, 1.0 - useful / total) if total > 0.0 and math.isfinite(total) else 0.0


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
