"""Networks, methods and limits that nobody thought of: runs are what the smallest engine makes of
them, whether they are interrupted or not."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import run as lockstep
from torch import nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.schedule import Schedule
from gruppetto.trace import read_trace
from gruppetto.training.clipping import CLIPS
from gruppetto.training.task import Task

WIDTH, CLASSES, EPOCHS = 6, 3, 2
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer-norm": lambda: nn.LayerNorm(WIDTH),
    "relu": lambda: nn.ReLU(),
    "relu-in-place": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.3),
    "tanh": lambda: nn.Tanh(),
}
#: Their backward passes need what they gave, which nothing may change in place.
KEEP_OUTPUTS = ("relu", "relu-in-place", "tanh")
OPTIMIZERS = (
    "sgd:lr=0.1",
    "sgd:lr=0.05,momentum=0.9",
    "sgd:lr=0.05,momentum=0.9,nesterov=true,weight_decay=0.01",
    "adam:lr=0.01",
    "adamw:lr=0.01,weight_decay=0.1",
    "rmsprop:lr=0.01",
)


@dataclass(frozen=True)
class Case:
    """One run; ``stop`` is the network version at which it is interrupted."""

    layers: tuple[str, ...]
    cuts: tuple[str, ...]
    method: str
    optimizer: str
    tail: Literal["drain", "drop"]
    batch_size: int
    samples: int
    stop: int
    clip: str | None

    @property
    def total(self) -> int:
        """Mini-batches."""
        return EPOCHS * -(-self.samples // self.batch_size)

    def task(self) -> Task:
        """Its network and data."""
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.samples, WIDTH, generator=generator)

        def model() -> nn.Module:
            layers = [LAYERS[name]() for name in self.layers]
            return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

        return Task(model=model, train=TensorDataset(x, torch.arange(self.samples) % CLASSES))

    def train(self, out: Path, updates: int | None = None) -> gp.Run:
        """In virtual time."""
        return gp.train(
            self.task(),
            decouple=self.method,
            cuts=self.cuts,
            engine="virtual",
            optimizer=self.optimizer,
            tail=self.tail,
            clip=self.clip,
            batch_size=self.batch_size,
            epochs=EPOCHS,
            updates=updates,
            evaluate="off",
            guard="off",
            progress=False,
            out=out,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers: list[str] = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6))
    for i, name in enumerate(layers):
        if name == "relu-in-place" and (i == 0 or layers[i - 1] in KEEP_OUTPUTS):
            layers[i] = "relu"
    places = st.integers(1, len(layers))
    cuts = sorted(draw(st.sets(places, max_size=3)))
    keys = [f"modules={len(cuts) + 1}"]
    name = draw(st.sampled_from(["bp", "ddg", "ddg", "fr", "fdg"]))
    if name == "ddg" and draw(st.booleans()):
        keys.append(draw(st.sampled_from(["stash=none", "lookahead=0.5", "schedule=barrier"])))
    if name == "fdg":
        keys.append(f"beta={draw(st.sampled_from([0.3, 1.0]))}")
    batch_size = draw(st.integers(2, 7))
    whole, rest = draw(st.integers(1, 4)), draw(st.integers(0, batch_size - 1))
    # BatchNorm cannot train on one sample.
    samples = whole * batch_size + (rest if rest != 1 else 0)
    total = EPOCHS * -(-samples // batch_size)
    method = f"{name}:{','.join(keys)}"
    # A run that would apply nothing is refused.
    tails = ["drain", "drop"] if total > METHODS.parse(method).delay(1) else ["drain"]
    return Case(
        layers=tuple(layers),
        cuts=tuple(str(cut) for cut in cuts),
        method=method,
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        tail=draw(st.sampled_from(tails)),
        batch_size=batch_size,
        samples=samples,
        stop=draw(st.integers(1, total)),
        clip=draw(st.sampled_from([None, "norm:max=0.3"])),
    )


def bits(run: gp.Run) -> dict[str, Any]:
    return {key: run.result[key] for key in ("weights_sha256", "state_sha256", "updates")}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_any_run_is_that_of_the_smallest_engine(case: Case) -> None:
    clip = None if case.clip is None else CLIPS.parse(case.clip)
    expected = lockstep(
        case.task(),
        case.method,
        list(case.cuts),
        case.total,
        optimizer=case.optimizer,
        batch_size=case.batch_size,
        tail=case.tail,
        clip=clip,
    )
    with tempfile.TemporaryDirectory() as folder:
        whole = case.train(Path(folder) / "whole")
        schedule = Schedule(METHODS.parse(case.method).delays, case.total, case.tail)
        last = schedule.last_version(1)
        assert bits(whole) == {
            "weights_sha256": expected.weights,
            "state_sha256": expected.state,
            "updates": last,
        }
        rows = read_trace(whole.folder.trace).modules
        for module in range(1, schedule.num_modules + 1):
            applied = [row.mini_batch for row in rows if row.module == module]
            assert applied == list(range(schedule.last_version(module) or 0)), module
        replayed = gp.replay(whole.folder.path, task=case.task(), progress=False)
        assert replayed["matches"], replayed["difference"]

        part = case.train(Path(folder) / "part", updates=case.stop)
        if part.result["stopped_by"] == "updates":
            assert part.result["updates"] == case.stop
            part = gp.resume(part.folder.path, task=case.task(), updates=case.total, progress=False)
        assert bits(part) == bits(whole)
        replayed = gp.replay(part.folder.path, task=case.task(), progress=False)
        assert replayed["matches"], replayed["difference"]
