"""Cost of the coordinator per mini-batch: events in, commands out, nothing else.

Bound: 20 µs per mini-batch leased (a cancelled one is leased again). Beside it, as a yardstick on
the same machine in the same run, the time that the standard library's ``json`` takes for one event
of four numbers, out and back.

    python benchmarks/coordinator.py --json
"""

from __future__ import annotations

import heapq
import json
import random
import time

from common import load, median_of, parser, report

from gruppetto.protocols import PROTOCOLS, Coordinator
from gruppetto.protocols.messages import Cancel, Compute, Event, GradientPushed, LearnerJoined
from gruppetto.staleness import InverseMean

PROTOCOL_SPECS = ("hardsync", "k-sync:k=15", "k-batch-sync:k=15", "k-async:k=15",
                  "k-batch-async:k=15", "async")  # fmt: skip
BOUND = 20.0


def cost(spec: str, num_learners: int, num_mini_batches: int) -> dict[str, float]:
    """µs per leased and per applied mini-batch, with exponential delays."""
    coordinator = Coordinator(
        PROTOCOLS.parse(spec),
        range(num_learners),
        num_mini_batches,
        modulation=InverseMean(cap=True),
    )
    rng = random.Random(0)
    agenda: list[tuple[float, int, Compute]] = []
    cancelled: set[int] = set()
    now = spent = 0.0

    def send(event: Event) -> None:
        nonlocal spent
        begin = time.perf_counter()
        commands = coordinator.handle(event)
        spent += time.perf_counter() - begin
        for command in commands:
            if isinstance(command, Compute):
                heapq.heappush(agenda, (now + rng.expovariate(1.0), command.lease, command))
            elif isinstance(command, Cancel):
                cancelled.add(command.lease)

    for learner in range(num_learners):
        send(LearnerJoined(learner))
    while coordinator.finished is None:
        now, lease, compute = heapq.heappop(agenda)
        if lease not in cancelled:
            send(GradientPushed(lease, compute.version, 1.0, 16))
    begin = time.perf_counter()
    for lease in range(2000):
        json.loads(json.dumps({"lease": lease, "version": 3, "loss": 0.1, "num_samples": 16}))
    yardstick = (time.perf_counter() - begin) / 2000
    leased = num_mini_batches + coordinator.num_cancelled
    return {
        "ours_us": 1e6 * spent / leased,
        "per_applied_us": 1e6 * spent / num_mini_batches,
        "json_round_trip_us": 1e6 * yardstick,
    }


def main() -> None:
    arguments = parser(__doc__).parse_args()
    before = load()
    rows = []
    for spec in PROTOCOL_SPECS:
        for num_learners in (30, 300):
            figures = median_of(
                arguments.repeats, lambda s=spec, p=num_learners: cost(s, p, 20 * p)
            )
            rows.append(
                {
                    "protocol": spec,
                    "learners": num_learners,
                    **figures,
                    "ratio": figures["ours_us"] / figures["json_round_trip_us"],
                    "bound_us": BOUND,
                }
            )
    report(rows, before, arguments.json)


if __name__ == "__main__":
    main()
