"""What commands print: one JSON object, or something to read, on standard output; the rest on
standard error."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

__all__ = ["Failed", "Interrupted", "finish", "print_json"]

#: Label, key, form; of a decoupled run, what only learners have is not shown.
_SHOWN = (
    ("test accuracy", "test_accuracy", "{:.4f}"),
    ("test loss", "test_loss", "{:.4g}"),
    ("train loss", "train_loss", "{:.4g}"),
    ("stopped by", "stopped_by", "{}"),
    ("epochs", "epochs", "{:.4g}"),
    ("updates", "updates", "{:,}"),
    ("run time, s", "time", "{:.6g}"),
    ("wall time, s", "wall_time", "{:.3g}"),
    ("target reached at, s", "target_reached_at", "{:.6g}"),
    ("mean staleness", "mean_staleness", "{:.2f}"),
    ("max staleness", "max_staleness", "{}"),
    ("fresh gradients", "fresh_fraction", "{:.1%}"),
    ("gamma", "gamma", "{:.3g}"),
    ("mini-batches applied", "mini_batches_applied", "{:,}"),
    ("cancelled", "mini_batches_cancelled", "{:,}"),
    ("discarded", "mini_batches_discarded", "{:,}"),
    ("dropped", "mini_batches_dropped", "{:,}"),
    ("weights sha256", "weights_sha256", "{}"),
    ("run", "run", "{}"),
)
_OF_LEARNERS = ("mini_batches_cancelled", "mini_batches_discarded")


class Interrupted(Exception):
    """A run was interrupted and can be continued; its summary is printed. Exit 130."""


class Failed(Exception):
    """What was asked for failed, and everything to say about it is printed. Exit 1."""


def finish(result: dict[str, Any], as_json: bool) -> None:
    """Print a run's summary.

    Raises:
        Interrupted: the run was; after its summary is printed.
    """
    interrupted = result["stopped_by"] == "interrupted"
    if as_json:
        print_json({**result, "interrupted": True} if interrupted else result)
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        left_out = _OF_LEARNERS if result.get("decouple") else ()
        for label, key, form in _SHOWN:
            if result.get(key) is not None and key not in left_out:
                table.add_row(label, form.format(result[key]))
        for name, value in result.get("metrics", {}).items():
            if name not in ("loss", "accuracy"):
                table.add_row(f"test {name}", "not finite" if value is None else f"{value:.4g}")
        Console(highlight=False, soft_wrap=True).print(table)
        if result.get("without_contribution_why"):
            click.echo(result["without_contribution_why"])
    if interrupted:
        raise Interrupted(f"interrupted; continue with: gruppetto resume {result['run']}")


def print_json(value: dict[str, Any]) -> None:
    """Exactly one object."""
    click.echo(json.dumps(value))
