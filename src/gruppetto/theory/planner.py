"""What a planner has to choose from, and how it decides.

Training is not done here: :mod:`gruppetto.runs.plan_pilot` measures how many updates a choice needs
to reach a target, :mod:`gruppetto.theory.machines` knows how long these take, and this file turns
seconds into bands and one recommendation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gruppetto.protocols import (
    Async,
    Hardsync,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Protocol,
)
from gruppetto.theory.machines import UpdateTime

__all__ = [
    "Choice",
    "candidates",
    "center_and_band",
    "decide",
    "floor_ratio",
    "may_be_best",
    "pooled_spread",
]

#: Of a standard normal variable, 80 % lie within this of 0. Bands hold so much.
_Z80: Final = 1.2815515655446004
#: Before anything was repeated: logarithms of the updates to a target differ by so much between
#: seeds, on digits, and this counts like so many repeats.
_PRIOR_SPREAD: Final = 0.25
_PRIOR_WEIGHT: Final = 4
#: Of two choices whose times differ by less, the simpler is taken.
_ALIKE: Final = 1.03
#: Standard errors by which chance alone may have moved a typical time.
_CHANCE: Final = 1.25


@dataclass(frozen=True)
class Choice:
    """What can be chosen: who waits for whom, the mini-batch, and how much of the rate to keep."""

    protocol: Protocol
    #: μ, samples of one learner's mini-batch.
    batch_size: int
    #: Multiplies the learning rate that hardsync has.
    rate_factor: float

    @property
    def complexity(self) -> int:
        """0 for hardsync, 1 for k-sync, 2 for what may be stale or computed several times over."""
        if isinstance(self.protocol, Hardsync):
            return 0
        return 1 if isinstance(self.protocol, KSync) else 2


# ------------------------------------------------------------------- the choices


def candidates(
    num_learners: int, batch_size: int, *, fixed_share: float = 1.0, total: int | None = None
) -> tuple[Choice, ...]:
    """Everything that is looked at, plain hardsync first; fewer than 60.

    K is P, P - 1, 3P/4, P/2, P/4 and 1, as far as a cell has a use for it. Where K is at most P/2
    the rate is tried as it is and times sqrt(K μ'/(P μ)): Rudra's rule, by which a step follows the
    root of the samples in an update. n-softsync is k-batch-async with another name.

    Args:
        num_learners: P.
        batch_size: μ, of one learner.
        fixed_share: of a mini-batch's time, the part that does not depend on its size. Other sizes
            are looked at only where it is below 1: half, and the one that keeps Rudra's product.
        total: that product, in samples; None for no such rule.

    >>> [choice.rate_factor for choice in candidates(4, 16) if isinstance(choice.protocol, Async)]
    [1.0, 0.5]
    """
    p = num_learners
    found = [Choice(Hardsync(), batch_size, 1.0)]
    for protocol in _protocols(p):
        found.append(Choice(protocol, batch_size, 1.0))
        k = protocol.num_to_wait(p)
        if 2 * k <= p:
            found.append(Choice(protocol, batch_size, math.sqrt(k / p)))
    if fixed_share < 1.0:
        for size in _other_sizes(p, batch_size, total):
            for protocol in _fewer_protocols(p):
                factor = math.sqrt(protocol.num_to_wait(p) * size / (p * batch_size))
                found.append(Choice(protocol, size, factor))
    return tuple(dict.fromkeys(found))


def _protocols(p: int) -> list[Protocol]:
    quarter, half, most = max(1, p // 4), max(1, p // 2), -(-3 * p // 4)
    found: list[Protocol] = []
    found += [KSync(k) for k in sorted({1, quarter, half, most, p - 1}) if 1 <= k < p]
    found += [KBatchSync(k) for k in sorted({half, p, 2 * p}) if k > 1]
    found += [KAsync(k) for k in sorted({quarter, half, most}) if 1 < k < p]
    found += [Async()] if p > 1 else []
    found += [KBatchAsync(k) for k in sorted({quarter, half, p}) if k > 1]
    return found


def _fewer_protocols(p: int) -> list[Protocol]:
    half, most = max(1, p // 2), -(-3 * p // 4)
    found: list[Protocol] = [Hardsync()]
    found += [KSync(k) for k in sorted({half, most}) if k < p]
    if p > 1:
        found += [KBatchSync(p), KBatchAsync(p), KBatchAsync(half) if half > 1 else Async()]
    return found


def _other_sizes(p: int, batch_size: int, total: int | None) -> list[int]:
    sizes = [batch_size // 2]
    if total is not None:
        sizes.append(round(total / p))
    return sorted({size for size in sizes if size >= 1} - {batch_size})


# ---------------------------------------------------------------------- deciding


def floor_ratio(choice: Choice, hardsync: Choice, num_learners: int, fresh: float) -> float:
    """Where the bound on the error ends, over where it ends for hardsync.

    η L σ²/(2 c γ' K m) for both, so that L, σ² and c cancel. γ' = 1 - γ + p₀/2 is taken with γ = 0,
    the least that staleness can do, and as 1.5 for the cells that cancel, to compare like with
    like: of a stale choice this is a lower bound. Plain SGD: neither momentum nor modulation is in
    it.

    >>> hardsync = Choice(Hardsync(), 16, 1.0)
    >>> floor_ratio(Choice(KSync(2), 16, 0.5), hardsync, 8, fresh=1.0)
    2.0
    """
    samples = choice.protocol.num_to_wait(num_learners) * choice.batch_size
    gamma_prime = 1.0 + fresh / 2.0
    ours = choice.rate_factor / (gamma_prime * samples)
    return ours * 1.5 * num_learners * hardsync.batch_size / hardsync.rate_factor


def center_and_band(
    times: Sequence[float],
    spread: float,
    *,
    update: UpdateTime | None = None,
) -> tuple[float, tuple[float, float]]:
    """The typical one of several times, and a band that holds it with 80 %.

    Times to a target spread by factors, so the mean is of logarithms. The band is that of the mean
    over seeds, widened by the band of the time per update if one is given.

    Args:
        times: of the seeds, above 0.
        spread: standard deviation of their logarithms, see :func:`pooled_spread`.
        update: whose relative uncertainty comes on top.

    >>> center, (low, high) = center_and_band([1.0, 4.0], 0.2)
    >>> center, round(low, 2), round(high, 2)
    (2.0, 1.67, 2.4)
    """
    center = math.exp(float(np.mean(np.log(times))))
    half = _Z80 * spread / math.sqrt(len(times))
    down = up = half
    if update is not None:
        down = math.hypot(half, math.log(update.seconds / update.band[0]))
        up = math.hypot(half, math.log(update.band[1] / update.seconds))
    return center, (center * math.exp(-down), center * math.exp(up))


def pooled_spread(repeats: Sequence[Sequence[float]]) -> float:
    """Standard deviation between seeds of the logarithms of times, over all choices.

    A few repeats of one choice tell little, so all are taken together, with what is usual on top.

    >>> pooled_spread([])
    0.25
    """
    squares, count = _PRIOR_WEIGHT * _PRIOR_SPREAD**2, float(_PRIOR_WEIGHT)
    for times in repeats:
        if len(times) > 1:
            logs = np.log(times)
            squares += float(np.sum((logs - logs.mean()) ** 2))
            count += len(times) - 1
    return math.sqrt(squares / count)


def may_be_best(times: Sequence[Sequence[float]], spread: float) -> list[bool]:
    """Which choices chance alone may keep from being the fastest, or makes the fastest.

    Args:
        times: of each choice, those of its seeds, above 0; at least one of each.
        spread: standard deviation of their logarithms, see :func:`pooled_spread`.

    >>> may_be_best([[1.0, 1.0, 1.0, 1.0], [1.2], [1.2, 1.2, 1.2, 1.2]], 0.1)
    [True, True, False]
    """
    logs = [float(np.mean(np.log(each))) for each in times]
    margins = [_CHANCE * spread / math.sqrt(len(each)) for each in times]
    best = min(range(len(times)), key=lambda i: logs[i], default=0)
    return [
        log - margin <= logs[best] + margins[best]
        for log, margin in zip(logs, margins, strict=True)
    ]


def decide(
    choices: Sequence[Choice],
    times: Sequence[float],
    bands: Sequence[tuple[float, float]],
    *,
    constant: bool = False,
) -> int:
    """Which one to recommend: hardsync, unless the fastest beats it beyond their bands.

    Of what beats it, the simplest that is about as fast as the fastest.

    Args:
        choices: at least one.
        times: of each, to the target.
        bands: of each time.
        constant: delays do not vary. Then nobody waits for anybody and hardsync it is, if it is
            among the choices.

    Returns:
        Its index.

    >>> hardsync, other = Choice(Hardsync(), 16, 1.0), Choice(Async(), 16, 1.0)
    >>> decide([hardsync, other], [1.1, 1.0], [(1.0, 1.2), (0.9, 1.12)])
    0
    >>> decide([hardsync, other], [1.3, 1.0], [(1.2, 1.4), (0.9, 1.12)])
    1
    """
    order = range(len(choices))
    plain = [i for i in order if choices[i].complexity == 0]
    if constant and plain:
        return min(plain, key=lambda i: times[i])
    best = min(order, key=lambda i: times[i])
    up = math.log(bands[best][1] / times[best])
    for i in sorted(plain, key=lambda i: times[i]):
        if math.log(times[i] / times[best]) <= math.hypot(up, math.log(times[i] / bands[i][0])):
            return i
    alike = [i for i in order if times[i] <= _ALIKE * times[best]]
    return min(alike, key=lambda i: (choices[i].complexity, times[i]))
