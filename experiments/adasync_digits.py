"""Does AdaSync keep the speed of a small K and the error of a large one? Digits, virtual time.

8 learners, mini-batches of 16, plain SGD, exponential delays of mean 1 s, 160 s of virtual time for
every run. AdaSync with K0 = 1 and an interval of 5 s over k-sync and over k-batch-async, against
K = 2, 4, 8 of the same cell; one rate for all, without modulation. Reported over the seeds: when an
evaluated version first reached 95 % (test), the test loss at the end, and its mean over time, for
which a curve must be low all along.

    python experiments/adasync_digits.py                       # 3 seeds, about 1 minute
    python experiments/adasync_digits.py --out experiments/adasync_digits.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gruppetto as gp

CELLS = ("k-sync", "k-batch-async")
FIXED = (2, 4, 8)
SETTINGS: dict[str, Any] = {
    "learners": 8,
    "batch_size": 16,
    "optimizer": "sgd:lr=0.1",
    "modulation": "none",
    "delay": "exponential:mean=1",
    "max_time": 160.0,
    "evaluate_every": 0.25,
}
INTERVAL = 5.0
TARGET = 0.95


def protocols(cell: str) -> list[str]:
    """AdaSync over a cell, and what it is compared with."""
    adaptive = f"adasync:over={cell},k0=1,interval={INTERVAL}"
    return [adaptive, *(f"{cell}:k={k}" for k in FIXED)]


def measure(protocol: str, seed: int, **changes: Any) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        run = gp.train(
            "digits",
            protocol=protocol,
            seed=seed,
            engine="virtual",
            out=Path(folder) / "run",
            progress=False,
            **{**SETTINGS, **changes},
        )
    times = [row["time"] for row in run.history]
    losses = [row["test_loss"] for row in run.history]
    reached = [row["time"] for row in run.history if (row["test_accuracy"] or 0.0) >= TARGET]
    # From the first evaluation that all runs are past, to the end.
    grid = np.linspace(10.0, SETTINGS["max_time"], 151)
    return {
        "protocol": protocol,
        "seed": seed,
        "updates": run.result["updates"],
        "mini_batches": run.result["mini_batches_applied"],
        "time_to_target": reached[0] if reached else None,
        "test_loss": run.result["test_loss"],
        "test_accuracy": run.result["test_accuracy"],
        "mean_test_loss": float(np.interp(grid, times, losses).mean()),
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds; None for a target that one of them did not reach."""
    summary = []
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        of = [row for row in rows if row["protocol"] == protocol]
        reached = [row["time_to_target"] for row in of]
        summary.append(
            {
                "protocol": protocol,
                "seeds": len(of),
                "updates": statistics.mean(row["updates"] for row in of),
                "time_to_target": None if None in reached else statistics.mean(reached),
                "time_to_target_range": None if None in reached else [min(reached), max(reached)],
                "test_loss": statistics.mean(row["test_loss"] for row in of),
                "mean_test_loss": statistics.mean(row["mean_test_loss"] for row in of),
            }
        )
    return summary


def as_table(summary: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line for each protocol."""
    lines = [
        "| protocol | updates | s to 95 % (all seeds) | test loss at the end | mean over time |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in summary:
        time = "not reached"
        if row["time_to_target"] is not None:
            low, high = row["time_to_target_range"]
            time = f"{row['time_to_target']:.0f} ({low:.0f} to {high:.0f})"
        lines.append(
            f"| `{row['protocol']}` | {row['updates']:.0f} | {time} | {row['test_loss']:.3f} "
            f"| {row['mean_test_loss']:.3f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    given = parser.parse_args(arguments)
    rows = [
        measure(protocol, seed)
        for cell in CELLS
        for protocol in protocols(cell)
        for seed in given.seeds
    ]
    summary = summarise(rows)
    print(as_table(summary))
    if given.out is not None:
        settings = {**SETTINGS, "interval": INTERVAL, "target": TARGET}
        kept = {"settings": settings, "summary": summary, "runs": rows}
        given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
