"""Seconds per update: predicted, and measured with real processes.

Digits, P = 8 learners, mini-batches of 16, delays of 0.1 s in the mean so that computing is small
beside them, five protocols, three laws, three repeats (seeds 0, 1, 2), runs of about 12 seconds.
Each run is held against two predictions:

* `expected_update_time` of its own result: the same protocol over the delays it really drew.
  Where the protocol cancels, nothing is random about it: what differs is what computing, messages
  and this machine cost. Where it goes on, the run is simulated, and may part from that by chance.
  For computing there is a third number, by the same way: each draw longer by the mean seconds that
  the learners of this run spent loading and computing, from the `work` rows of its trace.
* the law alone, beforehand: the closed form where there is one, and where 90 % of runs of as many
  updates come to lie, from 200 simulated ones with other seeds.

Runs with real processes want the machine for themselves; the load before and after is kept. Under
real-time priority other work does not delay them, as if they were alone.

    python experiments/prediction.py                # 10 minutes; goes on where it was stopped
    python experiments/prediction.py --repeats 1
    chrt --fifo 1 python experiments/prediction.py --out real_time.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gruppetto as gp
from gruppetto.delays import DELAYS, KeyedDelays
from gruppetto.protocols import PROTOCOLS, Coordinator
from gruppetto.runs.expected import RoundTimes
from gruppetto.theory import update_time
from gruppetto.theory.timing import Delays, simulate
from gruppetto.trace import Trace, read_trace

PROTOCOL_SPECS = (
    "hardsync",
    "k-sync:k=6",
    "k-batch-sync:k=6",
    "k-async:k=4",
    "k-batch-async:k=4",
)
LAWS = (
    "exponential:mean=0.1",
    "shifted-exponential:shift=0.05,mean=0.05",
    "pareto:shape=2.5,scale=0.06",
)
LEARNERS = 8
#: A run has as many updates as take about so long.
RUN_SECONDS = 12.0
#: Seeds of simulations, far from those of runs.
FIRST_SIMULATED_SEED = 1_000
GOAL = 0.05


def simulated(protocol: str, law: str, learners: int, updates: int, seed: int) -> float:
    """Seconds per update in one simulated run."""
    delays = KeyedDelays(seed, DELAYS.parse(law), {}, learners)
    return simulate(PROTOCOLS.parse(protocol), delays, learners, updates).mean_update_time


class Longer:
    """Delays that all take some seconds more."""

    def __init__(self, delays: Delays, more: float) -> None:
        self._delays = delays
        self._more = more

    def draw(self, slot: int, n: int) -> float:
        return self._delays.draw(slot, n) + self._more


def predict(
    protocol: str, law: str, learners: int, run_seconds: float, *, num_simulated: int = 200,
    long: int = 100_000,
) -> dict[str, Any]:  # fmt: skip
    """What is known of a run before it starts, from the law alone."""
    exact = update_time(PROTOCOLS.parse(protocol), DELAYS.parse(law), learners)
    long_run = simulated(protocol, law, learners, long, FIRST_SIMULATED_SEED)
    updates = max(4, round(run_seconds / long_run))
    runs = [
        simulated(protocol, law, learners, updates, FIRST_SIMULATED_SEED + n)
        for n in range(num_simulated)
    ]
    low, middle, high = (float(q) for q in np.quantile(runs, (0.05, 0.5, 0.95)))
    return {
        "protocol": protocol, "law": law, "updates": updates, "kind": exact.kind,
        "theory": exact.seconds, "long_run": long_run, "low": low, "middle": middle, "high": high,
    }  # fmt: skip


def told(protocol: str, delays: Delays, learners: int, trace: Trace) -> float:
    """Seconds per update of a run by delays: of the draws it took, or simulated."""
    parsed = PROTOCOLS.parse(protocol)
    if not parsed.cell.cancels:
        return simulate(parsed, delays, learners, len(trace.updates)).mean_update_time
    coordinator = Coordinator(parsed, range(learners), None)
    rounds = RoundTimes(delays, coordinator, learners)
    for row in trace.events:
        event = row.decode()
        rounds.take(event, coordinator.handle(event))
    assert rounds.mean is not None
    return rounds.mean


def measure(protocol: str, law: str, learners: int, updates: int, seed: int) -> dict[str, Any]:
    """One run with real processes."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run = gp.train(
            "digits", engine="local", protocol=protocol, learners=learners, batch_size=16,
            updates=updates, delay=law, seed=seed, evaluate="off", out=Path(folder) / "run",
            progress=False,
        )  # fmt: skip
        trace = read_trace(Path(folder) / "run" / "trace")
    result, work = run.result, trace.work
    computing = statistics.mean(w.loading + w.computing for w in work if w.outcome == "pushed")
    delays = Longer(KeyedDelays(seed, DELAYS.parse(law), {}, learners), computing)
    longer = told(protocol, delays, learners, trace)
    return {
        "protocol": protocol, "law": law, "seed": seed, "updates": result["updates"],
        "measured": result["mean_update_time"], "by_draws": result["expected_update_time"],
        "ratio": result["mean_update_time"] / result["expected_update_time"],
        "computing": computing, "by_draws_and_computing": longer,
        "cores": result["cores"], "load_before": before, "load_after": os.getloadavg()[0],
        "is_real_time": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
    }  # fmt: skip


def summarise(
    predictions: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row per protocol and law."""
    rows = []
    for said in predictions:
        mine = [r for r in runs if (r["protocol"], r["law"]) == (said["protocol"], said["law"])]
        ratios = [r["ratio"] for r in mine]
        measured = [r["measured"] for r in mine]
        rows.append(
            {"protocol": said["protocol"], "law": said["law"], "updates": said["updates"],
             "measured": statistics.median(measured),
             "by_draws": statistics.median(r["by_draws"] for r in mine),
             "ratio": statistics.median(ratios), "ratio_low": min(ratios),
             "ratio_high": max(ratios), "excess_ms": 1000 * statistics.median(
                 r["measured"] - r["by_draws"] for r in mine),
             "computing": statistics.median(r["computing"] for r in mine),
             "with_computing": statistics.median(
                 r["measured"] / r["by_draws_and_computing"] for r in mine),
             "met": abs(statistics.median(ratios) - 1) <= GOAL, "long_run": said["long_run"],
             "low": said["low"], "high": said["high"],
             "to_long_run": statistics.median(measured) / said["long_run"],
             "inside": sum(said["low"] <= m <= said["high"] for m in measured),
             "repeats": len(mine)}
        )  # fmt: skip
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/prediction.md."""
    lines = [
        "| law | protocol | updates | measured, ms | by the draws, ms | ratio, median (range) "
        "| computing, ms | ratio with computing | by the law, ms (90 % of runs) | inside |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        ratio = f"{r['ratio']:.3f} ({r['ratio_low']:.3f} to {r['ratio_high']:.3f})"
        ratio = ratio if r["met"] else f"**{ratio}**"
        law = f"{1000 * r['long_run']:.1f} ({1000 * r['low']:.1f} to {1000 * r['high']:.1f})"
        lines.append(
            f"| {r['law'].split(':')[0]} | `{r['protocol']}` | {r['updates']} | "
            f"{1000 * r['measured']:.1f} | {1000 * r['by_draws']:.1f} | {ratio} | "
            f"{1000 * r['computing']:.1f} | {r['with_computing']:.3f} | {law} | "
            f"{r['inside']} of {r['repeats']} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args(argv)
    found: dict[str, Any] = {"predictions": [], "runs": []}
    if arguments.out.exists():
        found = json.loads(arguments.out.read_text())
    said = {(p["protocol"], p["law"]): p for p in found["predictions"]}
    for law in LAWS:
        for protocol in PROTOCOL_SPECS:
            if (protocol, law) not in said:
                said[protocol, law] = predict(protocol, law, LEARNERS, RUN_SECONDS)
    there = {(r["protocol"], r["law"], r["seed"]) for r in found["runs"]}
    for seed in range(arguments.repeats):
        for (protocol, law), prediction in said.items():
            if (protocol, law, seed) in there:
                continue
            run = measure(protocol, law, LEARNERS, prediction["updates"], seed)
            found["runs"].append(run)
            print(f"{law:42} {protocol:18} seed {seed}: {1000 * run['measured']:6.1f} ms, "
                  f"ratio {run['ratio']:.3f}, load {run['load_before']:.1f} to "
                  f"{run['load_after']:.1f}", flush=True)  # fmt: skip
            write(arguments.out, list(said.values()), found["runs"])
    print(as_table(summarise(list(said.values()), found["runs"])))


def write(
    path: Path, predictions: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]
) -> None:
    """JSON with a line per prediction and run."""
    parts = {"predictions": predictions, "runs": runs}
    text = ",\n".join(
        f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for key, rows in parts.items()
    )
    path.write_text("{" + text + "}\n")


if __name__ == "__main__":
    main()
