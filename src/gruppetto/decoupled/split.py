"""Where a chain of blocks is cut, so that its modules take equally long."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

import torch
from torch import nn

from gruppetto.decoupled.chain import chain_of, model_inputs
from gruppetto.decoupled.costs import BlockCost, count_costs, measure_costs
from gruppetto.errors import InvalidSetting
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.randomness import keep_global_randomness
from gruppetto.training.task import Task, to_device

__all__ = ["SLACK", "Split", "choose_split", "read_balance", "split_model"]

#: Measured times count as equal up to this share.
SLACK: Final = 0.15
#: Seconds of a whole mini-batch below which times say nothing.
_TOO_SHORT: Final = 0.005
_BALANCES: Final = ("time", "parameters")

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Split:
    """A chain cut into K modules. What is said per module is a tuple, module 1 first.

    Args:
        begins: names of the blocks with which modules 2 to K begin.
        costs: of all blocks, in order.
    """

    begins: tuple[str, ...]
    costs: tuple[BlockCost, ...]

    @property
    def modules(self) -> tuple[tuple[BlockCost, ...], ...]:
        """The blocks of each module."""
        names = [cost.name for cost in self.costs]
        bounds = [0, *(names.index(name) for name in self.begins), len(names)]
        return tuple(self.costs[a:b] for a, b in pairwise(bounds))

    @property
    def num_modules(self) -> int:
        """K."""
        return len(self.begins) + 1

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the blocks of each module."""
        return tuple(tuple(cost.name for cost in module) for module in self.modules)

    @property
    def parameters(self) -> tuple[int, ...]:
        """Numbers in the parameters."""
        return self._sums(lambda cost: cost.parameters)

    @property
    def operations(self) -> tuple[float, ...]:
        """Counted operations for one mini-batch, both passes."""
        return self._sums(lambda cost: cost.operations)

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        """Bytes kept between the forward and the backward pass of one mini-batch."""
        return tuple(
            sum(c.saved_bytes for c in module) - sum(c.shared_bytes for c in module[1:])
            for module in self.modules
        )

    @property
    def output_bytes(self) -> tuple[int, ...]:
        """Bytes that cross the cut after it, each way; 0 after module K."""
        return (*(module[-1].output_bytes for module in self.modules[:-1]), 0)

    @property
    def is_measured(self) -> bool:
        """Whether there are seconds."""
        return _are_measured(self.costs)

    @property
    def forward(self) -> tuple[float, ...] | None:
        """Seconds of a forward pass; None if not measured."""
        return self._sums(lambda cost: cost.forward or 0.0) if self.is_measured else None

    @property
    def backward(self) -> tuple[float, ...] | None:
        """Seconds of a backward pass; None if not measured."""
        return self._sums(lambda cost: cost.backward or 0.0) if self.is_measured else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Of a mini-batch's time, or of its operations where that is not measured."""
        if self.forward is not None and self.backward is not None:
            weights = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        else:
            weights = list(self.operations)
        total = sum(weights)
        return tuple(w / total if total else 1.0 / len(weights) for w in weights)

    @property
    def imbalance(self) -> float:
        """The largest module beside the mean one, by :attr:`shares`; 1 is perfect."""
        return max(self.shares) * len(self.shares)

    @property
    def free_running_speedup(self) -> float:
        """Over backpropagation on one device, where modules wait for nothing but their inputs:
        (T_F + T_B) / max(F_k + B_k), and nothing for what crosses the cuts."""
        return 1.0 / max(self.shares)

    @property
    def barrier_speedup(self) -> float | None:
        """The same where forward passes are in turn and a barrier ends each iteration, as in
        arXiv:1804.10574: (T_F + T_B) / (T_F + max B_k); None if not measured."""
        if self.forward is None or self.backward is None:
            return None
        ahead = sum(self.forward)
        return (ahead + sum(self.backward)) / (ahead + max(self.backward))

    def _sums(self, value: Callable[[BlockCost], T]) -> tuple[T, ...]:
        return tuple(sum(value(cost) for cost in module) for module in self.modules)


def read_balance(balance: str | Sequence[float], modules: int) -> str | tuple[float, ...]:
    """``time``, ``parameters``, or the share of each module.

    Args:
        balance: one of these words, or shares, also as text like ``1/1/2``.
        modules: K.

    Raises:
        InvalidSetting: another word, or shares that are not K numbers above 0.
    """
    if isinstance(balance, str) and balance in _BALANCES:
        return balance
    try:
        parts = balance.split("/") if isinstance(balance, str) else balance
        shares = tuple(float(part) for part in parts)
    except (TypeError, ValueError):
        shares = ()
    if not shares or not all(0.0 < share < math.inf for share in shares):
        raise InvalidSetting(
            f"balance: expected time, parameters, or shares above 0 like 1/1/2, got {balance!r}"
        )
    if len(shares) != modules:
        raise InvalidSetting(
            f"balance: expected {modules} shares for {modules} modules, got {len(shares)}"
        )
    return shares


def choose_split(
    costs: Sequence[BlockCost], modules: int, balance: str | Sequence[float] = "time"
) -> Split:
    """The cut whose largest module is smallest: exactly, by dynamic programming.

    With ``time`` or shares, a module's size is the seconds of its passes. But measured times
    differ from one measurement to the next, and equal runs are to be cut alike. So all cuts
    whose largest module takes at most 15 % longer than the best one's count as equally good, and
    of these the one that is best by counted operations is taken. Where a mini-batch takes less than
    5 ms in all, or is not measured, counted operations alone decide.

    With ``parameters``, a module's size is the number of its parameters, and operations decide
    between equals.

    Args:
        costs: of the blocks, in order.
        modules: K.
        balance: ``time``, ``parameters``, or shares: module k's size is divided by the k-th.

    Raises:
        InvalidSetting: fewer blocks than modules, or another balance.
    """
    _check_modules(modules)
    read = read_balance(balance, modules)
    if len(costs) < modules:
        raise InvalidSetting(
            f"modules: expected at most {len(costs)}, the blocks of the model, got {modules}"
        )
    shares = (1.0,) * modules if isinstance(read, str) else read
    operations = [cost.operations for cost in costs]
    slack = 0.0
    if read == "parameters":
        sizes = [float(cost.parameters) for cost in costs]
    else:
        slack = SLACK
        sizes = operations
        seconds = [(cost.forward or 0.0) + (cost.backward or 0.0) for cost in costs]
        if _are_measured(costs) and sum(seconds) >= _TOO_SHORT:
            sizes = seconds
    best, cuts = _cut(sizes, shares)
    if sizes is not operations:
        # Rounding of sums must not exclude the best one itself.
        limit = best * (1.0 + slack) * (1.0 + 1e-12)
        _, cuts = _cut(operations, shares, sizes, limit)
    return Split(tuple(costs[i].name for i in cuts), tuple(costs))


def split_model(
    model: nn.Module,
    task: Task,
    mini_batches: MiniBatches,
    *,
    modules: int,
    balance: str | Sequence[float] = "time",
    cuts: Sequence[str] = (),
    device: torch.device,
    always_measure: bool = False,
) -> Split:
    """Cut a model where its modules take equally long, or where the user says.

    Mini-batch 0 is run through the model, which is left as it was, as are the global random
    numbers. Times are measured only where they decide: not with ``cuts``, not for a model of
    exactly K blocks, not for a balance by parameters.

    Args:
        model: on the device, in training mode.
        task: its inputs and loss.
        mini_batches: of the run.
        modules: K.
        balance: see :func:`choose_split`.
        cuts: instead, the blocks with which modules 2 to K begin.
        device: where the model is.
        always_measure: also where times decide nothing.

    Raises:
        InvalidSetting: a model that cannot be cut, or not there, or has too few blocks.
        TaskError: the model fails on the mini-batch.
    """
    _check_modules(modules)
    read = read_balance(balance, modules)
    if cuts and len(cuts) != modules - 1:
        raise InvalidSetting(
            f"cuts: expected {modules - 1} for {modules} modules, got {len(cuts)}: "
            f"{', '.join(cuts)}"
        )
    with keep_global_randomness():
        batch = to_device(mini_batches.fetch(0, device)[0], device)
    chain = chain_of(model, model_inputs(task, batch), cuts, modules)
    if len(chain.blocks) < modules:
        why = chain.why_not_more
        raise InvalidSetting(
            f"modules: expected at most {len(chain.blocks)}, the blocks of the model, got {modules}"
            + (f"; {why}" if why else "")
        )
    is_decided = bool(cuts) or len(chain.blocks) == modules or read == "parameters"
    cost = count_costs if is_decided and not always_measure else measure_costs
    costs = cost(chain, task, batch, device)
    if cuts:
        begins = tuple(chain.blocks[i].name for i in chain.positions(cuts))
        return Split(begins, costs)
    return choose_split(costs, modules, read)


def _cut(
    sizes: Sequence[float],
    shares: Sequence[float],
    limited: Sequence[float] | None = None,
    limit: float = math.inf,
) -> tuple[float, list[int]]:
    """The smallest possible largest part of a sequence cut into parts, and where it is cut.

    Args:
        sizes: of the elements.
        shares: part k counts as its size divided by ``shares[k]``.
        limited: other sizes of the elements, by which no part may count more than ``limit``.

    Returns:
        The size of the largest part, and the first elements of all parts but the first.
    """
    n = len(sizes)
    sums = _running(sizes)
    others = _running(limited or [0.0] * n)
    # Largest part and begin of the last one, for the first j elements in so many parts.
    rows: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, 0)] * n]
    for k, share in enumerate(shares):
        row = [(math.inf, 0)] * (n + 1)
        for j in range(k + 1, n + 1):
            row[j] = min(
                (
                    (max(rows[k][i][0], (sums[j] - sums[i]) / share), i)
                    for i in range(k, j)
                    if (others[j] - others[i]) / share <= limit
                ),
                default=row[j],
            )
        rows.append(row)
    cuts, j = [], n
    for k in range(len(shares), 1, -1):
        j = rows[k][j][1]
        cuts.append(j)
    return rows[len(shares)][n][0], cuts[::-1]


def _running(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _are_measured(costs: Sequence[BlockCost]) -> bool:
    return all(cost.forward is not None and cost.backward is not None for cost in costs)


def _check_modules(modules: int) -> None:
    if modules < 1:
        raise InvalidSetting(f"modules: expected at least 1, got {modules}")
