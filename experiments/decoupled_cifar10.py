"""Decoupled backpropagation on CIFAR-10: what do late gradients cost in accuracy?

ResNet-20, mini-batches of 128, SGD with Nesterov momentum 0.9 and weight decay 5e-4 as in the DDG
code, rate 0.1 falling along a cosine over 8 epochs in place of its 300 with steps. Plain
backpropagation, DDG with 2 and 4 modules, features replay and FDG with 4, all cut into equal shares
of the time, in virtual time: the weights are those of real processes. Once more with
Adam on ResNet-8, backpropagation and DDG with 2 modules. And two relatives of DDG with 4: on the
weights of now, as the published code, and with a look-ahead.

    python experiments/decoupled_cifar10.py --data DIR      # hours; continues where it was stopped
    python experiments/decoupled_cifar10.py --tables        # only the tables of what there is

DIR holds CIFAR-10 as for `gruppetto train cifar10 --data`. Two runs at a time, one thread each.
Runs lie under decoupled_cifar10.runs; what is kept of a finished one is in decoupled_cifar10.json.
A run that diverges counts as chance, 10 %. The tables come with a picture, decoupled_cifar10.png:
error against virtual time; the whole network's forward pass takes 1, its backward pass 2.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from resumable import parse, percent, run_planned, trained

import gruppetto as gp

HERE = Path(__file__).parent
EPOCHS = 8
BATCH_SIZE = 128
SEEDS = (0, 1)
SGD = "sgd:lr=0.1,momentum=0.9,nesterov=true,weight_decay=5e-4"
ADAM = "adam:lr=0.001,weight_decay=5e-4"
METHODS = (
    "bp:modules=2",
    "ddg:modules=2",
    "ddg:modules=4",
    "fr:modules=4",
    "fdg:modules=4",
)
RELATIVES = ("ddg:modules=4,stash=none", "ddg:modules=4,lookahead=0.9")
COLOURS = dict(zip(METHODS, ("#555555", "#2471A3", "#1E8449", "#B7950B", "#C0392B"), strict=True))
CHANCE = 0.1


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """From the optimizer's rate to 0 over the run."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def planned() -> list[dict[str, Any]]:
    """All runs, the ones that tell most first."""

    def some(seed: int, methods: Sequence[str], model: str, optimizer: str) -> list[dict[str, Any]]:
        return [
            {"seed": seed, "model": model, "optimizer": optimizer, "decouple": method}
            for method in methods
        ]

    return [
        *some(0, METHODS, "resnet20", SGD),
        *some(0, METHODS[:2], "resnet8", ADAM),
        *some(1, METHODS, "resnet20", SGD),
        *some(0, RELATIVES, "resnet20", SGD),
        *some(1, RELATIVES, "resnet20", SGD),
    ]


def name_of(run: dict[str, Any]) -> str:
    text = "-".join(str(run[key]) for key in ("seed", "model", "decouple"))
    return text.translate(str.maketrans(":=,_", "----"))


def train(run: dict[str, Any], data: str, folder: Path) -> dict[str, Any]:
    """One run to its end, from its beginning or from where it was stopped; what is kept of it."""
    schedule = gp.schedule(cosine, every="epoch")
    begin = functools.partial(
        gp.train,
        "cifar10",
        data=data,
        engine="virtual",
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        schedule=schedule,
        out=folder,
        progress=False,
        **run,
    )
    go_on = functools.partial(gp.resume, folder, schedule=schedule, progress=False)
    trace, result = trained(folder, begin, go_on)
    has_diverged = result["stopped_by"] == "diverged"
    evaluations = [] if has_diverged else trace.evaluations
    return {
        **run,
        "diverged_at": result["epochs"] if has_diverged else None,
        "time": [each.time for each in evaluations],
        "accuracy": [each.metrics["accuracy"] for each in evaluations],
        "train_loss": [each.train_loss for each in evaluations],
        "mean_staleness": result["mean_staleness"],
        "begins": result["begins"],
    }


def accuracy(row: dict[str, Any]) -> float:
    return CHANCE if row["diverged_at"] is not None else float(row["accuracy"][-1])


def best(row: dict[str, Any]) -> float:
    return CHANCE if row["diverged_at"] is not None else max(row["accuracy"])


def tables(rows: list[dict[str, Any]]) -> str:
    """One table in Markdown."""
    lines = [
        f"Test accuracy after {EPOCHS} epochs, %: mean (each seed).",
        "",
        "| network | optimizer, rate | method | at the end | best | training loss | ⟨σ⟩ | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((r["model"], r["optimizer"], r["decouple"]) for r in planned())
    for model, optimizer, method in kinds:
        kind = model, optimizer, method
        own = [row for row in rows if (row["model"], row["optimizer"], row["decouple"]) == kind]
        own.sort(key=lambda row: int(row["seed"]))
        trained = [r for r in own if r["train_loss"]]
        loss = ", ".join(f"{r['train_loss'][-1]:.3f}" for r in trained)
        name, _, options = optimizer.partition(":lr=")
        late = f"{trained[0]['mean_staleness']:.2f}" if trained else ""
        time = f"{statistics.mean(r['time'][-1] for r in trained):,.0f}" if trained else ""
        lines.append(
            f"| {model} | {name}, {options.partition(',')[0]} | `{method}` "
            f"| {percent([accuracy(r) for r in own])} | {percent([best(r) for r in own])} "
            f"| {loss} | {late} | {time} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Error against virtual time: each seed a line."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method, colour in COLOURS.items():
        own = [r for r in rows if (r["decouple"], r["optimizer"]) == (method, SGD) and r["time"]]
        for number, row in enumerate(own):
            error = [100 - 100 * each for each in row["accuracy"]]
            label = None if number else method
            axes.plot(row["time"], error, "o-", color=colour, label=label, markersize=3)
    axes.set_xlabel("virtual time (forward passes of the whole network)")
    axes.set_ylabel("test error (%)")
    axes.set_xlim(0)
    axes.grid(True, color="#DDDDDD")
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)


def say(row: dict[str, Any]) -> str:
    return f"{100 * accuracy(row):.1f} %"


def main(given: list[str] | None = None) -> None:
    arguments = parse(__doc__, HERE / "decoupled_cifar10.json", given, needs="CIFAR-10")
    rows = run_planned(train, planned(), name_of, say, arguments)
    print(tables(rows))
    draw(rows, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
