"""Figure 9 of "Slow and Stale Gradients Can Win the Race": a rate that follows the distance.

Dutta, Joshi, Ghosh, Dube, Nagpurkar, AISTATS 2018. Softmax regression on CIFAR-10 in grey (pixels
from 0 to 1, penalty 0.05 |W|^2), async, P = 40 learners, mini-batches of m = 250, exponential
delays of rate 20, 2,000 updates of plain SGD: the fixed rate 0.01 against
min{C / ||w_j - w_tau||^2, 0.01} with C = 0.005 x 0.01. Beside the paper, the rate over the mean
staleness, hardsync at the fixed rate, and other values of C. Test loss every ten updates.

    python experiments/dutta_figure_9.py --data DIR     # about 10 minutes; DIR holds CIFAR-10

Numbers go to dutta_figure_9.json, the picture to docs/images. A spike is a point whose ln(loss) is
more than 0.05 above the smallest before it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.training.images import CIFAR10, read_images

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
LEARNERS, BATCH_SIZE, UPDATES, EVERY, SEEDS = 40, 250, 2_000, 10, (0, 1)
RATE = 0.01
C = 0.005 * RATE
GREY = (0.2989, 0.5870, 0.1140)
#: Shown as -> protocol, modulation, updates.
RUNS = {
    "fixed rate": ("async", "none", UPDATES),
    "C = 0.005 rate (the paper's)": ("async", f"distance:c={C}", UPDATES),
    "C = 0.0005 rate": ("async", f"distance:c={C / 10}", UPDATES),
    "C = 0.05 rate": ("async", f"distance:c={C * 10}", UPDATES),
    "rate over mean staleness": ("async", "inverse-mean", UPDATES),
    "hardsync, fixed rate": ("hardsync", "none", UPDATES // LEARNERS),
}
SPIKE = 0.05


class SoftmaxRegression(nn.Module):
    """1024 -> 10, every weight and bias from N(0, 0.01^2); says its own penalty, 0.05 |W|^2."""

    def __init__(self, inputs: int = 1024, classes: int = 10) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.normal_(self.linear.bias, std=0.01)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(pixels), 0.05 * self.linear.weight.square().sum()


def objective(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """Cross-entropy and penalty."""
    return nn.functional.cross_entropy(outputs[0], batch[-1]) + outputs[1]


def measure(model: nn.Module, test: TensorDataset) -> dict[str, float]:
    pixels, labels = test.tensors
    outputs = model(pixels)
    right = (outputs[0].argmax(1) == labels).float().mean()
    return {"loss": float(objective(outputs, (pixels, labels))), "accuracy": float(right)}


def grey_task(train: TensorDataset, test: TensorDataset) -> gp.Task:
    inputs = train.tensors[0].shape[1]
    return gp.Task(
        model=lambda: SoftmaxRegression(inputs), train=train, test=test, loss=objective,
        evaluate=measure, name="cifar10-grey-softmax",
    )  # fmt: skip


def cifar10_in_grey(data: str) -> gp.Task:
    """All of CIFAR-10, from a folder as `gruppetto train cifar10 --data` takes it."""
    parts = []
    for part in ("train", "test"):
        images, labels = read_images(data, CIFAR10, part)  # [n, 3, 32, 32], 0 to 255
        grey = sum(w * images[:, c].float() for c, w in enumerate(GREY)) / 255
        parts.append(TensorDataset(grey.flatten(1), labels))  # type: ignore[union-attr]
    return grey_task(*parts)


def one_curve(
    task: gp.Task, protocol: str, modulation: str, updates: int, seed: int, *,
    learners: int = LEARNERS, batch_size: int = BATCH_SIZE, every: int = EVERY,
) -> dict[str, Any]:  # fmt: skip
    """One run, evaluated every so many mini-batches."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = gp.train(
                task, engine="virtual", protocol=protocol, learners=learners,
                batch_size=batch_size, updates=updates, optimizer=f"sgd:lr={RATE}",
                modulation=modulation, delay="exponential:mean=0.05", seed=seed,
                evaluate_every=every * batch_size / len(task.train),
                out=Path(folder) / "run", progress=False,
            )  # fmt: skip
            if run.result["stopped_by"] == "interrupted":  # ends well, and is not all
                raise KeyboardInterrupt
            history, staleness = run.history, run.result["mean_staleness"]
        except gp.Diverged as error:
            history, staleness = [], error.result["mean_staleness"]
    return {
        "protocol": protocol, "modulation": modulation, "seed": seed, "mean_staleness": staleness,
        "version": [point["version"] for point in history],
        "time": [round(point["time"], 3) for point in history],
        "loss": [round(point["test_loss"], 5) for point in history],
        "accuracy": [round(point["test_accuracy"], 4) for point in history],
    }  # fmt: skip


def spikes(row: dict[str, Any]) -> tuple[int, float]:
    """How many points lie far above the lowest before them, and how high the highest of them."""
    logs = np.log(row["loss"])
    above = logs - np.minimum.accumulate(logs)
    return int((above > SPIKE).sum()), float(above.max())


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | seed | ln(loss) at first | lowest | at the end | points above | highest by "
        "| accuracy | virtual s |", "|" + "---|" * 9,
    ]  # fmt: skip
    for row in rows:
        if not row["loss"]:
            lines.append(f"| {row['name']} | {row['seed']} | diverged | | | | | | |")
            continue
        logs = np.log(row["loss"])
        count, highest = spikes(row)
        lines.append(
            f"| {row['name']} | {row['seed']} | {logs[0]:.3f} | {logs.min():.3f} | {logs[-1]:.3f} "
            f"| {count} of {len(logs)} | {highest:.3f} | {row['accuracy'][-1]:.3f} "
            f"| {row['time'][-1]:.1f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """ln(test loss) against updates: the paper's two left, the others right; seed 0 strong."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained", sharey=True)
    names = list(RUNS)
    colours = dict(zip(names, ("#d55e00", "#0072b2", "#56b4e9", "#cc79a7", "#009e73", "#777777"),
                       strict=True))  # fmt: skip
    for row in rows:
        if row["name"].startswith("hardsync") or not row["loss"]:
            continue
        axis = axes[0] if row["name"] in names[:2] else axes[1]
        is_first = row["seed"] == min(SEEDS)
        axis.plot(
            row["version"], np.log(row["loss"]), color=colours[row["name"]], lw=1.1,
            alpha=1.0 if is_first else 0.35, label=row["name"] if is_first else None,
        )  # fmt: skip
    for axis in axes:
        axis.set(xlabel="updates")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    axes[0].set_ylabel("ln(test loss)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of CIFAR-10")
    parser.add_argument("--json", type=Path, default=HERE / "dutta_figure_9.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    arguments = parser.parse_args(given)
    task = cifar10_in_grey(arguments.data)
    rows = []
    for name, (protocol, modulation, updates) in RUNS.items():
        for seed in SEEDS:
            rows.append({"name": name, **one_curve(task, protocol, modulation, updates, seed)})
            print(table(rows[-1:]).splitlines()[-1])
    text = ",\n".join(json.dumps(row) for row in rows)
    arguments.json.write_text(f"[\n{text}\n]\n")
    draw(rows, arguments.out / "dutta-figure-9.png")
    print(table(rows))


if __name__ == "__main__":
    main()
