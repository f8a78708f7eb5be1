"""Does the guard stop what diverges, early, and leave alone what does not?

Every run of a grid of tasks, learners, protocols, modulations and rates goes to its end without
a guard; then its losses are folded, as the coordinator folds them, with guards of several factors.
A run has *trained* when its last 50 losses are below half of the loss at the start on average, and
*failed* when they are not below that of the start or gradients were not finite; the rest is
between. Virtual time, exponential delays, one seed. The control: no guard may stop what trains.

    python experiments/guard.py --out experiments/guard.json                 # about 4 minutes
    python experiments/guard.py --data DIR --out experiments/guard.json      # and ResNet-8, 4 more
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gruppetto as gp
from gruppetto.protocols import PROTOCOLS, LossGuard
from gruppetto.protocols.guard import LossWatch
from gruppetto.protocols.messages import GradientPushed
from gruppetto.trace import read_trace

FACTORS = (1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
SAFE = "inverse-mean:cap=true"
STALE = [("async", "none"), ("async", SAFE)]
BATCHES = [("k-batch-async:k=4", "none"), ("k-batch-async:k=4", SAFE)]
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {
        "tasks": ["digits", "digits:batchnorm=true", "digits:standardise=false"],
        "learners": [4, 16],
        "rules": [("hardsync", "none"), *BATCHES, *STALE],
        "optimizers": [f"sgd:lr={rate},momentum=0.9" for rate in (0.05, 0.1, 0.2, 0.5, 1.0)],
        "batch_size": 16,
        "epochs": 5,
    },
    "least-squares": {
        "tasks": ["least-squares"],
        "learners": [1, 4, 16],
        "rules": [("hardsync", "none"), *STALE],
        "optimizers": [f"sgd:lr={rate}" for rate in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)]
        + [f"sgd:lr={rate},momentum=0.9" for rate in (0.02, 0.05, 0.1)]
        + ["adam:lr=0.1", "adam:lr=1"],
        "batch_size": 10,
        "epochs": 10,
    },
    "cifar10": {
        "tasks": ["cifar10"],
        "learners": [8],
        "rules": [("hardsync", "none"), *STALE],
        "optimizers": [f"sgd:lr={rate},momentum=0.9" for rate in (0.05, 0.2, 1.0)],
        "model": "resnet8",
        "batch_size": 32,
        "epochs": 0.16,
        "evaluate": "off",
    },
}


def losses_of(task: str, **options: Any) -> tuple[list[tuple[float, int, int]], str]:
    """(loss, samples, staleness) of each gradient of a run without a guard; how the run ended."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            result = gp.train(
                task, guard="off", delay="exponential:mean=1", engine="virtual", seed=0, out=out,
                progress=False, **options,
            ).result  # fmt: skip
        except gp.Diverged as error:
            result = error.result
        events = [row.decode() for row in read_trace(out / "trace").events]
    # What is told of staleness does not matter here.
    pushed = [(e.loss, e.num_samples, 0) for e in events if isinstance(e, GradientPushed)]
    return pushed, str(result["stopped_by"])


def tripped_at(pushed: Sequence[tuple[float, int, int]], watch: LossWatch) -> int | None:
    """The gradient at which a guard ends the run; None if it does not."""
    return next((i for i, each in enumerate(pushed) if watch.add(*each)), None)


def judge(task: str, learners: int, protocol: str, **options: Any) -> dict[str, Any]:
    """One run, and what each guard makes of it."""
    pushed, stopped_by = losses_of(task, learners=learners, protocol=protocol, **options)
    k = PROTOCOLS.parse(protocol).most_to_wait(learners)
    trips = {f: tripped_at(pushed, LossWatch(LossGuard(f), learners, k)) for f in FACTORS}
    watch = LossWatch(LossGuard(), learners, k)
    start = next(watch.start for each in pushed if watch.add(*each) or watch.start is not None)
    assert start is not None
    end = statistics.fmean(min(loss, 1e12) for loss, *_ in pushed[-50:])
    outcome = "between"
    if stopped_by == "diverged" or end >= start:
        outcome = "failed"
    elif end < 0.5 * start:
        outcome = "trained"
    return {
        "task": task, "learners": learners, "protocol": protocol,
        "modulation": options["modulation"], "optimizer": options["optimizer"],
        "stopped_by": stopped_by, "outcome": outcome, "gradients": len(pushed), "start": start,
        "highest": max(loss for loss, *_ in pushed), "end": end,
        "tripped_at": {str(factor): at for factor, at in trips.items()},
    }  # fmt: skip


def grid(settings: dict[str, Any], data: Path | None = None) -> list[dict[str, Any]]:
    """Judge every combination."""
    kept = ("batch_size", "epochs", "model", "evaluate")
    same = {key: settings[key] for key in kept if key in settings}
    if data is not None:
        same["data"] = data
    return [
        judge(task, learners, protocol, modulation=modulation, optimizer=optimizer, **same)
        for task in settings["tasks"]
        for learners in settings["learners"]
        for protocol, modulation in settings["rules"]
        for optimizer in settings["optimizers"]
    ]


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per factor: how many of each outcome are stopped, and how soon those that failed are."""
    table = []
    for factor in map(str, FACTORS):
        row: dict[str, Any] = {"factor": float(factor)}
        for outcome in ("trained", "between", "failed"):
            of = [r for r in rows if r["outcome"] == outcome]
            row[outcome] = len(of)
            row[f"{outcome}_stopped"] = sum(r["tripped_at"][factor] is not None for r in of)
        high = [r for r in rows if r["outcome"] == "failed" and r["highest"] > 20 * r["start"]]
        row["far_off"] = len(high)
        row["far_off_stopped"] = sum(r["tripped_at"][factor] is not None for r in high)
        spent = [
            r["tripped_at"][factor] / r["gradients"]
            for r in rows
            if r["outcome"] == "failed" and r["stopped_by"] != "diverged"
            and r["tripped_at"][factor] is not None
        ]  # fmt: skip
        row["median_spent"] = statistics.median(spent) if spent else None
        table.append(row)
    return table


def as_table(summary: Sequence[dict[str, Any]]) -> str:
    """For people."""
    lines = ["factor  trained: stopped  between: stopped  failed: stopped  spent by then, median"]
    lines += [
        f"{r['factor']:6g}  {r['trained_stopped']:8} of {r['trained']:3}"
        f"  {r['between_stopped']:8} of {r['between']:3}"
        f"  {r['failed_stopped']:7} of {r['failed']:3}"
        + ("" if r["median_spent"] is None else f"  {r['median_spent']:8.1%} of the gradients")
        for r in summary
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="also ResNet-8, on CIFAR-10 there")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    arguments = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    for name, settings in SETTINGS.items():
        if name == "cifar10" and arguments.data is None:
            continue
        made = grid(settings, arguments.data if name == "cifar10" else None)
        print(f"\n{name}, {len(made)} runs\n{as_table(summarise(made))}", flush=True)
        rows += made
    print(f"\nall, {len(rows)} runs\n{as_table(summarise(rows))}")
    if arguments.out is not None:
        content = {"settings": SETTINGS, "summary": summarise(rows), "runs": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
