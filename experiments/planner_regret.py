"""How much slower is what the planner recommends than the best of all it looked at?

Digits to a test loss of 0.25 in virtual time (an accuracy of about 0.93), evaluated 40 times an
epoch, in 20 regimes of delays drawn from a seeded generator: family, parameters, 4 to 16 learners,
in some one learner several times slower, in some no variation. For each, ``gruppetto.plan``
recommends; then every candidate is trained in virtual time and judged by its median time over three
seeds, which the planner's pilot runs do not use.

One median of three seeds is uncertain by a tenth, and the best of 25 is a lucky one. So whoever may
be the best is trained with more seeds, up to 24, and its *typical median* is the geometric mean of
the medians of all triples of them. All candidates get seeds 0 to 2, those within 1.4 times the best
0 to 8, those within 1.15 times 0 to 23, and so does the recommended one. A run is stopped at
twice the best known by then (hardsync: 5 times) and counts as that long.

    regret      chosen / best - 1, typical medians; the best is the best by them, so that chance
                can only add to it
    its error   standard error of that, by a jackknife over seeds
    halved      the best is found by half of the seeds and compared by the other half, both ways:
                no luck of the best in it
    three       chosen / best - 1, plain medians of seeds 0, 1 and 2
    oracle      the same for the candidate that the other seeds find best: what remains for
                somebody who knows more than any planner, and so is the noise of three seeds

    python experiments/planner_regret.py              # about 10 minutes on one core; continues
    python experiments/planner_regret.py --again 13   # then: a regime's chosen and best once more,
                                                      # with 48 seeds that have not judged yet

Lines go to planner_regret.jsonl as they are made; the end writes planner_regret.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.protocols import PROTOCOLS
from gruppetto.runs.plan_pilot import rate_keywords
from gruppetto.theory.planner import Choice
from gruppetto.training.tasks import load_task

TARGET, EVERY = "loss=0.25", 0.025
#: Seeds, and who gets them: those within so many times of the best by fewer seeds.
STAGES = ((range(3), math.inf), (range(9), 1.4), (range(24), 1.15))
#: Seeds of a second opinion.
AGAIN = range(24, 72)
LIMIT, HARDSYNC_LIMIT = 2.0, 5.0
FAMILIES = ("exponential", "shifted-exponential", "uniform", "gamma", "weibull", "lognormal",
            "pareto", "bimodal", "constant")  # fmt: skip


class WholeBatches(TensorDataset):
    """Tensors that are evaluated without a loop over samples; the numbers are the same."""

    def make_batch(self, indices: torch.Tensor, generator: torch.Generator | None) -> Any:
        """Rows of all tensors."""
        return [tensor[indices] for tensor in self.tensors]


def fast(task: Any) -> Any:
    """The same task, evaluated faster."""
    return replace(task, test=WholeBatches(*task.test.tensors))


def regime(number: int, seed: int) -> dict[str, Any]:
    """Delays with a mean of about 1 second."""
    rng = np.random.default_rng([seed, number])
    learners = int(rng.integers(4, 17))
    family = FAMILIES[int(rng.integers(len(FAMILIES)))]
    u = float(rng.random())
    often = 0.02 + 0.2 * float(rng.random())
    law = {
        "exponential": "exponential:mean=1",
        "shifted-exponential": f"shifted-exponential:shift={u:.2f},mean={1 - u:.2f}",
        "uniform": f"uniform:low={u:.2f},high={2 - u:.2f}",
        "gamma": f"gamma:shape={0.5 + 4 * u:.2f},scale={1 / (0.5 + 4 * u):.2f}",
        "weibull": f"weibull:shape={0.6 + 2 * u:.2f},scale=1",
        "lognormal": f"lognormal:median=1,sigma={0.1 + u:.2f}",
        "pareto": f"pareto:shape={1.3 + 2 * u:.2f},scale=0.5",
        "bimodal": f"bimodal:fast=0.8,slow={2 + 8 * u:.1f},p_slow={often:.2f}",
        "constant": "constant:value=1",
    }[family]
    own = {}
    if rng.random() < 0.35:
        own[learners - 1] = f"constant:value={2 + 8 * float(rng.random()):.1f}"
    return {"number": number, "learners": learners, "delay": law, "delays": own}


def train(task: Any, base: dict[str, Any], candidate: Any, seed: int, limit: float) -> float:
    """Seconds to the target, or the limit."""
    choice = Choice(
        PROTOCOLS.parse(candidate.protocol), candidate.batch_size, candidate.learning_rate_factor
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = gp.train(
                task, engine="virtual", protocol=candidate.protocol, seed=seed,
                max_time=limit, out=Path(folder) / "run", progress=False, **base,
                **rate_keywords(choice, base["learners"], {"batch_size": candidate.batch_size}),
            )  # fmt: skip
        except gp.Diverged:
            return limit
    if run.result["stopped_by"] == "interrupted":
        raise KeyboardInterrupt
    return float(run.result["time"]) if run.result["stopped_by"] == "target" else limit


def typical_median(times: list[float]) -> float:
    """Geometric mean of the medians of all triples.

    >>> typical_median([1.0, 2.0, 9.0])
    2.0
    """
    logs, n = np.log(np.sort(times)), len(times)
    # The i-th smallest is the median of so many triples.
    weights = np.array([i * (n - 1 - i) for i in range(n)])
    return math.exp(float(logs @ weights) / math.comb(n, 3))


class Judge:
    """Trains candidates, each with as many seeds as it is worth."""

    def __init__(self, task: Any, base: dict[str, Any], candidates: dict[str, Any]) -> None:
        self._task, self._base, self._candidates = task, base, candidates
        #: name -> seed -> seconds.
        self.times: dict[str, dict[int, float]] = {}

    def measure(self, always: str) -> None:
        """Train all, the best and ``always`` most often."""
        names, fastest = list(self._candidates), math.inf
        for seeds, close in STAGES:
            if self.times:
                best = min(self.typical(n) for n in self.times)
                names = [n for n in self.times if self.typical(n) <= close * best or n == always]
                fastest = best
            for name in names:
                self.train(name, seeds, fastest)
                fastest = min(fastest, self.typical(name))

    def train(self, name: str, seeds: range, best: float) -> None:
        """Train one with these seeds, where the best so far takes so many seconds."""
        times = self.times.setdefault(name, {})
        limit = min(best * (HARDSYNC_LIMIT if name == "hardsync" else LIMIT), 5000.0)
        for seed in seeds:
            if seed not in times:
                found = train(self._task, self._base, self._candidates[name], seed, limit)
                times[seed] = round(found, 3)

    def typical(self, name: str, seeds: list[int] | None = None) -> float:
        times = self.times[name]
        return typical_median([times[seed] for seed in (times if seeds is None else seeds)])

    def three(self, name: str) -> float:
        return self.typical(name, [0, 1, 2])

    def halved(self, chosen: str) -> float:
        """Regret against a best that other seeds have found."""
        most = max(map(len, self.times.values()))
        final = [n for n, times in self.times.items() if len(times) == most]
        logs = []
        for half in (0, 1):
            seeds = list(range(most))
            found = min(final, key=lambda n: self.typical(n, seeds[half::2]))
            other = seeds[1 - half :: 2]
            logs.append(math.log(self.typical(chosen, other) / self.typical(found, other)))
        return math.exp(statistics.mean(logs)) - 1.0

    def error(self, chosen: str, best: str) -> float:
        """Standard error of the logarithm of chosen / best."""
        seeds = sorted(self.times[chosen].keys() & self.times[best].keys())
        left = []
        for out in seeds:
            rest = [seed for seed in seeds if seed != out]
            left.append(math.log(self.typical(chosen, rest) / self.typical(best, rest)))
        return math.sqrt((len(seeds) - 1) * statistics.pvariance(left))

    def spread(self) -> float:
        """Standard deviation of the logarithm of a time, over those with all seeds."""
        most = max(map(len, self.times.values()))
        seen = [t.values() for t in self.times.values() if len(t) == most]
        return math.sqrt(statistics.mean(statistics.variance(map(math.log, t)) for t in seen))


def ask_again(task: Any, row: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Chosen and best by seeds of which nobody has been picked."""
    names = (row["chosen"], row["best"])
    candidates = {}
    for name in names:
        protocol, _, factor = name.partition(" x")
        candidates[name] = SimpleNamespace(
            protocol=protocol, batch_size=task.batch_size, learning_rate_factor=float(factor or 1)
        )
    judge = Judge(task, conditions(row, arguments), candidates)
    for name in names:
        judge.train(name, AGAIN, row["best_time"])
    chosen, best = map(judge.typical, names)
    return (
        f"{names[0]} {chosen:.1f} s, {names[1]} {best:.1f} s: {chosen / best - 1:.1%}, "
        f"error {judge.error(*names):.1%}, {len(AGAIN)} seeds"
    )


def conditions(case: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What all runs in a regime are told."""
    delays = {int(learner): law for learner, law in case["delays"].items()}
    told = {"learners": case["learners"], "delay": case["delay"], "delays": delays}
    return {**told, "target": arguments.target, "evaluate_every": arguments.evaluate_every}


def name_of(candidate: Any) -> str:
    """As tables show it."""
    factor = candidate.learning_rate_factor
    return str(candidate.protocol) + (f" x{factor:.2f}" if factor < 1 else "")


def look_at(task: Any, case: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan, judge, compare."""
    base = conditions(case, arguments)
    started = time.perf_counter()
    found = gp.plan(task, progress=False, budget=arguments.budget, **base)
    planned = time.perf_counter() - started
    judge = Judge(task, base, {name_of(c): c for c in found.candidates})
    chosen = name_of(found.recommendation)
    judge.measure(chosen)
    best = min(judge.times, key=judge.typical)
    best_of_three = min(judge.times, key=judge.three)
    most = max(map(len, judge.times.values()))
    others = list(range(3, most))
    oracle = min((n for n, t in judge.times.items() if len(t) == most),
                 key=lambda n: judge.typical(n, others))  # fmt: skip
    return {
        **case,
        "chosen": chosen, "best": best,
        "chosen_time": judge.typical(chosen), "best_time": judge.typical(best),
        "hardsync_time": judge.typical("hardsync"),
        "predicted_time": found.recommendation.time_to_target,
        "predicted_band": found.recommendation.time_to_target_band,
        "regret": judge.typical(chosen) / judge.typical(best) - 1.0,
        "error": judge.error(chosen, best),
        "halved": judge.halved(chosen),
        "three": judge.three(chosen) / judge.three(best_of_three) - 1.0,
        "oracle": judge.three(oracle) / judge.three(best_of_three) - 1.0,
        "spread": judge.spread(),
        "epochs_spent": found.spent, "seconds_to_plan": planned, "why": found.why,
        "times": {name: list(times.values()) for name, times in judge.times.items()},
    }  # fmt: skip


COLUMNS = ("regret", "error", "halved", "three", "oracle", "spread")


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each."""
    print(f"{'P':>3} {'delays':44} {'chosen':22} {'hardsync':>8} {'chosen':>7} {'best':>6} "
          + " ".join(f"{key:>7}" for key in COLUMNS))  # fmt: skip
    for row in rows:
        slow = "".join(f" {n}={d.split('=')[1]}" for n, d in row["delays"].items())
        print(f"{row['learners']:3} {row['delay'] + slow:44} {row['chosen']:22} "
              f"{row['hardsync_time']:8.1f} {row['chosen_time']:7.1f} {row['best_time']:6.1f} "
              + " ".join(f"{row[key]:7.1%}" for key in COLUMNS), flush=True)  # fmt: skip


def summarise(rows: list[dict[str, Any]]) -> None:
    """What the page says."""
    for key in COLUMNS:
        values = [row[key] for row in rows]
        print(f"{key}: median {statistics.median(values):.1%}, mean {statistics.mean(values):.1%}, "
              f"maximum {max(values):.1%}, above 10 %: {sum(v > 0.1 for v in values)} of "
              f"{len(values)}", flush=True)  # fmt: skip


def main() -> None:
    """Look at what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--regimes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=977)
    parser.add_argument("--budget", type=float, help="of each plan, in epochs")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--evaluate-every", type=float, default=EVERY, help="epochs")
    parser.add_argument("--again", type=int, metavar="NUMBER", help="of a regime looked at before")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    lines = arguments.out.with_suffix(".jsonl")
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    task = fast(load_task("digits"))
    if arguments.again is not None:
        rows = json.loads(arguments.out.read_text())["rows"]
        row = next(row for row in rows if row["number"] == arguments.again)
        print(ask_again(task, row, arguments))
        return
    for number in range(arguments.regimes):
        if any(row["number"] == number for row in done):
            continue
        row = look_at(task, regime(number, arguments.seed), arguments)
        done.append(row)
        with lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        show([row])
    done.sort(key=lambda row: row["number"])
    show(done)
    summarise(done)
    told = {"seed": arguments.seed, "target": arguments.target}
    told["evaluate_every"] = arguments.evaluate_every
    written = ",\n".join(json.dumps(row) for row in done)
    arguments.out.write_text(f'{{"told": {json.dumps(told)},\n"rows": [\n{written}\n]}}\n')


if __name__ == "__main__":
    main()
