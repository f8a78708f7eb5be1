"""Figures 5, 6, 8, 10, 11 and 12 of "Slow and Stale Gradients Can Win the Race", made anew.

Dutta, Joshi, Ghosh, Dube, Nagpurkar, AISTATS 2018. Figures 5 and 6 are seconds only: closed forms,
and timing simulations beside them (seed 0). Figures 8, 10, 11 and 12 are softmax regression on
MNIST in virtual time: P = 8 learners, mini-batches of one sample, plain SGD, seeds 0 to 9, all of
MNIST, test loss and test error after every few updates. Where the paper leaves a number open, the
one taken here is in SETTINGS and marked.

    python experiments/paper_figures.py                # figures 5 and 6, a minute
    python experiments/paper_figures.py --data DIR     # all six; DIR holds MNIST; 6 minutes

Numbers go to paper_figures.json, pictures to docs/images. What is there with the same settings is
not computed again; a picture that is missing is drawn from the numbers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.delays import DELAYS, KeyedDelays
from gruppetto.protocols import PROTOCOLS
from gruppetto.theory import async_speedup, update_time, update_time_bounds
from gruppetto.theory.timing import simulate
from gruppetto.training.images import MNIST, read_images

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
LAWS = {
    "exp(1)": "exponential:mean=1",
    "1 + exp(1)": "shifted-exponential:shift=1,mean=1",
    "Pareto(2, 1)": "pareto:shape=2,scale=1",
}
PROTOCOL_NAMES = {
    "k-sync": "K-sync",
    "k-batch-sync": "K-batch-sync",
    "k-async": "K-async",
    "k-batch-async": "K-batch-async",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "figure-5": {"laws": list(LAWS.values()), "learners": 20, "simulated": 200_000, "seed": 0},
    "figure-6": {
        "laws": [LAWS["Pareto(2, 1)"], LAWS["1 + exp(1)"]],
        "learners": 20, "updates": 2_000, "simulated": 40_000, "seed": 0,
    },
    "figure-8": {
        "protocols": ["async", "k-batch-async:k=4", "hardsync"], "delay": LAWS["exp(1)"],
        "learners": 8, "rate": 0.01, "updates": 500, "every": 10, "seeds": 10,
    },
    # P and K are not in the paper: those of figure 8.
    "figure-10": {
        "protocols": ["k-async:k=4", "k-batch-async:k=4"], "delay": LAWS["exp(1)"],
        "learners": 8, "rate": 0.01, "updates": 500, "every": 10, "seeds": 10,
    },
    # m + exp(mu) with m = 1; mu and the number of updates are not in the paper.
    "figure-11": {
        "protocols": ["k-sync:k=2", "k-sync:k=4", "k-sync:k=8"], "delay": LAWS["1 + exp(1)"],
        "learners": 8, "rate": 0.05, "updates": 1_000, "every": 20, "seeds": 10,
    },
}  # fmt: skip
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
#: Times at which the curves are given as numbers, seconds.
READ_AT = {
    "figure-8": (30, 60, 120, 250, 500, 1_350),
    "figure-10": (60, 120, 250),
    "figure-11": (100, 300, 600, 1_200),
}


# --- Figures 5 and 6: seconds ------------------------------------------------------------------


def seconds_per_update(protocol: str, law: str, learners: int, updates: int, seed: int) -> float:
    """Simulated, from the start of a run on."""
    delays = KeyedDelays(seed, DELAYS.parse(law), {}, learners)
    return simulate(PROTOCOLS.parse(protocol), delays, learners, updates).mean_update_time


def speedups(laws: Sequence[str], learners: int, simulated: int, seed: int) -> list[dict[str, Any]]:
    """Figure 5: how many times faster an update of async is than one of hardsync."""
    rows = []
    for law in laws:
        for p in range(1, learners + 1):
            theory = async_speedup(DELAYS.parse(law), p)
            sync, late = (
                seconds_per_update(protocol, law, p, simulated, seed)
                for protocol in ("hardsync", "async")
            )
            rows.append({"law": law, "learners": p, "theory": theory, "simulated": sync / late})
    return rows


def run_times(
    laws: Sequence[str], learners: int, updates: int, simulated: int, seed: int
) -> list[dict[str, Any]]:
    """Figure 6: seconds for so many updates, for every K."""
    rows = []
    for law in laws:
        for name in PROTOCOL_NAMES:
            for k in range(1, learners + 1):
                spec = f"{name}:k={k}"
                protocol, delay = PROTOCOLS.parse(spec), DELAYS.parse(law)
                known = update_time(protocol, delay, learners)
                low, high = update_time_bounds(protocol, delay, learners)
                seconds = seconds_per_update(spec, law, learners, simulated, seed)
                rows.append(
                    {"law": law, "protocol": name, "k": k, "kind": known.kind,
                     "theory": None if known.seconds is None else known.seconds * updates,
                     "low": low * updates, "high": high * updates if np.isfinite(high) else None,
                     "simulated": seconds * updates}
                )  # fmt: skip
    return rows


# --- Figures 8, 10, 11, 12: error against time --------------------------------------------------


class SoftmaxRegression(nn.Module):
    """784 -> 10, every weight and bias from N(0, 0.01^2); says its own penalty, 0.01 |W|^2."""

    def __init__(self, inputs: int = 784, classes: int = 10) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.normal_(self.linear.bias, std=0.01)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(pixels), 0.01 * self.linear.weight.square().sum()


def objective(outputs: tuple[Tensor, Tensor], batch: Sequence[Tensor]) -> Tensor:
    """What is minimised: cross-entropy and penalty, both at the weights that were read."""
    return nn.functional.cross_entropy(outputs[0], batch[-1]) + outputs[1]


def measure(model: nn.Module, test: TensorDataset) -> dict[str, float]:
    """The objective on the test set, and the share of it that is misjudged, in per cent."""
    pixels, labels = test.tensors
    outputs = model(pixels)
    wrong = (outputs[0].argmax(1) != labels).float().mean()
    return {"loss": float(objective(outputs, (pixels, labels))), "error": 100 * float(wrong)}


def softmax_task(train: TensorDataset, test: TensorDataset) -> gp.Task:
    """Softmax regression on rows of pixels from 0 to 1."""
    inputs = train.tensors[0].shape[1]
    return gp.Task(
        model=lambda: SoftmaxRegression(inputs), train=train, test=test, loss=objective,
        evaluate=measure, name="mnist-softmax",
    )  # fmt: skip


def mnist_task(data: str) -> gp.Task:
    """All of MNIST, from a folder as `gruppetto train mnist --data` takes it."""
    parts = []
    for part in ("train", "test"):
        images, labels = read_images(data, MNIST, part)
        parts.append(TensorDataset(images.flatten(1).float() / 255, labels))
    return softmax_task(*parts)


def one_curve(
    task: gp.Task, protocol: str, seed: int, *, delay: str, learners: int, rate: float,
    updates: int, every: int,
) -> dict[str, Any]:  # fmt: skip
    """One run, evaluated every so many updates."""
    k = PROTOCOLS.parse(protocol).num_to_wait(learners)
    with tempfile.TemporaryDirectory() as folder:
        run = gp.train(
            task, engine="virtual", protocol=protocol, learners=learners, batch_size=1,
            updates=updates, optimizer=f"sgd:lr={rate}", modulation="none", delay=delay, seed=seed,
            evaluate_every=every * k / len(task.train), out=Path(folder) / "run", progress=False,
        )  # fmt: skip
    points = [(h["version"], h["time"], h["test_loss"], h["test_error"]) for h in run.history]
    version, time, loss, error = (list(column) for column in zip(*points, strict=True))
    return {
        "protocol": protocol, "seed": seed, "total_time": run.result["time"],
        "mean_staleness": run.result["mean_staleness"], "version": version,
        "time": [round(t, 3) for t in time], "loss": [round(x, 5) for x in loss],
        "error": [round(x, 2) for x in error],
    }  # fmt: skip


def curves(task: gp.Task, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All runs of a figure."""
    settings = dict(settings)
    protocols, seeds = settings.pop("protocols"), settings.pop("seeds")
    return [
        one_curve(task, protocol, seed, **settings) for protocol in protocols
        for seed in range(seeds)
    ]  # fmt: skip


def on_grid(
    rows: Sequence[dict[str, Any]], x: str, y: str, grid: Sequence[float]
) -> np.ndarray[Any, Any]:
    """The curve of each run at common places. Shape [runs, places]."""
    return np.stack([np.interp(grid, row[x], row[y]) for row in rows])


def read_off(rows: Sequence[dict[str, Any]], times: Sequence[float]) -> list[dict[str, Any]]:
    """Loss and error at some times, each the mean over its last tenth, then over seeds."""
    found = []
    for protocol in dict.fromkeys(row["protocol"] for row in rows):
        mine = [row for row in rows if row["protocol"] == protocol]
        ends = [row["total_time"] for row in mine]
        entry: dict[str, Any] = {
            "protocol": protocol, "total_time": float(np.mean(ends)),
            "total_time_sd": float(np.std(ends, ddof=1)) if len(ends) > 1 else None,
            "mean_staleness": float(np.mean([row["mean_staleness"] for row in mine])),
            "last": {y: float(np.mean([row[y][-1] for row in mine])) for y in ("loss", "error")},
            "at": {},
        }  # fmt: skip
        for time in (t for t in times if t <= 1.02 * np.mean(ends)):
            grid = np.linspace(0.9 * time, time, 11)
            values = {y: on_grid(mine, "time", y, grid).mean(1) for y in ("loss", "error")}
            entry["at"][str(time)] = {
                f"{y}{suffix}": round(float(value), 4)
                for y, v in values.items()
                for suffix, value in (("", v.mean()), ("_sem", v.std() / np.sqrt(len(v))))
            }
        found.append(entry)
    return found


# --- Pictures -----------------------------------------------------------------------------------


def new_picture(panels: int) -> tuple[Any, Any]:
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, panels, figsize=(4.6 * panels, 3.5), layout="constrained")
    return figure, np.atleast_1d(axes)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of matplotlib in it, equal numbers give equal files.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_speedups(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure, (axis,) = new_picture(1)
    names = {spec: name for name, spec in LAWS.items()}
    for colour, law in zip(COLOURS, dict.fromkeys(row["law"] for row in rows), strict=False):
        mine = [row for row in rows if row["law"] == law]
        p = [row["learners"] for row in mine]
        axis.plot(p, [row["theory"] for row in mine], color=colour, label=names[law])
        axis.plot(p, [row["simulated"] for row in mine], "o", color=colour, ms=3.5, mfc="white")
    axis.plot([], [], "o", color="grey", ms=3.5, mfc="white", label="simulated")
    axis.set(xlabel="learners P", ylabel="time per update, hardsync / async", yscale="log")
    axis.set_xticks(range(0, 21, 4))
    axis.set_yticks((1, 2, 5, 10, 20, 50, 100), labels=("1", "2", "5", "10", "20", "50", "100"))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    save(figure, path)


def draw_run_times(rows: Sequence[dict[str, Any]], path: Path) -> None:
    laws = list(dict.fromkeys(row["law"] for row in rows))
    names = {spec: name for name, spec in LAWS.items()}
    figure, axes = new_picture(len(laws))
    for axis, law in zip(axes, laws, strict=True):
        for colour, (name, shown) in zip(COLOURS, PROTOCOL_NAMES.items(), strict=True):
            mine = [row for row in rows if row["law"] == law and row["protocol"] == name]
            k = [row["k"] for row in mine]
            exact = [row["theory"] if row["kind"] == "exact" else np.nan for row in mine]
            axis.plot(k, exact, color=colour)
            axis.plot(k, [row["simulated"] for row in mine], "o", color=colour, ms=3.5,
                      mfc="white", label=shown)  # fmt: skip
        axis.plot([], [], color="grey", label="line: closed form")
        axis.set(xlabel="K", ylabel="seconds for 2,000 updates", yscale="log", title=names[law])
        axis.set_xticks((1, 4, 8, 12, 16, 20))
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    save(figure, path)


def shown_as(protocol: str) -> str:
    name, _, k = protocol.partition(":k=")
    return {"hardsync": "sync", "async": "async"}.get(name) or f"{PROTOCOL_NAMES[name]}, K = {k}"


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, x: str, end: float | None) -> None:
    """Left ln(test loss), right test error: mean over seeds, and its middle half of the runs."""
    figure, axes = new_picture(2)
    for axis, y in zip(axes, ("loss", "error"), strict=True):
        for colour, protocol in zip(COLOURS, dict.fromkeys(r["protocol"] for r in rows),
                                    strict=False):  # fmt: skip
            mine = [row for row in rows if row["protocol"] == protocol]
            last = np.mean([row[x][-1] for row in mine])
            grid = np.linspace(np.mean([r[x][0] for r in mine]), min(last, end or last), 200)
            values = on_grid(mine, x, y, grid)
            values = np.log(values) if y == "loss" else values
            axis.plot(grid, values.mean(0), color=colour, label=shown_as(protocol), lw=1.4)
            low, high = np.quantile(values, (0.25, 0.75), axis=0)
            axis.fill_between(grid, low, high, color=colour, alpha=0.15, lw=0)
        axis.set(xlabel="virtual time, seconds" if x == "time" else "updates", xlim=(0, end))
        axis.set_ylabel("ln(test loss)" if y == "loss" else "test error, per cent")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    save(figure, path)


# --- All of it ----------------------------------------------------------------------------------


def compute(name: str, settings: dict[str, Any], task: gp.Task | None) -> dict[str, Any]:
    """The numbers of one figure."""
    if name == "figure-5":
        return {"settings": settings, "rows": speedups(**settings)}
    if name == "figure-6":
        return {"settings": settings, "rows": run_times(**settings)}
    assert task is not None
    rows = curves(task, settings)
    return {"settings": settings, "summary": read_off(rows, READ_AT[name]), "rows": rows}


def draw(name: str, rows: Sequence[dict[str, Any]], out: Path, again: bool) -> None:
    """The pictures of one figure, those that are missing, or all."""
    pictures: dict[str, Any]
    if name == "figure-5":
        pictures = {"figure-5.png": lambda path: draw_speedups(rows, path)}
    elif name == "figure-6":
        pictures = {"figure-6.png": lambda path: draw_run_times(rows, path)}
    elif name == "figure-11":  # and 12: the same runs
        fastest = min(row["total_time"] for row in rows)
        pictures = {
            "figure-11.png": lambda path: draw_curves(rows, path, "version", None),
            "figure-12.png": lambda path: draw_curves(rows, path, "time", fastest),
        }
    else:
        pictures = {f"{name}.png": lambda path: draw_curves(rows, path, "time", None)}
    for file, make in pictures.items():
        if again or not (out / file).exists():
            make(out / file)
            print(f"  drew {out / file}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="folder of MNIST; without it, figures 5 and 6 only")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    parser.add_argument("--json", type=Path, default=HERE / "paper_figures.json")
    arguments = parser.parse_args(argv)
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    task = None
    for name, settings in SETTINGS.items():
        again = found.get(name, {}).get("settings") != settings
        needs_data = name not in ("figure-5", "figure-6")
        if again and needs_data and not arguments.data:
            print(f"{name}: left out, needs --data")
            continue
        if again:
            if needs_data and task is None:
                task = mnist_task(arguments.data)
            found[name] = compute(name, settings, task)
            whole = ",\n".join(f'"{n}": {compact(found[n])}' for n in SETTINGS if n in found)
            arguments.json.write_text("{" + whole + "}\n")
        print(f"{name}: {'computed' if again else 'there'}")
        draw(name, found[name]["rows"], arguments.out, again)


def compact(numbers: dict[str, Any]) -> str:
    """JSON with a line per run or row."""
    rows = ",\n".join(json.dumps(row) for row in numbers["rows"])
    head = json.dumps({key: value for key, value in numbers.items() if key != "rows"})
    return f'{head[:-1]}, "rows": [\n{rows}\n]}}'


if __name__ == "__main__":
    main()
