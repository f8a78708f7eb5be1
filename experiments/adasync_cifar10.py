"""AdaSync on CIFAR-10: error against virtual time, beside fixed K.

8 learners, mini-batches of 32, plain SGD at rate 0.12 without modulation, exponential delays of
mean 0.02 s, the two-layer convolutional network `cnn`; 40 s of virtual time for every run, which is
up to 10 epochs. AdaSync with K0 = 1 and an interval of 5 s over k-sync and over k-batch-async,
against K = 2, 4, 8 of the same cell; two seeds. Delays, rate, mini-batch and interval are those of
public re-implementations of AdaSync; the network is smaller than theirs.

    python experiments/adasync_cifar10.py --data DIR    # 40 minutes of a core; continues if stopped
    python experiments/adasync_cifar10.py               # only the table and figure of what there is

DIR holds CIFAR-10 as for `gruppetto train cifar10 --data`. Each finished run is a line of
adasync_cifar10.jsonl; adasync_cifar10.json has the summary and adasync_cifar10.png the curves. A
run that diverges counts as chance, 90 % error, from then on.
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
from matplotlib.figure import Figure

import gruppetto as gp
from gruppetto.trace import read_trace
from gruppetto.training.tasks import load_task

HERE = Path(__file__).parent
CELLS = ("k-sync", "k-batch-async")
FIXED = (2, 4, 8)
INTERVAL = 5.0
SEEDS = (0, 1)
SETTINGS: dict[str, Any] = {
    "learners": 8,
    "batch_size": 32,
    "optimizer": "sgd:lr=0.12",
    "modulation": "none",
    "delay": "exponential:mean=0.02",
    "max_time": 40.0,
    "evaluate_every": 1.0,
}
CHANCE = 90.0
COLOURS = {"adasync": "#D55E00", "k=2": "#0072B2", "k=4": "#009E73", "k=8": "#222222"}


def load(data: str) -> gp.Task:
    """CIFAR-10 with the network; loaded once, for it takes longer than an epoch."""
    return load_task("cifar10", model="cnn", data=data)


def protocols(cell: str) -> list[str]:
    """AdaSync over a cell, and what it is compared with."""
    adaptive = f"adasync:over={cell},k0=1,interval={INTERVAL}"
    return [adaptive, *(f"{cell}:k={k}" for k in FIXED)]


def planned() -> list[tuple[str, int]]:
    """(protocol, seed) of all runs; the first seed of all before the second."""
    return [(protocol, seed) for seed in SEEDS for cell in CELLS for protocol in protocols(cell)]


def measure(task: gp.Task, protocol: str, seed: int) -> dict[str, Any]:
    """One run: its evaluations, and for AdaSync what it measured and how many it waited for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        try:
            run = gp.train(
                task,
                protocol=protocol,
                seed=seed,
                engine="virtual",
                out=path,
                progress=False,
                **SETTINGS,
            )
            diverged_at, updates = None, run.result["updates"]
        except gp.Diverged as error:
            diverged_at, updates = error.result["time"], error.result["updates"]
        trace = read_trace(path / "trace")
    measured = [row for row in trace.events if row.type == "ProgressMeasured"]
    return {
        "protocol": protocol,
        "seed": seed,
        "updates": updates,
        "diverged_at": diverged_at,
        "times": [row.time for row in trace.evaluations],
        "errors": [100.0 * (1.0 - (row.metrics["accuracy"] or 0.0)) for row in trace.evaluations],
        "progress": [[row.time, json.loads(bytes(row.event))["loss"]] for row in measured],
        "last_k": max((len(row.staleness) for row in trace.updates[-20:]), default=None),
    }


def curve(row: dict[str, Any], grid: Any) -> Any:
    """Error over time, from chance at the start; chance again after divergence."""
    errors = np.interp(grid, [0.0, *row["times"]], [CHANCE, *row["errors"]])
    at = row["diverged_at"]
    return errors if at is None else np.where(grid >= at, CHANCE, errors)


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per protocol, over its seeds: error at a quarter, half and the end of the time."""
    end = SETTINGS["max_time"]
    summary = []
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        of = [row for row in rows if row["protocol"] == protocol]
        curves = np.array([curve(row, np.array([end / 4, end / 2, end])) for row in of])
        summary.append(
            {
                "protocol": protocol,
                "seeds": len(of),
                "updates": statistics.mean(row["updates"] for row in of),
                "diverged": sum(row["diverged_at"] is not None for row in of),
                "last_k": [row["last_k"] for row in of],
                "error_at_quarter": float(curves[:, 0].mean()),
                "error_at_half": float(curves[:, 1].mean()),
                "error_at_end": float(curves[:, 2].mean()),
                "error_at_end_range": [float(curves[:, 2].min()), float(curves[:, 2].max())],
            }
        )
    return summary


def as_table(summary: Sequence[dict[str, Any]]) -> str:
    """Markdown, one line for each protocol."""
    end = SETTINGS["max_time"]
    lines = [
        f"| protocol | updates | K at the end | error % at {end / 4:g} s | at {end / 2:g} s "
        f"| at {end:g} s (all seeds) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in summary:
        low, high = row["error_at_end_range"]
        last_k = ", ".join(map(str, row["last_k"]))
        lines.append(
            f"| `{row['protocol']}` | {row['updates']:.0f} | {last_k} "
            f"| {row['error_at_quarter']:.1f} | {row['error_at_half']:.1f} "
            f"| {row['error_at_end']:.1f} ({low:.1f} to {high:.1f}) |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Error against time, a panel for each cell, the mean of the seeds."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    grid = np.linspace(0.0, SETTINGS["max_time"], 400)
    for axes, cell in zip(figure.subplots(1, len(CELLS), sharey=True), CELLS, strict=True):
        for protocol in protocols(cell):
            of = [curve(row, grid) for row in rows if row["protocol"] == protocol]
            if of:
                name = "adasync" if protocol.startswith("adasync") else protocol.split(":")[1]
                width = 2.2 if name == "adasync" else 1.3
                axes.plot(grid, np.mean(of, 0), color=COLOURS[name], label=name, linewidth=width)
        axes.set_title(cell)
        axes.set_xlabel("virtual time (s)")
        axes.grid(True, color="#DDDDDD")
        if axes.lines:
            axes.legend()
    figure.axes[0].set_ylabel("test error (%)")
    figure.savefig(path, dpi=150)


def finished(path: Path) -> list[dict[str, Any]]:
    """What there is; a last line that was cut off is not."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="folder of CIFAR-10; without it nothing is trained")
    parser.add_argument("--out", type=Path, default=HERE / "adasync_cifar10", help="without ending")
    given = parser.parse_args(arguments)
    lines, numbers, picture = (
        given.out.with_suffix(ending) for ending in (".jsonl", ".json", ".png")
    )
    rows = finished(lines)
    if given.data is not None:
        done = {(row["protocol"], row["seed"]) for row in rows}
        left = [run for run in planned() if run not in done]
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = load(given.data) if left else None
        for number, (protocol, seed) in enumerate(left, 1):
            print(f"{number} of {len(left)}: {protocol}, seed {seed}", flush=True)
            assert task is not None
            rows.append(measure(task, protocol, seed))
            with lines.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if not rows:
        parser.error("no run is finished yet; give --data DIR")
    summary = summarise(rows)
    print(as_table(summary))
    settings = {**SETTINGS, "interval": INTERVAL, "seeds": list(SEEDS)}
    numbers.write_text(json.dumps({"settings": settings, "summary": summary}, indent=1) + "\n")
    draw(rows, picture)


if __name__ == "__main__":
    main()
