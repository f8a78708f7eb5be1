"""``gruppetto tasks | protocols | modulations | delays | ...``: what there is."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from gruppetto.cli.options import as_json
from gruppetto.cli.output import print_json
from gruppetto.spec import Registry


def _show(rows: list[tuple[str, str]], kind: str, json: bool) -> None:
    if json:
        print_json({kind: [{"usage": usage, "summary": text} for usage, text in rows]})
        return
    for usage, text in rows:
        click.echo(f"{usage}\n    {text}")


def _listing(name: str, module: str, registries: Sequence[str], what: str) -> click.Command:
    """A command that lists registries of a module, loaded when the command runs."""

    @click.command(name, help=what)
    @as_json
    def command(as_json: bool) -> None:
        rows = []
        for registry in registries:
            found: Registry[Any] = getattr(import_module(module), registry)
            rows += [(found.usage(n), found.summary(n)) for n in found]
        _show(rows, name, as_json)

    return command


protocols = _listing(
    "protocols", "gruppetto.protocols", ["PROTOCOLS"], "List the protocols: who waits for whom."
)
methods = _listing(
    "methods",
    "gruppetto.decoupled.methods",
    ["METHODS"],
    "List the methods of decoupled backpropagation, for --decouple.",
)
modulations = _listing(
    "modulations",
    "gruppetto.staleness",
    ["MODULATIONS"],
    "List the modulations: what a late gradient is worth.",
)
compensations = _listing(
    "compensations",
    "gruppetto.staleness",
    ["COMPENSATIONS"],
    "List the compensations: how a late gradient is changed.",
)
warmups = _listing(
    "warmups", "gruppetto.protocols", ["WARMUPS"], "List the ways to begin before the protocol."
)
scalings = _listing(
    "scalings",
    "gruppetto.staleness",
    ["RATE_SCALINGS", "BATCH_SCALINGS"],
    "List the rules for learning rate and batch size by the number of learners.",
)
delays = _listing("delays", "gruppetto.delays", ["DELAYS"], "List the laws of delay, in seconds.")
clips = _listing(
    "clips",
    "gruppetto.training.clipping",
    ["CLIPS"],
    "List the ways to clip the combined gradient.",
)


guards = _listing(
    "guards", "gruppetto.protocols", ["GUARDS"], "List the rules by which losses end a run."
)


@click.command()
@as_json
def tasks(as_json: bool) -> None:
    """List the built-in tasks and their options."""
    from gruppetto.training.tasks import TASKS

    rows = []
    for name, make in TASKS.items():
        options = inspect.signature(make).parameters.values()
        keys = ",".join(f"{o.name}={str(o.default).lower()}" for o in options)
        rows.append((f"{name}:{keys}", (make.__doc__ or "").strip().split("\n")[0]))
    rows.append(("path/to/file.py[:name]", "Your own: a Task, or a function that returns one."))
    _show(rows, "tasks", as_json)


@click.command()
@as_json
def models(as_json: bool) -> None:
    """List the models that mnist and cifar10 know by name."""
    from gruppetto.training.models import MODELS

    rows = [(name, model.summary) for name, model in MODELS.items()]
    rows.append(("path/to/file.py:name", "Your own, for any task: a class or function, built from "
                 "no arguments."))  # fmt: skip
    _show(rows, "models", as_json)


@click.command()
@as_json
def optimizers(as_json: bool) -> None:
    """List the optimizers of this PyTorch and their keys."""
    from gruppetto.training.optimizers import optimizer_names

    rows = []
    for name, cls in optimizer_names().items():
        keys = [
            p
            for p in list(inspect.signature(cls.__init__).parameters)[2:]
            if p not in ("foreach", "capturable", "differentiable", "fused")
        ]
        rows.append((f"{name}:{'=,'.join(keys)}=", f"torch.optim.{cls.__name__}"))
    _show(rows, "optimizers", as_json)
