"""``gruppetto tasks | protocols | modulations | delays | optimizers | clips``: what there is."""

from __future__ import annotations

import inspect
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


def _rows(registry: Registry[Any]) -> list[tuple[str, str]]:
    return [(registry.usage(name), registry.summary(name)) for name in registry]


@click.command()
@as_json
def protocols(as_json: bool) -> None:
    """List the protocols: who waits for whom."""
    from gruppetto.protocols import PROTOCOLS

    _show(_rows(PROTOCOLS), "protocols", as_json)


@click.command()
@as_json
def modulations(as_json: bool) -> None:
    """List the modulations: what a late gradient is worth."""
    from gruppetto.staleness import MODULATIONS

    _show(_rows(MODULATIONS), "modulations", as_json)


@click.command()
@as_json
def delays(as_json: bool) -> None:
    """List the laws of delay, in seconds."""
    from gruppetto.delays import DELAYS

    _show(_rows(DELAYS), "delays", as_json)


@click.command()
@as_json
def clips(as_json: bool) -> None:
    """List the ways to clip the combined gradient."""
    from gruppetto.training.clipping import CLIPS

    _show(_rows(CLIPS), "clips", as_json)


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
