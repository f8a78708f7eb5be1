"""Memory of decoupled backpropagation: what each module's process takes, beside what is predicted.

A residual network for CIFAR-10 is cut into K = 2, 3 and 4 modules of about equal time, and trained
by every method for twice its largest delay and four mini-batches more, with real processes.
``measured`` is the most that a module's process took beyond what it had before its first pass, as
the kernel counts it, the largest of all repeats; ``predicted`` is what the summary of a run says,
and ``in_flight`` the closed form for mini-batches between their passes, which both contain:
d + 1 graphs and copies of weights, or d + 1 inputs and one graph (``fr``). MiB; the same on a busy
machine.

    python benchmarks/decoupled_memory.py --json
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import load, parser, report
from decoupled_ours import OPTIMIZER, Pictures

import gruppetto as gp
from decoupled import depth_of, tell
from gruppetto.decoupled.memory import StageBytes, bytes_in_flight
from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.network import Network
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.models.resnet import ResNet
from gruppetto.training.optimizers import parse_optimizer
from gruppetto.training.server import Updating

NAMES = ("bp", "ddg", "ddg:stash=none", "fr", "fdg")
MIB = 1 << 20


def sizes_of(task: gp.Task, spec: str, begins: Sequence[str], batch_size: int) -> list[StageBytes]:
    """What one mini-batch takes in each module."""
    network = Network(
        task,
        METHODS.parse(spec),
        begins,
        Updating(parse_optimizer(OPTIMIZER)),
        0,
        MiniBatches(task, batch_size, 0),
        torch.device("cpu"),
    )
    return list(network.probe.modules)


def run(
    task: gp.Task, spec: str, begins: Sequence[str], batch_size: int, updates: int
) -> dict[str, Any]:
    """A run of so many mini-batches: its summary."""
    with tempfile.TemporaryDirectory() as folder:
        return gp.train(
            task,
            decouple=spec,
            cuts=begins,
            engine="local",
            batch_size=batch_size,
            updates=updates,
            optimizer=OPTIMIZER,
            evaluate="off",
            out=f"{folder}/run",
            progress=False,
        ).result


def bench(
    depth: int, num_modules: int, batch_size: int, repeats: int, more: int
) -> list[dict[str, Any]]:
    """All methods, on the cut that the first of them was given."""
    task = gp.Task(partial(ResNet, depth), Pictures(batch_size), name=f"resnet{depth}")
    begins: Sequence[str] = ()
    rows = []
    for name in NAMES:
        spec = f"{name}{',' if ':' in name else ':'}modules={num_modules}"
        method = METHODS.parse(spec)
        updates = 2 * max(method.delays) + more
        tell(f"ResNet-{depth}, {spec}, {updates} mini-batches")
        runs = [run(task, spec, begins, batch_size, updates)]
        begins = runs[0]["begins"]
        runs += [run(task, spec, begins, batch_size, updates) for _ in range(repeats - 1)]
        sizes = sizes_of(task, spec, begins, batch_size)
        for module, (size, delay) in enumerate(zip(sizes, method.delays, strict=True)):
            measured = max(each["per_module"][module]["peak_bytes"] for each in runs)
            predicted = runs[0]["per_module"][module]["predicted_bytes"]
            rows.append(
                {
                    "table": f"ResNet-{depth} in {num_modules} modules, cut at {', '.join(begins)}",
                    "method": name,
                    "module": module + 1,
                    "delay": delay,
                    "graph": round(size.graph / MIB, 1),
                    "in_flight": round(bytes_in_flight(size, method.keeps, delay) / MIB, 1),
                    "predicted": round(predicted / MIB, 1),
                    "measured": round(measured / MIB, 1),
                    "ratio": round(measured / predicted, 2),
                }
            )
    return rows


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=1)
    options.add_argument("--model", type=depth_of, default=20, dest="depth", help="[resnet20]")
    options.add_argument("--batch-size", type=int, default=128, help="[128]")
    options.add_argument(
        "--modules", type=int, action="append", help="K, may be repeated [2, 3, 4]"
    )
    options.add_argument(
        "--more", type=int, default=4, help="mini-batches beyond twice the delay [4]"
    )
    options.add_argument("--quick", action="store_true", help="a short run that proves nothing")
    arguments = options.parse_args()
    modules = arguments.modules or [2, 3, 4]
    if arguments.quick:
        arguments.depth, arguments.batch_size, modules = 8, 16, [2]
    before = load()
    rows = [
        row
        for num_modules in modules
        for row in bench(
            arguments.depth, num_modules, arguments.batch_size, arguments.repeats, arguments.more
        )
    ]
    report(rows, before, arguments.json)


if __name__ == "__main__":
    main()
