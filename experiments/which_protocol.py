"""Who wins where: time to a target under five kinds of delays, and with one learner 100 x slower.

Digits, 16 learners, mini-batches of 16, SGD with momentum 0.9, in virtual time, to a test loss of
0.25: k-sync, Rennala, Ringmaster, k-batch-async under three modulations, AdaSync and hardsync, with
delays of 1 second in the mean that are constant, exponential, Pareto, bimodal, or change as the run
goes on (learners are nine times slower in turn). Then the least-squares problem of Mishchenko,
Bach, Even, Woodworth, NeurIPS 2022: n = 10,000, d = 400, 40 learners, exponential delays, with and
without one learner that is 100 times slower, plain SGD to an excess loss of 0.01.

Every method gets the best of a few rates for every kind of delay, found with seeds of its own, and
is then judged with others: nobody wins by the rate that happened to be chosen.

    python experiments/which_protocol.py                # half an hour on two cores; continues
    python experiments/which_protocol.py --tables       # only the tables of what there is

Numbers go to which_protocol.json. A run that does not come to its target within the limit, or
diverges, counts as infinitely long.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from resumable import as_they_end, parse, read, save

import gruppetto as gp

HERE = Path(__file__).parent
TUNING, JUDGES = (100, 101), (0, 1, 2, 3, 4)

DELAYS = {
    "constant": "constant:value=1",
    "exponential": "exponential:mean=1",
    "Pareto": "pareto:shape=2,scale=0.5",
    "bimodal": "bimodal:fast=0.5,slow=5.5,p_slow=0.1",
    "changing": "regimes:fast=0.3333,slow=3,jobs=20",
}
#: Shown as -> protocol, modulation.
DIGITS = {
    "hardsync": ("hardsync", "none"),
    "k-sync, K = 12": ("k-sync:k=12", "none"),
    "k-sync, K = 8": ("k-sync:k=8", "none"),
    "k-sync, K = 4": ("k-sync:k=4", "none"),
    "Rennala, K = 16": ("rennala:k=16", "none"),
    "Rennala, K = 8": ("rennala:k=8", "none"),
    "Ringmaster, R = 8": ("ringmaster:r=8", "none"),
    "Ringmaster, R = 16": ("ringmaster:r=16", "none"),
    "k-batch-async, K = 4": ("k-batch-async:k=4", "none"),
    "the same, inverse": ("k-batch-async:k=4", "inverse"),
    "the same, inverse-mean, capped": ("k-batch-async:k=4", "inverse-mean:cap=true"),
    "AdaSync over k-sync": ("adasync:over=k-sync,k0=2,interval=10", "none"),
    "AdaSync over k-batch-async": ("adasync:over=k-batch-async,k0=2,interval=10", "none"),
}
LEAST_SQUARES = {
    "hardsync": ("hardsync", "none"),
    "k-sync, K = 39": ("k-sync:k=39", "none"),
    "k-sync, K = 20": ("k-sync:k=20", "none"),
    "Rennala, K = 40": ("rennala:k=40", "none"),
    "async": ("async", "none"),
    "async, delay-adaptive": ("async", "delay-adaptive"),
    "async, inverse": ("async", "inverse"),
    "async, inverse-mean, capped": ("async", "inverse-mean:cap=true"),
    "Ringmaster, R = 40": ("ringmaster:r=40", "none"),
    "SSP, s = 4": ("ssp:s=4", "none"),
}
#: What differs between the two problems.
PROBLEMS: dict[str, dict[str, Any]] = {
    "digits": {
        "task": "digits", "learners": 16, "batch_size": 16, "momentum": 0.9,
        "target": "loss=0.25", "evaluate_every": 0.1, "epochs": 40, "max_time": 400.0,
        "methods": DIGITS, "rates": (0.003, 0.006, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
        "delays": {name: (law, {}) for name, law in DELAYS.items()},
    },
    "least-squares": {
        "task": "least-squares:n=10000,d=400", "learners": 40, "batch_size": 10, "momentum": 0.0,
        "target": "excess_loss=0.01", "evaluate_every": 0.05, "epochs": 30, "max_time": 10_000.0,
        "methods": LEAST_SQUARES,
        "rates": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
        "delays": {
            "all alike": ("exponential:mean=1", {}),
            "one 100 x slower": ("exponential:mean=1", {39: "exponential:mean=100"}),
        },
    },
}  # fmt: skip


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One run; seconds to the target, infinite as null."""
    problem = PROBLEMS[job["problem"]]
    protocol, modulation = problem["methods"][job["method"]]
    law, own = problem["delays"][job["delay"]]
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = gp.train(
                problem["task"], engine="virtual", protocol=protocol, modulation=modulation,
                learners=problem["learners"], batch_size=problem["batch_size"],
                optimizer=f"sgd:lr={job['rate']},momentum={problem['momentum']}",
                delay=law, delays=own, target=problem["target"],
                evaluate_every=problem["evaluate_every"], epochs=problem["epochs"],
                max_time=problem["max_time"], seed=job["seed"],
                out=Path(folder) / "run", progress=False,
            )  # fmt: skip
        except gp.Diverged as error:
            return {**job, "seconds": None, "stopped_by": "diverged", "result": _kept(error.result)}
    if run.result["stopped_by"] == "interrupted":  # ends well, and is not what was asked for
        raise KeyboardInterrupt
    seconds = run.result["target_reached_at"]
    stopped_by = run.result["stopped_by"]
    return {**job, "seconds": seconds, "stopped_by": stopped_by, "result": _kept(run.result)}


def _kept(result: dict[str, Any]) -> dict[str, Any]:
    keys = ("updates", "mean_staleness", "mini_batches_applied", "mini_batches_cancelled",
            "mini_batches_discarded")  # fmt: skip
    return {key: result[key] for key in keys}


def seconds_of(rows: Iterable[dict[str, Any]]) -> list[float]:
    return [math.inf if row["seconds"] is None else row["seconds"] for row in rows]


def best_rate(rows: list[dict[str, Any]], problem: str, delay: str, method: str) -> float | None:
    """The rate with the smallest mean time of the tuning seeds; None while some are missing."""
    mine = [row for row in rows if row["seed"] in TUNING and place_of(row)[:3]
            == (problem, delay, method)]  # fmt: skip
    rates = PROBLEMS[problem]["rates"]
    if len(mine) < len(rates) * len(TUNING):
        return None

    # Fewest failures first; the smaller of two rates that nobody can tell apart.
    def cost(rate: float) -> tuple[int, float, float]:
        found = seconds_of(row for row in mine if row["rate"] == rate)
        reached = [value for value in found if math.isfinite(value)]
        mean = statistics.mean(reached) if reached else math.inf
        return len(found) - len(reached), mean, rate

    return min(rates, key=cost)


def place_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["problem"], row["delay"], row["method"], row["rate"], row["seed"]


def jobs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is still to be run: the search for rates, then the judges' runs."""
    done, found = {place_of(row) for row in rows}, []
    for problem, settings in PROBLEMS.items():
        for delay in settings["delays"]:
            for method in settings["methods"]:
                rate = best_rate(rows, problem, delay, method)
                tried = settings["rates"] if rate is None else (rate,)
                for r in tried:
                    for seed in TUNING if rate is None else JUDGES:
                        job = {"problem": problem, "delay": delay, "method": method, "rate": r,
                               "seed": seed}  # fmt: skip
                        if place_of(job) not in done:
                            found.append(job)
    return found


def cell(rows: list[dict[str, Any]], problem: str, delay: str, method: str) -> tuple[float, str]:
    """Median seconds of the judges' runs, and it as text with their range and the rate."""
    rate = best_rate(rows, problem, delay, method)
    mine = [row for row in rows if place_of(row)[:4] == (problem, delay, method, rate)
            and row["seed"] in JUDGES]  # fmt: skip
    if not mine:
        return math.inf, ""
    seconds = sorted(seconds_of(mine))
    middle = statistics.median(seconds)
    if math.isinf(middle):
        return middle, f"not reached ({rate:g})"
    high = "∞" if math.isinf(seconds[-1]) else f"{seconds[-1]:.0f}"
    return middle, f"{middle:.0f} ({seconds[0]:.0f} to {high}; {rate:g})"


def tables(rows: list[dict[str, Any]]) -> str:
    """In Markdown; the best of each column is bold, and whoever is within 10 % of it italic."""
    lines = []
    for problem, settings in PROBLEMS.items():
        delays = list(settings["delays"])
        lines += [f"{problem}: seconds to {settings['target']}, median (range; rate)", ""]
        lines += ["| | " + " | ".join(delays) + " |", "|" + "---|" * (len(delays) + 1)]
        cells = {
            method: [cell(rows, problem, delay, method) for delay in delays]
            for method in settings["methods"]
        }
        best = [min(found[i][0] for found in cells.values()) for i in range(len(delays))]
        for method, found in cells.items():
            texts = []
            for (seconds, text), least in zip(found, best, strict=True):
                mark = "**" if seconds == least else "*" if seconds <= 1.1 * least else ""
                texts.append(f"{mark}{text}{mark}" if math.isfinite(seconds) else text)
            lines.append(f"| {method} | " + " | ".join(texts) + " |")
        lines.append("")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    arguments = parse(__doc__, HERE / "which_protocol.json", given)
    rows = read(arguments.out)
    while not arguments.tables and (to_do := jobs(rows)):
        print(f"{len(to_do)} runs", flush=True)
        each = [(job,) for job in to_do]
        for n, row in enumerate(as_they_end(train, each, arguments.at_once), 1):
            rows.append(row)
            if n % 20 == 0 or n == len(to_do):
                save(sorted(rows, key=place_of), arguments.out)
                print(f"  {n} done", flush=True)
    print(tables(rows))


if __name__ == "__main__":
    main()
