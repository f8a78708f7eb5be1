"""Decoupled backpropagation on CIFAR-10: what do late gradients cost in accuracy?

ResNet-20, mini-batches of 128, SGD with Nesterov momentum 0.9 and weight decay 5e-4 as in the DDG
code, rate 0.1 falling along a cosine over 8 epochs in place of its 300 with steps. Plain
backpropagation, DDG with 2 and 4 modules, features replay and FDG with 4, all cut into equal shares
of the time, in virtual time: the weights are those of real processes. Once more with
Adam on ResNet-8, backpropagation and DDG with 2 modules.

    python experiments/decoupled_cifar10.py --data DIR      # hours; continues where it was stopped
    python experiments/decoupled_cifar10.py --tables        # only the tables of what there is

DIR holds CIFAR-10 as for `gruppetto train cifar10 --data`. Two runs at a time, one thread each.
Runs lie under decoupled_cifar10.runs; what is kept of a finished one is in decoupled_cifar10.json.
A run that diverges counts as chance, 10 %.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from resumable import parse, percent, run_planned

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
CHANCE = 0.1


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """From the optimizer's rate to 0 over the run."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)


def planned() -> list[dict[str, Any]]:
    """All runs, the ones that tell most first."""
    runs = [
        {"seed": seed, "model": "resnet20", "optimizer": SGD, "decouple": method}
        for seed in SEEDS
        for method in METHODS
    ]
    adam = [
        {"seed": 0, "model": "resnet8", "optimizer": ADAM, "decouple": method}
        for method in METHODS[:2]
    ]
    return [*runs[: len(METHODS)], *adam, *runs[len(METHODS) :]]


def name_of(run: dict[str, Any]) -> str:
    text = "-".join(str(run[key]) for key in ("seed", "model", "decouple"))
    return text.translate(str.maketrans(":=,_", "----"))


def train(run: dict[str, Any], data: str, folder: Path) -> dict[str, Any]:
    """One run to its end, from its beginning or from where it was stopped; what is kept of it."""
    schedule = gp.schedule(cosine, every="epoch")
    try:
        if (folder / "config.json").exists():
            made = gp.resume(folder, schedule=schedule, progress=False)
        else:
            made = gp.train(
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
    except gp.Diverged as error:
        return {**run, "diverged_at": error.result["epochs"], "accuracy": [], "train_loss": []}
    if made.result["stopped_by"] == "interrupted":  # ends well, and is not what was asked for
        raise KeyboardInterrupt
    return {
        **run,
        "diverged_at": None,
        "accuracy": [point["test_accuracy"] for point in made.history],
        "train_loss": [point["train_loss"] for point in made.history],
        "mean_staleness": made.result["mean_staleness"],
        "begins": made.result["begins"],
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
        "| network | optimizer | method | at the end | best of all epochs | training loss | ⟨σ⟩ |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((r["model"], r["optimizer"], r["decouple"]) for r in planned())
    for model, optimizer, method in kinds:
        kind = model, optimizer, method
        own = [row for row in rows if (row["model"], row["optimizer"], row["decouple"]) == kind]
        own.sort(key=lambda row: int(row["seed"]))
        trained = [r for r in own if r["train_loss"]]
        loss = ", ".join(f"{r['train_loss'][-1]:.3f}" for r in trained)
        late = f"{trained[0]['mean_staleness']:.2f}" if trained else ""
        lines.append(
            f"| {model} | {optimizer.partition(':')[0]} | `{method}` "
            f"| {percent([accuracy(r) for r in own])} | {percent([best(r) for r in own])} "
            f"| {loss} | {late} |"
        )
    return "\n".join(lines)


def say(row: dict[str, Any]) -> str:
    return f"{100 * accuracy(row):.1f} %"


def main(given: list[str] | None = None) -> None:
    arguments = parse(__doc__, HERE / "decoupled_cifar10.json", given, needs="CIFAR-10")
    rows = run_planned(train, planned(), name_of, say, arguments)
    print(tables(rows))


if __name__ == "__main__":
    main()
