"""Does the planner's order of choices agree with measured times to the target?

Digits to a test loss of 0.25 and MNIST (softmax regression) to 0.89 test accuracy, 8 learners, two
laws of delays, virtual time. ``gruppetto.plan`` orders its candidates; each is then trained with
seeds 0, 1 and 2, which pilot runs do not use, and its median time to the target measured. A run is
stopped at 8 times the best median so far and counts as that long; those that are stopped tie.

    python experiments/planner_rank.py              # digits only: some minutes
    python experiments/planner_rank.py --data DIR   # MNIST, too; it continues where it was stopped

Prints Spearman's rank correlation, and as a miss each choice whose places differ by more than a
quarter of all. Lines go to planner_rank.jsonl; the end writes planner_rank.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from planner_regret import EVERY, TARGET, fast, train
from scipy.stats import rankdata, spearmanr

import gruppetto as gp
from gruppetto.training.tasks import load_task

LAWS = ("exponential:mean=1", "pareto:shape=2,scale=0.5")
LEARNERS, SEEDS, LIMIT, FAR = 8, (0, 1, 2), 8.0, 0.25


def cases(data: str | None) -> list[tuple[str, str, dict[str, Any]]]:
    """Task, target, and what all its runs are told."""
    found: list[tuple[str, str, dict[str, Any]]] = [("digits", TARGET, {"evaluate_every": EVERY})]
    if data is not None:
        told = {"data": data, "model": "softmax", "evaluate_every": 0.1}
        found.append(("mnist", "accuracy=0.89", told))
    return found


def compare(
    task: str, target: str, law: str, told: dict[str, Any], budget: float
) -> dict[str, Any]:
    """Places by the planner and places measured."""
    plan = gp.plan(
        task, delay=law, learners=LEARNERS, target=target, budget=budget, progress=False, **told
    )
    loaded = load_task(task, model=told.get("model"), data=told.get("data"))
    if task == "digits":
        loaded = fast(loaded)
    rest = {key: value for key, value in told.items() if key not in ("data", "model")}
    base = {"learners": LEARNERS, "delay": law, "target": target, **rest}
    limit, measured = 10_000.0, []
    for candidate in plan.candidates:
        times = [train(loaded, base, candidate, seed, limit) for seed in SEEDS]
        measured.append(statistics.median(times))
        limit = min(limit, LIMIT * min(measured))
    measured = [min(seconds, limit) for seconds in measured]
    predicted = rankdata(range(len(measured)))
    actual = rankdata(measured)
    rows = [
        {
            "choice": f"{c.protocol} x{c.learning_rate_factor:.2f}",
            "predicted": c.time_to_target,
            "measured": m,
            "places": [float(p), float(a)],
        }
        for c, m, p, a in zip(plan.candidates, measured, predicted, actual, strict=True)
    ]
    far = FAR * len(rows)
    return {
        "task": task, "law": law, "target": target, "spent": plan.spent,
        "spearman": float(spearmanr(predicted, actual).statistic), "rows": rows,
        "stopped": sum(m >= limit for m in measured),
        "misses": [r for r in rows if abs(r["places"][0] - r["places"][1]) > far],
    }  # fmt: skip


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="folder of MNIST")
    parser.add_argument("--budget", type=float, default=120.0, help="epochs of pilot runs")
    arguments = parser.parse_args()
    lines = Path(__file__).with_suffix(".jsonl")
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    for task, target, told in cases(arguments.data):
        for law in LAWS:
            if not any((d["task"], d["law"]) == (task, law) for d in done):
                budget = 300.0 if task == "digits" else arguments.budget
                done.append(compare(task, target, law, told, budget))
                with lines.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
            row = next(d for d in done if (d["task"], d["law"]) == (task, law))
            print(f"{task}, {law}: Spearman {row['spearman']:.2f} over {len(row['rows'])}, "
                  f"{row['stopped']} stopped")  # fmt: skip
            for miss in row["misses"]:
                print(f"  {miss['choice']}: place {miss['places'][0]:.0f} planned, "
                      f"{miss['places'][1]:.0f} measured")  # fmt: skip
    Path(__file__).with_suffix(".json").write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
