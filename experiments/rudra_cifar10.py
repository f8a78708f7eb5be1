"""Rudra on CIFAR-10: how stale may gradients be, and what does the learning rate do about it?

The set-up of Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD", IJCAI 2016: the `rudra`
network, λ = 30 learners with mini-batches of μ = 4, momentum 0.9, rate 0.001, n-softsync with n in
1, 2, 5, 15 and 30, in virtual time with nearly equal learners (gamma:shape=100: 10 % variation).
Per n the fixed rate, the rate over the mean staleness, and the rate over each gradient's own;
hardsync is the control. Eight epochs instead of 140, at a constant rate: hardsync passes 35 % error
by then. Then a small grid of (μ, λ) under 1-softsync for the rule μλ ≈ constant, and a control that
tells staleness from momentum: hardsync and 1-softsync without it, at ten times the rate.

    python experiments/rudra_cifar10.py --data DIR      # hours; continues where it was stopped
    python experiments/rudra_cifar10.py --tables        # only the tables of what there is

DIR holds CIFAR-10 as for `gruppetto train cifar10 --data`. Two runs at a time, one thread each.
Runs lie under rudra_cifar10.runs; what is kept of a finished one is in rudra_cifar10.json. A run
that diverges counts as chance, 10 %; one that has stood at chance for three epochs ends.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from resumable import parse, percent, run_planned, trained

import gruppetto as gp
from gruppetto.theory import largest_stable_rate
from gruppetto.trace import EvaluationRow, Row

HERE = Path(__file__).parent
EPOCHS = 8
SEEDS = (0, 1)
LEARNERS, BATCH_SIZE = 30, 4
OPTIMIZER = "sgd:lr=0.001,momentum=0.9"
#: As far per sample in the long run.
PLAIN = "sgd:lr=0.01"
N = (30, 15, 1, 5, 2)
MODULATIONS = ("none", "inverse-mean", "inverse")
LITERAL = "inverse:apply_to=gradient"
#: (μ, λ) by μλ.
GRID = ((4, 30), (16, 8), (16, 30), (64, 8), (64, 30), (128, 15))
DELAY = "gamma:shape=100,scale=0.01"
CHANCE = 0.1


def planned() -> list[dict[str, Any]]:
    """All runs, the ones that tell most first."""
    runs = []

    def add(seed: int, protocol: str, modulation: str, **others: Any) -> None:
        run = {"seed": seed, "protocol": protocol, "modulation": modulation,
               "learners": LEARNERS, "batch_size": BATCH_SIZE, **others}  # fmt: skip
        if run not in runs:
            runs.append(run)

    for seed in SEEDS:
        add(seed, "hardsync", "none")
        for n in N:
            for modulation in MODULATIONS:
                add(seed, f"softsync:n={n}", modulation)
        for batch_size, learners in GRID:
            add(seed, "softsync:n=1", "inverse-mean", learners=learners, batch_size=batch_size)
    for seed in SEEDS:
        for protocol in ("hardsync", "softsync:n=1"):
            add(seed, protocol, "none", optimizer=PLAIN)
    for seed in SEEDS:
        for n in (30, 15):
            add(seed, f"softsync:n={n}", LITERAL)
    return runs


def kind_of(row: dict[str, Any]) -> tuple[str, str, int, int, str]:
    """All but the seed."""
    optimizer = row.get("optimizer", OPTIMIZER)
    return row["protocol"], row["modulation"], row["batch_size"], row["learners"], optimizer


def name_of(run: dict[str, Any]) -> str:
    keys = ("seed", "protocol", "modulation", "learners", "batch_size")
    text = "-".join(str(run[key]) for key in (*keys, "optimizer") if key in run)
    return text.translate(str.maketrans(":=,_", "----"))


class StuckAtChance:
    """Ends a run that has stood at chance for three evaluations: it has forgotten how to learn."""

    def __init__(self) -> None:
        self._times = 0

    def __call__(self, row: Row) -> bool:
        if isinstance(row, EvaluationRow):
            is_at_chance = row.metrics["accuracy"] == CHANCE and row.version > 0
            self._times = self._times + 1 if is_at_chance else 0
        return self._times == 3


def train(run: dict[str, Any], data: str, folder: Path) -> dict[str, Any]:
    """One run to its end, from its beginning or from where it was stopped; what is kept of it."""
    begin = functools.partial(
        gp.train,
        "cifar10",
        model="rudra",
        data=data,
        engine="virtual",
        delay=DELAY,
        epochs=EPOCHS,
        out=folder,
        progress=False,
        on_event=StuckAtChance(),
        **{"optimizer": OPTIMIZER, **run},
    )
    go_on = functools.partial(gp.resume, folder, progress=False, on_event=StuckAtChance())
    trace, result = trained(folder, begin, go_on, ends=["callback"])
    if result["stopped_by"] == "diverged":
        epochs = result["epochs"]
        return {**run, "diverged_at": epochs, "accuracy": [], "staleness": {}}
    return {
        **run,
        "diverged_at": None,
        "accuracy": [each.metrics["accuracy"] for each in trace.evaluations],
        "staleness": dict(
            sorted(Counter(s for row in trace.updates for s in row.staleness).items())
        ),
        "time": result["time"],
        "updates": result["updates"],
    }


def accuracy(row: dict[str, Any]) -> float:
    return CHANCE if row["diverged_at"] is not None else float(row["accuracy"][-1])


def tail(row: dict[str, Any], n: int) -> float:
    """Share of gradients staler than 2n."""
    counts = {int(value): count for value, count in row["staleness"].items()}
    return sum(c for value, c in counts.items() if value > 2 * n) / max(1, sum(counts.values()))


def mean_staleness(row: dict[str, Any]) -> float:
    counts = {int(value): count for value, count in row["staleness"].items()}
    return sum(value * c for value, c in counts.items()) / max(1, sum(counts.values()))


def tables(rows: list[dict[str, Any]]) -> str:
    """Tables in Markdown."""

    def of(
        protocol: str,
        modulation: str,
        mu: int = BATCH_SIZE,
        lam: int = LEARNERS,
        optimizer: str = OPTIMIZER,
    ) -> list[dict[str, Any]]:
        wanted = (protocol, modulation, mu, lam, optimizer)
        own = [row for row in rows if kind_of(row) == wanted]
        return sorted(own, key=lambda row: int(row["seed"]))

    def errors(*kind: Any) -> str:
        return percent([1 - accuracy(row) for row in of(*kind)])

    columns = (*MODULATIONS, LITERAL)
    lines = [
        f"Test error after {EPOCHS} epochs, %: mean (each seed). Hardsync: "
        f"{errors('hardsync', 'none')}.",
        "",
        "| n | K | " + " | ".join(f"`{m}`" for m in columns) + " | ⟨σ⟩ | (λ − 1)/K | σ > 2n |",
        "|" + "---|" * (len(columns) + 5),
    ]
    for n in sorted(N):
        protocol, k = f"softsync:n={n}", LEARNERS // n
        own = [row for m in columns for row in of(protocol, m) if row["staleness"]]
        mean = f"{statistics.mean(map(mean_staleness, own)):.2f}" if own else ""
        late = f"{max(tail(row, n) for row in own):.1e}" if own else ""
        cells = " | ".join(errors(protocol, m) for m in columns)
        lines.append(f"| {n} | {k} | {cells} | {mean} | {(LEARNERS - 1) / k:.2f} | {late} |")
    fresh = largest_stable_rate(0, 0.9)
    lines += [
        "",
        f"Largest stable α₀ in units of one over the curvature; hardsync: {fresh:.3g}.",
        "",
        "| n | " + " | ".join(f"`{m}`" for m in MODULATIONS) + " |",
        "|---|---|---|---|",
    ]
    for n in sorted(N):
        late = round((LEARNERS - 1) / (LEARNERS // n))
        rate = largest_stable_rate(late, 0.9)
        cells = " | ".join(f"{rate * factor:.2g}" for factor in (1, 1 + late, late))
        lines.append(f"| {n} | {cells} |")
    lines += ["", "| μλ | μ | λ | error, % | virtual s |", "|---|---|---|---|---|"]
    for mu, lam in GRID:
        kind = ("softsync:n=1", "inverse-mean", mu, lam)
        own = of(*kind)
        seconds = f"{statistics.mean(row['time'] for row in own):.0f}" if own else ""
        lines.append(f"| {mu * lam} | {mu} | {lam} | {errors(*kind)} | {seconds} |")
    lines += ["", "| | with momentum 0.9, rate 0.001 | without, rate 0.01 |", "|---|---|---|"]
    for protocol in ("hardsync", "softsync:n=1"):
        each = [
            errors(protocol, "none", BATCH_SIZE, LEARNERS, optimizer)
            for optimizer in (OPTIMIZER, PLAIN)
        ]
        lines.append(f"| {protocol} | " + " | ".join(each) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Error against n: each seed a point, their mean a line."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(N))
    names = {
        "none": "α₀", "inverse-mean": "α₀ / (1 + mean staleness)", "inverse": "α₀ / staleness"
    }  # fmt: skip
    for modulation, colour in zip(MODULATIONS, ("#C0392B", "#2471A3", "#1E8449"), strict=True):
        found = []
        for n in sorted(N):
            kind = (f"softsync:n={n}", modulation, BATCH_SIZE, LEARNERS, OPTIMIZER)
            found.append([100 - 100 * accuracy(row) for row in rows if kind_of(row) == kind])
        means = [statistics.mean(each) if each else math.nan for each in found]
        axes.plot(places, means, color=colour, label=names[modulation])
        for place, each in zip(places, found, strict=True):
            axes.plot([place] * len(each), each, "o", color=colour, markersize=4)
    control = ("hardsync", "none", BATCH_SIZE, LEARNERS, OPTIMIZER)
    hardsync = [100 - 100 * accuracy(row) for row in rows if kind_of(row) == control]
    for number, error in enumerate(hardsync):
        label = None if number else "hardsync"
        axes.axhline(error, color="#555555", linestyle="--", linewidth=1, label=label)
    axes.set_xticks(places, [f"{n}" for n in sorted(N)])
    axes.set_xlabel("n of n-softsync, which is about the mean staleness")
    axes.set_ylabel(f"test error after {EPOCHS} epochs (%)")
    axes.set_ylim(0, 100)
    axes.grid(True, color="#DDDDDD")
    axes.legend()
    figure.savefig(path, dpi=150)


def say(row: dict[str, Any]) -> str:
    return f"{100 - 100 * accuracy(row):.1f} % error"


def main(given: list[str] | None = None) -> None:
    arguments = parse(__doc__, HERE / "rudra_cifar10.json", given, needs="CIFAR-10")
    rows = run_planned(train, planned(), name_of, say, arguments)
    print(tables(rows))
    draw(rows, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
