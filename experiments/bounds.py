"""What does a bound on staleness do when one learner of eight is twenty times slower?

Digits, 8 learners, mini-batches of 16, SGD with momentum 0.9 at hardsync's rate; exponential delays
of mean 1, learner 7 of mean 20, in virtual time. Plain async beside the bounds, each with s = 7,
the smallest with which everybody may be under way, and with a tighter or a wider one; hardsync and
k-batch-sync as controls. To reach 95 % test accuracy, evaluated every tenth of an epoch; medians of
three seeds. A run that does not reach it within 10 epochs has no time.

    python experiments/bounds.py                                    # a few minutes
    python experiments/bounds.py --out experiments/bounds.json      # the same, and keep the numbers
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

SETTINGS: dict[str, Any] = {
    "task": "digits",
    "learners": 8,
    "batch_size": 16,
    "epochs": 10,
    "optimizer": "sgd:lr=0.1,momentum=0.9",
    "delay": "exponential:mean=1",
    "slow": "exponential:mean=20",
    "target": 0.95,
    "evaluate_every": 0.1,
    "modulations": ["none", "inverse-mean:cap=true"],
    "protocols": [
        "hardsync",
        "k-batch-sync:k=4",
        "async",
        "async:max_staleness=7,on_stale=discard",
        "async:max_staleness=21,on_stale=discard",
        "ringmaster:r=4",
        "ringmaster:r=8",
        "ringmaster:r=22",
        "async:max_staleness=7,on_stale=wait",
        "async:max_staleness=21,on_stale=wait",
        "ssp:s=0",
        "ssp:s=3",
        "ssp:s=10",
    ],
    "seeds": [0, 1, 2],
}


def measure(settings: dict[str, Any], protocol: str, modulation: str, seed: int) -> dict[str, Any]:
    """One run, and what it cost; a run that diverges has no time and no accuracy."""
    learners = settings["learners"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = gp.train(
                settings["task"],
                engine="virtual",
                protocol=protocol,
                modulation=modulation,
                learners=learners,
                batch_size=settings["batch_size"],
                epochs=settings["epochs"],
                optimizer=settings["optimizer"],
                delay=settings["delay"],
                delays={learners - 1: settings["slow"]},
                evaluate_every=settings["evaluate_every"],
                seed=seed,
                out=Path(folder) / "run",
                progress=False,
            )
            result, history = run.result, run.history
        except gp.Diverged as error:
            result, history = error.result, []
    reached = [row["time"] for row in history if row["test_accuracy"] >= settings["target"]]
    applied, lost = result["mini_batches_applied"], result["mini_batches_cancelled"]
    lost += result["mini_batches_discarded"]
    return {
        "protocol": protocol,
        "modulation": modulation,
        "seed": seed,
        "time_to_target": reached[0] if reached else None,
        "test_accuracy": history[-1]["test_accuracy"] if history else None,
        "time": result["time"],
        "mean_staleness": result["mean_staleness"],
        "max_staleness": result["max_staleness"],
        "lost_share": lost / (applied + lost) if applied + lost else 0.0,
        "without_contribution": result["learners_without_contribution"],
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the seeds: medians, and lowest and highest time; None where a run did not get there."""
    found = []
    for protocol, modulation in dict.fromkeys((r["protocol"], r["modulation"]) for r in rows):
        mine = [r for r in rows if (r["protocol"], r["modulation"]) == (protocol, modulation)]
        times = sorted(r["time_to_target"] or float("inf") for r in mine)
        accuracies = [r["test_accuracy"] for r in mine if r["test_accuracy"] is not None]
        found.append(
            {
                "protocol": protocol,
                "modulation": modulation,
                "times": [None if t == float("inf") else t for t in times],
                "reached": sum(r["time_to_target"] is not None for r in mine),
                "runs": len(mine),
                "test_accuracy": statistics.mean(accuracies) if accuracies else None,
                "time": statistics.median(r["time"] for r in mine),
                "mean_staleness": statistics.mean(r["mean_staleness"] for r in mine),
                "max_staleness": max(r["max_staleness"] for r in mine),
                "lost_share": statistics.mean(r["lost_share"] for r in mine),
                "slow_contributes": sum(not r["without_contribution"] for r in mine),
            }
        )
    return found


def as_table(summary: Sequence[dict[str, Any]], modulation: str) -> str:
    """One modulation's rows in Markdown; times are the median, lowest and highest of the seeds."""
    lines = [
        "| protocol | time to target | time of 10 epochs | accuracy | staleness, mean and max "
        "| lost | learner 7 contributes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in summary:
        if row["modulation"] != modulation:
            continue
        times = [f"{t:.0f}" if t is not None else "never" for t in row["times"]]
        accuracy = "diverged" if row["test_accuracy"] is None else f"{row['test_accuracy']:.3f}"
        lines.append(
            f"| `{row['protocol']}` | {times[len(times) // 2]} ({times[0]} to {times[-1]}) | "
            f"{row['time']:.0f} | {accuracy} | {row['mean_staleness']:.2f}, "
            f"{row['max_staleness']} | {100 * row['lost_share']:.0f} % | "
            f"{row['slow_contributes']} of {row['runs']} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    arguments = parser.parse_args(words)
    rows = [
        measure(SETTINGS, protocol, modulation, seed)
        for protocol in SETTINGS["protocols"]
        for modulation in SETTINGS["modulations"]
        for seed in SETTINGS["seeds"]
    ]
    for modulation in SETTINGS["modulations"]:
        print(f"modulation {modulation}\n\n{as_table(summarise(rows), modulation)}\n")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"settings": SETTINGS, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
