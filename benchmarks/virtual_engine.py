"""Cost of the virtual engine per mini-batch beside the gradient itself, at P = 30.

The gradient is forward, loss and backward. Everything else counts as ours. Of that, the learner's
part is fetching, random streams, copying weights in and the gradient out, and checking it; the
engine's part is coordinator, agenda, delays, combining, the optimizer's step, trace and checkpoints
(one per epoch of 90 mini-batches). Bound: 150 µs per mini-batch on a small network (digits). The
peer is the plain PyTorch loop over the same mini-batches, which has fetch, zero_grad and step.

    python benchmarks/virtual_engine.py --json
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from common import load, median_of, parser, report
from torch import nn

import gruppetto as gp
from gruppetto.training.learner import Learner
from gruppetto.training.tasks import load_task

EPOCHS = 10
BOUND = 150.0


class Stopwatch:
    """Seconds spent in forward, loss and backward, and in all of ``Learner.compute``."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.learner_seconds = 0.0


def timed_task(stopwatch: Stopwatch) -> gp.Task:
    """Digits, its gradient timed."""
    digits = load_task("digits")

    def inputs(batch: Any) -> tuple[Any, ...]:
        stopwatch.seconds -= time.perf_counter()
        return (batch[0],)

    return gp.Task(
        model=digits.model,
        train=digits.train,
        inputs=inputs,
        optimizer=digits.optimizer,
        batch_size=digits.batch_size,
        name="digits, timed",
    )


def ours(protocol: str) -> dict[str, float]:
    """One run; the stopwatch runs from the model's input to the end of backward."""
    stopwatch = Stopwatch()
    task = timed_task(stopwatch)
    backward = torch.Tensor.backward

    def timed_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(self, *args, **kwargs)
        stopwatch.seconds += time.perf_counter()

    compute = Learner.compute

    def timed_compute(self: Learner, mini_batch: int, weights: Any) -> Any:
        begin = time.perf_counter()
        gradient = compute(self, mini_batch, weights)
        stopwatch.learner_seconds += time.perf_counter() - begin
        return gradient

    Learner.compute = timed_compute  # type: ignore[method-assign]
    torch.Tensor.backward = timed_backward  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = gp.train(
                task,
                protocol=protocol,
                learners=30,
                epochs=EPOCHS,
                delay="exponential:mean=1",
                evaluate="off",
                progress=False,
                out=folder,
                engine="virtual",
            )
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        Learner.compute = compute  # type: ignore[method-assign]
    count = run.result["mini_batches_applied"]
    return {
        "ours_us": 1e6 * (run.result["wall_time"] - stopwatch.seconds) / count,
        "of_it_learner_us": 1e6 * (stopwatch.learner_seconds - stopwatch.seconds) / count,
        "of_it_engine_us": 1e6 * (run.result["wall_time"] - stopwatch.learner_seconds) / count,
        "gradient_us": 1e6 * stopwatch.seconds / count,
    }


def plain_loop() -> dict[str, float]:
    """The same number of mini-batches in an ordinary loop, its gradient not counted."""
    torch.set_num_threads(1)
    task = load_task("digits")
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pixels, labels = task.train.tensors
    begin = time.perf_counter()
    gradient = 0.0
    count = 0
    for _ in range(EPOCHS):
        for indices in torch.randperm(len(labels)).split(16):
            x, y = pixels[indices], labels[indices]
            optimizer.zero_grad()
            gradient -= time.perf_counter()
            nn.functional.cross_entropy(model(x), y).backward()
            gradient += time.perf_counter()
            optimizer.step()
            count += 1
    return {"plain_loop_us": 1e6 * (time.perf_counter() - begin - gradient) / count}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    before = load()
    plain_loop()
    ours("async")  # imports and first-use costs
    rows = []
    for protocol in ("hardsync", "k-sync:k=15", "k-batch-async:k=15", "async"):
        figures = median_of(arguments.repeats, lambda p=protocol: {**ours(p), **plain_loop()})
        rows.append(
            {
                "protocol": protocol,
                "learners": 30,
                **figures,
                "ratio": figures["ours_us"] / figures["plain_loop_us"],
                "bound_us": BOUND,
            }
        )
    report(rows, before, arguments.json)


if __name__ == "__main__":
    main()
