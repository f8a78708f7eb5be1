"""``gruppetto split``: where a network would be cut into modules, and what that would gain."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table

from gruppetto.cli.options import OPTIONS, as_json
from gruppetto.cli.output import print_json

if TYPE_CHECKING:
    from gruppetto.decoupled.split import Split

#: Options of ``train`` that mean the same here.
_PASSED_ON: Final = ("--model", "--data", "--batch-size", "--threads", "--device")
#: What is said of an option here, where that differs from ``train``.
_HELP: Final = {
    "--batch-size": "Samples of the mini-batch that is measured.  [the task's]",
    "--threads": "Threads of the computation that is measured.  [1]",
}
#: Characters that the table needs.
_WIDTH: Final = 120


def _passed_on(function: Any) -> Any:
    for option in reversed(OPTIONS):
        if option.flag in _PASSED_ON:
            text = _HELP.get(option.flag, option.help)
            function = click.option(
                option.flag, type=option.type, metavar=option.metavar, help=text
            )(function)
    return function


@click.command(
    epilog="Example: gruppetto split cifar10 --model resnet20 --data data/cifar10 --modules 3"
)
@click.argument("task")
@click.option("--modules", type=int, required=True, help="K, into how many the network is cut.")
@click.option(
    "--balance",
    default="time",
    metavar="HOW",
    help="What modules have equally much of: time, parameters, or shares of the time like 1/1/2.  "
    "[time]",
)
@click.option(
    "--cut",
    "cuts",
    multiple=True,
    metavar="NAME",
    help="Instead: the block with which the next module begins, as in named_modules(); K - 1 "
    "times, in order.",
)
@_passed_on
@click.option("--seed", type=int, default=0, help="Of the weights and the mini-batch.  [0]")
@as_json
def split(
    task: str,
    modules: int,
    balance: str,
    cuts: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Cut the network of TASK into K modules for decoupled backpropagation.

    Every block is run on one mini-batch and measured. Nothing is trained or written. TASK as for
    train.
    """
    from gruppetto.runs.split import split_task

    given = {key: value for key, value in options.items() if value is not None}
    found, settings = split_task(task, modules, balance=balance, cuts=cuts, **given)
    words = shlex.join(_words(found))
    if as_json:
        asked = {"task": settings.task, "model": settings.model, "batch_size": settings.batch_size}
        print_json({**asked, "balance": balance, **_as_dict(found), "options": words})
    else:
        _show(found, settings.batch_size, words)


def _words(found: Split) -> list[str]:
    words = ["--decouple", f"ddg:modules={found.num_modules}"]
    for name in found.begins:
        words += ["--cut", name]
    return words


def _as_dict(found: Split) -> dict[str, Any]:
    columns = {
        "parameters": found.parameters,
        "operations": found.operations,
        "forward": found.forward,
        "backward": found.backward,
        "share": found.shares,
        "saved_bytes": found.saved_bytes,
        "output_bytes": found.output_bytes,
    }
    return {
        "modules": found.num_modules,
        "begins": list(found.begins),
        "free_running_speedup": found.free_running_speedup,
        "barrier_speedup": found.barrier_speedup,
        "imbalance": found.imbalance,
        "per_module": [
            {
                "module": k + 1,
                "blocks": list(names),
                **{key: None if column is None else column[k] for key, column in columns.items()},
            }
            for k, names in enumerate(found.names)
        ],
        "per_block": [
            {
                "name": cost.name,
                "module": k + 1,
                "parameters": cost.parameters,
                "operations": cost.operations,
                "forward": cost.forward,
                "backward": cost.backward,
                "saved_bytes": cost.saved_bytes,
                "output_bytes": cost.output_bytes,
            }
            for k, module in enumerate(found.modules)
            for cost in module
        ],
    }


def _show(found: Split, batch_size: int, words: str) -> None:
    console = Console(highlight=False)
    # A line that is too long for the terminal is still better than numbers cut short.
    console.width = max(console.width, _WIDTH)
    blocks = _table("block", "module", "parameters", "forward, ms", "backward, ms", "gives, KiB")
    for k, module in enumerate(found.modules):
        for cost in module:
            blocks.add_row(
                cost.name,
                str(k + 1),
                f"{cost.parameters:,}",
                _milliseconds(cost.forward),
                _milliseconds(cost.backward),
                _kib(cost.output_bytes),
            )
    console.print(blocks)
    modules = _table(
        "blocks", "module", "parameters", "forward, ms", "backward, ms", "share", "keeps, KiB",
        "crosses, KiB",
    )  # fmt: skip
    forward, backward = found.forward or (), found.backward or ()
    for k, names in enumerate(found.names):
        crosses = found.output_bytes[k]
        modules.add_row(
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            str(k + 1),
            f"{found.parameters[k]:,}",
            _milliseconds(forward[k]),
            _milliseconds(backward[k]),
            f"{found.shares[k]:.1%}",
            _kib(found.saved_bytes[k]),
            _kib(crosses) if crosses else "",
        )
    console.print()
    console.print(modules)
    console.print()
    console.print(
        f"One mini-batch of {batch_size} takes {_milliseconds(sum(forward) + sum(backward))} ms in "
        f"all. Predicted over backpropagation on one device: {found.free_running_speedup:.2f} "
        f"times as fast free-running, {found.barrier_speedup:.2f} times with a barrier.",
        soft_wrap=True,
    )
    console.print(words, soft_wrap=True, markup=False)


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:,.4g}" if num_bytes < 1e7 else f"{num_bytes / 1024:,.0f}"
