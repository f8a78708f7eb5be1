"""How much slower is what the planner recommends than the best of all it looked at?

Digits to an accuracy of 0.95 in virtual time, in 20 regimes of delays drawn from a seeded
generator: family, parameters, 4 to 16 learners, in some one learner several times slower, in some
no variation. For each, ``gruppetto.plan`` recommends; then every candidate is trained with seeds 0,
1 and 2, which the planner's pilot runs do not use, and judged by its median time to the target. A
run is stopped at 3 times the best median known by then and counts as that long.

The best of 25 medians of three is mostly luck, so candidates within 1.6 times of it, and the
recommended one, are trained with ten more seeds.

    regret      chosen / best - 1, medians of seeds 0, 1 and 2
    oracle      the same for the candidate that ten other seeds find best: what remains for somebody
                who knows more than any planner, and so is the judge's own noise
    ten seeds   chosen / best - 1, geometric means of those ten seeds, best by them, too
    judge       standard error of a median of three seeds, as a share of it

    python experiments/planner_regret.py           # about 30 minutes on one core; continues

Lines go to planner_regret.jsonl as they are made; the end writes planner_regret.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import gruppetto as gp
from gruppetto.protocols import PROTOCOLS
from gruppetto.runs.plan_pilot import rate_keywords
from gruppetto.theory.planner import Choice
from gruppetto.training.tasks import load_task

TARGET = "accuracy=0.95"
JUDGES, MORE_JUDGES = (0, 1, 2), tuple(range(10, 20))
LIMIT, CLOSE = 3.0, 1.6
#: A median of three of a normal variable has this standard error, in standard deviations.
MEDIAN_ERROR = 0.67
FAMILIES = ("exponential", "shifted-exponential", "uniform", "gamma", "weibull", "lognormal",
            "pareto", "bimodal", "constant")  # fmt: skip


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


def judge(task: Any, case: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    base = {"target": TARGET, **{key: case[key] for key in ("learners", "delay", "delays")}}
    started = time.perf_counter()
    found = gp.plan("digits", progress=False, budget=arguments.budget, **base)
    planned = time.perf_counter() - started
    medians: dict[int, float] = {}
    times: dict[int, list[float]] = {}
    for number, candidate in enumerate(found.candidates):
        limit = LIMIT * min(medians.values()) if medians else 2000.0
        times[number] = [round(train(task, base, candidate, seed, limit), 2) for seed in JUDGES]
        medians[number] = statistics.median(times[number])
    chosen = found.candidates.index(found.recommendation)
    best = min(medians, key=lambda n: medians[n])
    hardsync = next(n for n, c in enumerate(found.candidates) if c.protocol == "hardsync")
    close = {n for n in medians if medians[n] <= CLOSE * medians[best]} | {chosen}
    limit = LIMIT * medians[best]
    more = {
        n: [round(train(task, base, found.candidates[n], seed, limit), 2) for seed in MORE_JUDGES]
        for n in sorted(close)
    }
    means = {n: math.exp(statistics.mean(map(math.log, seen))) for n, seen in more.items()}
    oracle = min(means, key=lambda n: means[n])
    spreads = [statistics.stdev(map(math.log, seen)) ** 2 for seen in more.values()]

    def name(n: int) -> str:
        c = found.candidates[n]
        factor = f" x{c.learning_rate_factor:.2f}" if c.learning_rate_factor < 1 else ""
        return c.protocol + factor

    return {
        **case,
        "chosen": name(chosen), "best": name(best),
        "chosen_time": medians[chosen], "best_time": medians[best],
        "hardsync_time": medians[hardsync],
        "predicted_time": found.recommendation.time_to_target,
        "predicted_band": found.recommendation.time_to_target_band,
        "regret": medians[chosen] / medians[best] - 1.0,
        "oracle": name(oracle),
        "oracle_regret": medians[oracle] / medians[best] - 1.0,
        "ten_seeds_regret": means[chosen] / means[oracle] - 1.0,
        "chosen_mean": means[chosen],
        "judge_error": MEDIAN_ERROR * math.sqrt(statistics.mean(spreads)),
        "epochs_spent": found.spent, "seconds_to_plan": planned, "why": found.why,
        "times": {name(n): t for n, t in times.items()},
        "more_times": {name(n): t for n, t in more.items()},
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'P':>3} {'delays':44} {'chosen':22} {'hardsync':>8} {'chosen':>7} {'best':>6} "
          f"{'regret':>7} {'oracle':>7} {'ten seeds':>9} {'judge':>6}")  # fmt: skip
    for row in rows:
        slow = "".join(f" {n}={d.split('=')[1]}" for n, d in row["delays"].items())
        print(f"{row['learners']:3} {row['delay'] + slow:44} {row['chosen']:22} "
              f"{row['hardsync_time']:8.1f} {row['chosen_time']:7.1f} {row['best_time']:6.1f} "
              f"{row['regret']:7.1%} {row['oracle_regret']:7.1%} {row['ten_seeds_regret']:9.1%} "
              f"{row['judge_error']:6.1%}", flush=True)  # fmt: skip
    for key in ("regret", "oracle_regret", "ten_seeds_regret", "judge_error"):
        values = [row[key] for row in rows]
        print(f"{key}: median {statistics.median(values):.1%}, mean {statistics.mean(values):.1%}, "
              f"maximum {max(values):.1%}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--regimes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--budget", type=float, help="of each plan, in epochs")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    lines = arguments.out.with_suffix(".jsonl")
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    task = load_task("digits")
    for number in range(arguments.regimes):
        if any(row["number"] == number for row in done):
            continue
        row = judge(task, regime(number, arguments.seed), arguments)
        done.append(row)
        with lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        show([row])
    done.sort(key=lambda row: row["number"])
    show(done)
    seeds = {"regimes": arguments.seed, "judges": JUDGES, "more_judges": MORE_JUDGES}
    written = ",\n".join(json.dumps(row) for row in done)
    arguments.out.write_text(f'{{"seeds": {json.dumps(seeds)},\n"rows": [\n{written}\n]}}\n')


if __name__ == "__main__":
    main()
