"""What a late gradient is worth: every step-size rule and every compensation beside its controls.

Digits without BatchNorm, 16 learners, mini-batches of 16, 10 epochs, SGD with momentum 0.9,
exponential delays of mean 1, virtual time; async, so the mean staleness is 15. Three learning
rates: 0.02, where plain async suffers, 0.05, where it fails and hardsync does not, and 0.2,
hardsync's best. Controls: hardsync at the same rates, and plain async at four smaller ones,
because a method that shortens steps has to be compared with shorter steps. Test accuracy after
the last epoch; a run that diverges counts as chance, 0.10. Nothing is tuned but the keys shown:
methods whose key has a scale of its own appear with several values.

    python experiments/methods.py            # 3 seeds, prints the tables; about 3 minutes
    python experiments/methods.py --seeds 0 1 2 --out experiments/methods.json
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
from gruppetto.trace import UpdateRow

SETTINGS: dict[str, Any] = {
    "task": "digits:batchnorm=false", "learners": 16, "batch_size": 16, "epochs": 10,
    "momentum": 0.9, "delay": "exponential:mean=1", "rates": [0.02, 0.05, 0.2],
    "small_rates": [0.0025, 0.005, 0.01, 0.015],
}  # fmt: skip
DEFAULT = "inverse-mean:cap=true"
PLAIN = "async", "none", "none"
#: (protocol, modulation, compensation); {r*x} is x times the run's learning rate.
ROWS: tuple[tuple[str, str, str], ...] = (
    ("hardsync", "none", "none"),
    PLAIN,
    ("async", DEFAULT, "none"),
    ("async", "inverse", "none"),
    ("async", "distance:c={r*0.5}", "none"),
    ("async", "distance:c={r*0.05}", "none"),
    ("async", "distance:c={r*0.005}", "none"),
    ("async", "delay-adaptive", "none"),
    ("async", "threshold", "none"),
    ("async", "threshold:scale=2.0", "none"),
    ("async", "inverse-sqrt", "none"),
    ("async", "inverse-sqrt:normalise=true", "none"),
    ("async", "polynomial:a=1.0", "none"),
    ("async", "exponential:beta=0.8", "none"),
    ("async", "annealed-power:updates=450", "none"),
    ("async", "none", "dc-asgd"),
    ("async", "none", "dc-asgd:strength=1.0"),
    ("async", "none", "dc-asgd-adaptive"),
    ("async", "none", "dc-asgd-adaptive:strength=0.1"),
    ("async", "none", "gap-aware"),
    ("async", DEFAULT, "dc-asgd"),
    ("async", DEFAULT, "dc-asgd-adaptive:strength=0.1"),
    ("async", DEFAULT, "gap-aware"),
)


def train(settings: dict[str, Any], row: Sequence[str], rate: float, seed: int) -> dict[str, Any]:
    """One run: its accuracy, virtual time and mean learning rate after modulation."""
    protocol, modulation, compensation = row
    rates: list[float] = []

    def keep(event: object) -> None:
        if isinstance(event, UpdateRow):
            rates.append(event.learning_rate)

    for share in (0.5, 0.05, 0.005):
        modulation = modulation.replace(f"{{r*{share}}}", repr(rate * share))
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = gp.train(
                settings["task"],
                protocol=protocol,
                modulation=modulation,
                compensation=compensation,
                learners=settings["learners"],
                batch_size=settings["batch_size"],
                epochs=settings["epochs"],
                optimizer=f"sgd:lr={rate},momentum={settings['momentum']}",
                delay=settings["delay"],
                evaluate_every=settings["epochs"],
                seed=seed,
                out=Path(folder) / "run",
                progress=False,
                on_event=keep,
                guard="off",
                engine="virtual",
            ).result
        except gp.Diverged:
            result = {"test_accuracy": 0.10, "time": None}
    mean = statistics.mean(rates) / rate if rates else 0.0
    return {"accuracy": result["test_accuracy"], "time": result["time"], "mean_factor": mean}


def measure(
    settings: dict[str, Any], rows: Sequence[Sequence[str]], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Every row at every rate; plain async at the small rates, too."""
    cases = [(row, rate) for rate in settings["rates"] for row in rows]
    cases += [(PLAIN, rate) for rate in settings["small_rates"]]
    measured = []
    for row, rate in cases:
        runs = [train(settings, row, rate, seed) for seed in seeds]
        protocol, modulation, compensation = row
        measured.append(
            {
                "protocol": protocol, "modulation": modulation, "compensation": compensation,
                "rate": rate, "seeds": list(seeds),
                **{key: [run[key] for run in runs] for key in ("accuracy", "time", "mean_factor")},
            }
        )  # fmt: skip
        print(_line(measured[-1]))
    return measured


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def _line(row: dict[str, Any]) -> str:
    names = f"{row['protocol']:8} {row['modulation']:28} {row['compensation']:29}"
    return f"{row['rate']:<6} {names} {_spread(row['accuracy'])}"


def as_tables(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Markdown: a line per method and a column per rate; and plain async at all rates."""
    rates, small = settings["rates"], settings["small_rates"]
    methods: dict[tuple[str, str, str], dict[float, dict[str, Any]]] = {}
    for row in rows:
        key = row["protocol"], row["modulation"], row["compensation"]
        methods.setdefault(key, {})[row["rate"]] = row
    columns = [f"at rate {rate} | mean factor" for rate in rates]
    lines = [
        f"| protocol | modulation | compensation | {' | '.join(columns)} |",
        "|" + "---|" * (3 + 2 * len(rates)),
    ]
    for (protocol, modulation, compensation), at in methods.items():
        cells = [
            f"{_spread(at[rate]['accuracy'])} | {statistics.mean(at[rate]['mean_factor']):.2f}"
            for rate in rates
        ]
        shown = modulation.replace("{r*", "").replace("}", "·α₀")
        names = f"{protocol} | `{shown}` | `{compensation}`"
        lines.append(f"| {names} | {' | '.join(cells)} |")
    every = sorted([*small, *rates])
    plain = [_spread(methods[PLAIN][rate]["accuracy"]) for rate in every]
    controls = [
        f"| learning rate | {' | '.join(map(str, every))} |",
        "|" + "---|" * (1 + len(every)),
        f"| plain async | {' | '.join(plain)} |",
    ]
    return "\n".join(lines), "\n".join(controls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    arguments = parser.parse_args()
    rows = measure(SETTINGS, ROWS, arguments.seeds)
    print("", *as_tables(SETTINGS, rows), sep="\n\n")
    if arguments.out is not None:
        found = {"settings": SETTINGS, "rows": rows}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
