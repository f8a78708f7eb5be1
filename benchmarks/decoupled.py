"""Speed of decoupled backpropagation, beside backpropagation and PyTorch's pipelines.

A residual network for CIFAR-10 is cut into two modules of equal measured time, one process, one
thread and one core each. All contenders train it on the same cut with mini-batches of 128 random
pictures and SGD with Nesterov momentum; they take turns in one run, a block of mini-batches each,
while the others are stopped. ``ratio`` is the time of ``bp``, the same engine without delay, over
that of a contender, round by round. Bounds, with K = 2: free-running ``ddg`` at least 1.70 in the
median and 1.75 at best, where 2 is the limit; and faster than both of PyTorch's schedules, 1F1B and
GPipe, with 2, 4 or 8 micro-batches, whichever is best. (In those, BatchNorm normalises each
micro-batch by itself; it is another, slightly cheaper computation.)

The table ``model`` has the barrier schedule beside T_F + T_B/K, the time of a mini-batch when
forward passes take turns and backward passes do not, for equal modules; and beside what the
schedule gives for these modules, as they are. The table ``predicted`` has what the schedule
gives for K modules with the pass times measured here, one block after the other in one process,
beside the speed-ups of the papers on as many GPUs (ResNet-110).

    python benchmarks/decoupled.py --json
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import tempfile
from typing import Any

import decoupled_peers as peers
from common import load, parser, report
from decoupled_contenders import Block, Lane, Workers, cores, rounds
from decoupled_ours import Run, predicted_period

K = 2
BARRIER, ONE_PROCESS = "ddg barrier", "one process, 2 threads"
OURS = {
    "bp": f"bp:modules={K}",
    "ddg": f"ddg:modules={K}",
    BARRIER: f"ddg:modules={K},schedule=barrier",
}
MICRO_BATCHES = [2, 4, 8]
#: Speed-ups of DDG over backpropagation on 2, 3 and 4 GPUs, digitised from the authors' figure.
PAPERS = {2: 1.40, 3: 1.70, 4: 1.82}
BOUNDS = {"median": 1.70, "best": 1.75}


def depth_of(model: str) -> int:
    """56 of ``resnet56``."""
    if not model.startswith("resnet"):
        raise argparse.ArgumentTypeError(f"expected a model like resnet56, got {model!r}")
    return int(model.removeprefix("resnet"))


def ratios(found: dict[str, list[Block]], name: str, over: str = "bp") -> list[float]:
    """Round by round, how many times faster a contender is than another one."""
    return [
        slow.seconds / fast.seconds for slow, fast in zip(found[over], found[name], strict=True)
    ]


def seconds(blocks: list[Block]) -> float:
    """Median time of a mini-batch."""
    return statistics.median(block.seconds for block in blocks)


def speed(table: str, found: dict[str, list[Block]]) -> list[dict[str, Any]]:
    """A row per contender."""
    rows = []
    for name, blocks in found.items():
        over_bp = ratios(found, name)
        rows.append(
            {
                "table": table,
                "contender": name,
                "s_per_mini_batch": seconds(blocks),
                "cpu_s": statistics.median(block.cpu_seconds for block in blocks),
                "ratio": statistics.median(over_bp),
                "best": max(over_bp),
                "worst": min(over_bp),
            }
        )
    return rows


def verdicts(table: str, found: dict[str, list[Block]]) -> list[dict[str, Any]]:
    """Free-running DDG beside its bounds and beside the best of each of PyTorch's schedules."""
    over_bp = ratios(found, "ddg")
    rows: list[dict[str, Any]] = [
        {"table": table, "ddg_over": "bp", "median": statistics.median(over_bp),
         "bound": BOUNDS["median"], "best": max(over_bp), "bound_best": BOUNDS["best"]}
    ]  # fmt: skip
    for schedule in peers.SCHEDULES:
        mine = {name: blocks for name, blocks in found.items() if name.startswith(schedule)}
        best = min(mine, key=lambda name: seconds(mine[name]))
        over = ratios(found, "ddg", best)
        rows.append({"table": table, "ddg_over": best, "median": statistics.median(over),
                     "bound": 1.0, "best": max(over), "bound_best": 1.0})  # fmt: skip
    return rows


def module_passes(blocks: list[Block]) -> list[tuple[float, float]]:
    """Seconds of each module's forward pass, and of its backward pass and step; medians."""
    found = []
    for k in range(len(blocks[0].passes)):
        of_module = [passes for block in blocks for passes in block.passes[k]]
        forward, backward, step = (statistics.median(part) for part in zip(*of_module, strict=True))
        found.append((forward, backward + step))
    return found


def model(table: str, found: dict[str, list[Block]]) -> list[dict[str, Any]]:
    """Both schedules of DDG beside their models, from the passes of ``bp`` in this run."""
    passes = module_passes(found["bp"])
    forward, backward = (sum(part) for part in zip(*passes, strict=True))
    rows = []
    for name, formula, equal in (
        (BARRIER, "T_F + T_B/K", forward + backward / K),
        ("ddg", "(T_F + T_B)/K", (forward + backward) / K),
    ):
        scheduled, measured = predicted_period(OURS[name], passes), seconds(found[name])
        rows.append(
            {
                "table": table,
                "contender": name,
                "T_F": forward,
                "T_B": backward,
                "modules": " ".join(f"{f:.3f}+{b:.3f}" for f, b in passes),
                "formula": formula,
                "formula_s": equal,
                "schedule_s": scheduled,
                "measured_s": measured,
                "measured_over_formula": measured / equal,
            }
        )
    return rows


def predictions(table: str, blocks: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """What K modules give by their schedule, of blocks measured one after the other."""
    rows = []
    for num_modules, paper in PAPERS.items():
        edges = [0, *peers.cut([sum(block) for block in blocks], num_modules), len(blocks)]
        passes = [
            tuple(sum(part) for part in zip(*blocks[a:b], strict=True))
            for a, b in itertools.pairwise(edges)
        ]
        whole = sum(map(sum, blocks))
        speedups = {
            name: whole / predicted_period(method, passes)
            for name, method in (
                ("barrier", f"ddg:modules={num_modules},schedule=barrier"),
                ("free_running", f"ddg:modules={num_modules}"),
            )
        }
        rows.append({"table": table, "K": num_modules, "cuts": edges[1:-1], **speedups,
                     "paper": paper, "limit": float(num_modules)})  # fmt: skip
    return rows


def block_passes(depth: int, batch_size: int, num: int) -> list[tuple[float, float]]:
    """Seconds of forward pass, and of backward pass and step, of each block of the network."""
    workers = Workers(peers.block_times, (depth, batch_size), [{cores(1)[0]}])
    try:
        workers.start()
        workers.run("", 1)
        (blocks,) = workers.run("", num).passes
    finally:
        workers.stop()
    return [(forward, backward + step) for forward, backward, step in blocks]


def bench(depth: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one network."""
    blocks = block_passes(depth, options.batch_size, 2 if options.quick else 3)
    cuts = peers.cut([sum(block) for block in blocks], K)
    places = [{core} for core in cores(K)]
    with tempfile.TemporaryDirectory() as folder:
        pipelines = Workers(
            peers.pipeline,
            (f"{folder}/store", depth, options.batch_size, cuts, options.micro_batches),
            places,
        )
        alone = Workers(peers.one_process, (depth, options.batch_size, K), [set.union(*places)])
        ours = [
            Run(name, method, depth, options.batch_size, cuts, places, f"{folder}/{number}")
            for number, (name, method) in enumerate(OURS.items())
        ]
        theirs = [
            *(
                Lane(f"{schedule}/{number}", pipelines)
                for schedule in peers.SCHEDULES
                for number in options.micro_batches
            ),
            Lane(ONE_PROCESS, alone),
        ]
        found = rounds([*ours, *theirs], options.repeats, options.block, tell)
    name = f"ResNet-{depth}, cut at block {cuts[0]} of {len(blocks)}"
    return [
        *speed(f"{name}: seconds per mini-batch of {options.batch_size}", found),
        *verdicts(f"{name}: how many times faster", found),
        *model(f"{name}: model", found),
        *predictions(f"ResNet-{depth}: predicted", blocks),
    ]


def tell(line: str) -> None:
    """Progress, for whoever waits."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", action="append", type=depth_of, dest="depths",
                         metavar="MODEL", help="may be repeated [resnet56 resnet110]")  # fmt: skip
    options.add_argument("--batch-size", type=int, default=128, help="[128]")
    options.add_argument("--block", type=int, default=4, help="mini-batches of a turn [4]")
    options.add_argument("--quick", action="store_true", help="a short run that proves nothing")
    arguments = options.parse_args()
    arguments.micro_batches = MICRO_BATCHES
    if arguments.quick:
        arguments.depths, arguments.batch_size = [8], 16
        arguments.repeats, arguments.block, arguments.micro_batches = 2, 2, [2]
    # An end from outside must not leave stopped processes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    before = load()
    rows = [row for depth in arguments.depths or (56, 110) for row in bench(depth, arguments)]
    report(rows, before, arguments.json)


if __name__ == "__main__":
    main()
