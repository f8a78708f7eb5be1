"""Speed of the timing simulation, beside the same model written in SimPy.

P = 64, K = 8, exponential delays; mini-batches applied per second. ``ours`` is compiled by numba
where a cell has a compiled loop, ``plain`` is without numba. Bounds: 100 times SimPy for the cells
that cancel, 10 times for the others. Compiling is not counted: the rows of the table ``start`` say
how long a new process takes for its first simulations, when numba compiles and when it finds what
it has compiled before.

The tables ``learners`` and ``updates`` show what a simulation costs against P and against its
length, and the memory it needs at its peak beyond what it began with, in MiB. They are drawn, too,
to the file that ``--png`` names.

    python benchmarks/simulation.py --json
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import simpy
from common import load, parser, report
from simulation_plot import draw

from gruppetto.delays import Exponential, KeyedDelays
from gruppetto.protocols import PROTOCOLS
from gruppetto.theory.timing import simulate
from gruppetto.theory.timing_draws import BLOCK

LEARNERS, K = 64, 8
BOUNDS = {"k-sync": 100, "k-batch-sync": 100, "k-async": 10, "k-batch-async": 10}
#: Updates of ours, plain and SimPy's: each takes a good tenth of a second.
LENGTHS = {
    "k-sync": (40_000, 40_000, 300),
    "k-batch-sync": (30_000, 5_000, 300),
    "k-async": (50_000, 5_000, 1_500),
    "k-batch-async": (80_000, 10_000, 1_500),
}

Process = Generator[simpy.Event, Any, None]


class Peer:
    """The K-family in SimPy: learners are processes, the server takes pushes from a store."""

    def __init__(self, cell: str, num_learners: int, k: int, num_updates: int) -> None:
        protocol = PROTOCOLS.parse(f"{cell}:k={k}")
        self.cell, self.k, self.num_updates = protocol.cell, k, num_updates
        self.environment = simpy.Environment()
        self.pushes = simpy.Store(self.environment)
        self.updated = self.environment.event()
        self.version = 0
        self.total_staleness = 0
        self.random = random.Random(0)
        self.learners = [self.environment.process(self.learner(p)) for p in range(num_learners)]

    def run(self) -> float:
        """Seconds per update."""
        self.environment.run(self.environment.process(self.server()))
        return float(self.environment.now) / self.num_updates

    def learner(self, number: int) -> Process:
        while True:
            version = self.version
            try:
                yield self.environment.timeout(self.random.expovariate(1.0))
                yield self.pushes.put((number, version))
                if self.cell.distinct:
                    yield self.updated
            except simpy.Interrupt:
                pass

    def server(self) -> Process:
        while self.version < self.num_updates:
            held = set()
            for _ in range(self.k):
                number, version = yield self.pushes.get()
                held.add(number)
                self.total_staleness += self.version - version
            self.version += 1
            updated, self.updated = self.updated, self.environment.event()
            updated.succeed()
            if self.cell.cancels:
                for number, process in enumerate(self.learners):
                    if not self.cell.distinct or number not in held:
                        process.interrupt()


def ours(
    cell: str, num_learners: int, num_updates: int, compiled: bool | None, k: int = K
) -> float:
    """Seconds per update."""
    delays = KeyedDelays(0, Exponential(mean=1.0), {}, num_learners)
    protocol = PROTOCOLS.parse(f"{cell}:k={k}")
    return simulate(protocol, delays, num_learners, num_updates, compiled=compiled).mean_update_time


def seconds(work: Callable[[], float]) -> tuple[float, float]:
    """How long it took, and what came out."""
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, found


def beside_simpy(cell: str, repeats: int) -> dict[str, Any]:
    """All three in turns, so that they meet the same load."""
    lengths = LENGTHS[cell]
    rates: tuple[list[float], list[float], list[float]] = ([], [], [])
    update_times: list[float] = []
    for _ in range(repeats):
        update_times.clear()
        for rate, work, length in zip(
            rates,
            (
                lambda: ours(cell, LEARNERS, lengths[0], True),
                lambda: ours(cell, LEARNERS, lengths[1], False),
                lambda: Peer(cell, LEARNERS, K, lengths[2]).run(),
            ),
            lengths,
            strict=True,
        ):
            taken, update_time = seconds(work)
            rate.append(K * length / taken)
            update_times.append(update_time)
    fast, plain, peer = (statistics.median(rate) for rate in rates)
    return {
        "table": "simpy",
        "cell": cell,
        "ours": fast,
        "plain": plain,
        "simpy": peer,
        "ratio": fast / peer,
        "ratio_plain": plain / peer,
        "bound": BOUNDS[cell],
        "ours_update_time": update_times[0],
        "simpy_update_time": update_times[2],
    }


def cost(cell: str, num_learners: int, k: int, num_updates: int, table: str) -> dict[str, Any]:
    """One row of the tables of costs."""
    taken, _ = seconds(lambda: ours(cell, num_learners, num_updates, None, k))
    tracemalloc.start()
    ours(cell, num_learners, min(num_updates, 20_000), None, k)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return {
        "table": table,
        "cell": cell,
        "learners": num_learners,
        "k": k,
        "updates": num_updates,
        "us_per_update": 1e6 * taken / num_updates,
        "us_per_mini_batch": 1e6 * taken / (num_updates * k),
        "peak_mib": peak,
    }


def start() -> list[dict[str, Any]]:
    """A new process: three short compiled simulations, without and with a cache."""
    code = "from simulation import ours, BOUNDS\nfor cell in BOUNDS: ours(cell, 64, 10, True)"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        for cache in ("empty", "filled"):
            taken, _ = seconds(
                lambda: (
                    subprocess.run(
                        [sys.executable, "-c", code], check=True, env=environment
                    ).returncode
                )
            )
            rows.append({"table": "start", "cache": cache, "seconds": taken})
    return rows


def main() -> None:
    options = parser(__doc__)
    default = Path(__file__).with_suffix(".png")
    options.add_argument("--png", type=Path, default=default, metavar="FILE",
                         help="where costs are drawn [beside this file]")  # fmt: skip
    arguments = options.parse_args()
    before = load()
    rows = start()
    for cell in BOUNDS:
        ours(cell, LEARNERS, 100, True)
        rows.append(beside_simpy(cell, arguments.repeats))
    for cell in BOUNDS:
        for num_learners in (64, 640, 2_000, 10_000):
            jobs = num_learners if cell.endswith("-sync") else num_learners // 8
            updates = max(1, 3_000_000 // jobs // BLOCK) * BLOCK  # draws come in blocks
            rows.append(cost(cell, num_learners, num_learners // 8, updates, "learners"))
    for cell in BOUNDS:
        for updates in (1_000, 10_000, 100_000, 1_000_000):
            rows.append(cost(cell, LEARNERS, K, updates, "updates"))
    report(rows, before, arguments.json)
    drawn = draw(rows, arguments.png)
    if not arguments.json:
        print(f"drawn: {drawn}")


if __name__ == "__main__":
    main()
