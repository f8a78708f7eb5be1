"""The options of ``train`` and ``compare``: one table, so that both take the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from gruppetto.errors import InvalidSetting

__all__ = ["OPTIONS", "as_json", "out", "quiet", "run_options", "split_delays", "tensorboard"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """One option of a run."""

    flag: str
    type: Any
    help: str
    metavar: str | None = None

    @property
    def key(self) -> str:
        """The setting it sets."""
        return self.flag.lstrip("-").replace("-", "_")


OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "--protocol", str, "Who waits for whom; see `gruppetto protocols`.  [hardsync]", "NAME:K=V"
    ),
    Option(
        "--warmup",
        str,
        "How to begin, like hardsync:epochs=1; see `gruppetto warmups`.  [with the protocol]",
        "NAME:K=V",
    ),
    Option("--learners", int, "How many compute gradients.  [4]"),
    Option(
        "--decouple",
        str,
        "Instead of protocol and learners: the network is cut into modules that train in parallel, "
        "like ddg:modules=2; see `gruppetto methods`.  [one network that learners share]",
        "METHOD:modules=K",
    ),
    Option(
        "--cut",
        str,
        "The block at which the next module begins, as `gruppetto split` names it; K - 1 times.  "
        "[by balance]",
        "NAME",
    ),
    Option(
        "--balance",
        str,
        "What modules have equally much of: time, parameters, or shares of the time like 1/1/2.  "
        "[time]",
        "HOW",
    ),
    Option(
        "--tail",
        click.Choice(["drain", "drop"]),
        "Whether modules apply what is in flight at the end.  [drain]",
    ),
    Option(
        "--pass-times",
        str,
        "In virtual time, forward/backward seconds of each module's passes, like 0.1/0.2,0.1/0.2, "
        "or measured.  [by counted operations, 1/2 in all]",
        "F/B,...",
    ),
    Option("--batch-size", int, "Samples of one mini-batch, per learner.  [the task's]"),
    Option(
        "--scale-batch",
        str,
        "Instead of a batch size, a rule for it, like product:total=128; see "
        "`gruppetto scalings`.  [none]",
        "NAME:K=V",
    ),
    Option("--epochs", float, "Passes over the data.  [the task's, unless updates or max-time]"),
    Option("--updates", int, "Stop after so many updates."),
    Option("--max-time", float, "Stop after so many seconds of run time."),
    Option("--target", str, "Stop when an evaluation reaches it, like accuracy=0.95.", "METRIC=X"),
    Option(
        "--engine",
        click.Choice(["local", "virtual"]),
        "Real processes on this machine, or virtual time in one process.  [local]",
    ),
    Option(
        "--model",
        str,
        "Another model: a name of `gruppetto models` for mnist and cifar10, or FILE.py:NAME.  "
        "[the task's]",
        "MODEL",
    ),
    Option("--data", click.Path(path_type=Path), "Folder of the data, for mnist and cifar10."),
    Option(
        "--delay",
        str,
        "How long a mini-batch takes, in seconds (with real processes: sleeps besides); I=LAW for "
        "learner I alone; see `gruppetto delays`.  [none; constant:value=1 in virtual time]",
        "[I=]LAW:K=V",
    ),
    Option("--optimizer", str, "Like sgd:lr=0.1,momentum=0.9.  [the task's]", "NAME:K=V"),
    Option(
        "--scale-lr",
        str,
        "A rule that multiplies the optimizer's rate, like sqrt-batch:batch=32; see "
        "`gruppetto scalings`.  [none]",
        "NAME:K=V",
    ),
    Option(
        "--modulation",
        str,
        "What a late gradient is worth; see `gruppetto modulations`.  "
        "[inverse-mean:cap=true for asynchronous protocols, else none]",
        "NAME:K=V",
    ),
    Option(
        "--compensation",
        str,
        "How late gradients are changed, like dc-asgd; see `gruppetto compensations`.  [none]",
        "NAME:K=V",
    ),
    Option("--clip", str, "Clip the combined gradient: norm:max= or value:max=.", "NAME:K=V"),
    Option(
        "--on-late",
        click.Choice(["requeue", "drop"]),
        "What happens to mini-batches cancelled or lost.  [requeue]",
    ),
    Option(
        "--max-staleness",
        int,
        "Apply no gradient staler than so many updates; a key of asynchronous protocols.  [none]",
    ),
    Option(
        "--on-stale",
        click.Choice(["discard", "restart", "wait"]),
        "What becomes of gradients beyond max-staleness: thrown away on arrival, computed anew as "
        "soon as they are, or waited for.  [restart]",
    ),
    Option("--max-attempts", int, "Give a mini-batch up after so many failures.  [3]"),
    Option("--max-given-up", int, "Fail when more mini-batches are given up.  [0]"),
    Option(
        "--guard",
        str,
        "End a run whose losses leave the sane range, like loss:factor=4, or off; see "
        "`gruppetto guards`.  [loss]",
        "NAME:K=V",
    ),
    Option("--faults", str, "Make things go wrong, like random:die=0.01,seed=1.", "random:K=V"),
    Option(
        "--max-restarts",
        int,
        "Replace so many learners that die, in the whole run; not in virtual time.  [3]",
    ),
    Option(
        "--evaluate",
        click.Choice(["live", "deferred", "off"]),
        "Evaluate on test data while the run goes on, after its clock has stopped, or not at all."
        "  [live; compare: deferred]",
    ),
    Option("--evaluate-every", float, "Epochs between evaluations.  [1]"),
    Option(
        "--recalibrate-bn",
        int,
        "Average BatchNorm's statistics anew over so many mini-batches for each evaluation.  [0]",
    ),
    Option(
        "--measure-gamma",
        int,
        "At each evaluation, measure on so many training samples how far staleness moves the "
        "gradient.  [0]",
    ),
    Option("--seed", int, "Of everything random.  [0]"),
    Option("--threads", int, "Threads of each gradient's computation.  [1]"),
    Option("--device", str, "Where tensors live, like cuda:0.  [cpu]"),
    Option("--memory", float, "GiB that weights and gradients may take.  [half of what is free]"),
    Option(
        "--initial", click.Path(path_type=Path), "Weights to start from: FILE.pt, .safetensors."
    ),
)

_ONE_LEARNER = re.compile(r"^(\d+)=(.*)$")


def run_options(multiple: bool) -> Callable[[F], F]:
    """Add every option of a run; ``multiple`` lets each be given several times."""

    def add(function: F) -> F:
        for option in reversed(OPTIONS):
            function = click.option(
                option.flag,
                *(["cuts"] if option.flag == "--cut" else []),
                type=option.type,
                metavar=option.metavar,
                # A learner's own delay is given beside the common one, and each cut by itself.
                multiple=multiple or option.flag in ("--delay", "--cut"),
                help=option.help,
            )(function)
        return function

    return add


def split_delays(texts: Sequence[str]) -> tuple[list[str], dict[int, str]]:
    """``exponential:mean=1``, ``3=constant:value=9`` -> common laws, and learners' own.

    Raises:
        InvalidSetting: two laws for one learner.
    """
    common: list[str] = []
    own: dict[int, str] = {}
    for text in texts:
        match = _ONE_LEARNER.match(text)
        if match is None:
            common.append(text)
        elif int(match[1]) in own:
            raise InvalidSetting(f"delay: learner {match[1]} is given two laws")
        else:
            own[int(match[1])] = match[2]
    return common, own


def tensorboard(function: F) -> F:
    """--tensorboard"""
    return click.option(
        "--tensorboard", is_flag=True, help="Also log to RUN/tensorboard; needs that package."
    )(function)


def as_json(function: F) -> F:
    """--json"""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on standard output."
    )(function)


def quiet(function: F) -> F:
    """--quiet"""
    return click.option("-q", "--quiet", is_flag=True, help="No progress on standard error.")(
        function
    )


def out(what: str) -> Callable[[F], F]:
    """--out"""
    return click.option("--out", type=click.Path(path_type=Path), help=what)
