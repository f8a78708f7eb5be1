"""Expected seconds per update of every protocol, before anything runs.

The model: a learner takes X seconds for a mini-batch, drawn from its law independently every time;
messages and the server take none. X_{K:P} is the K-th smallest of P such times, H_n the n-th
harmonic number. Values are long-run means, after infinitely many updates: the cells that cancel
and memoryless delays have them from the first update on, the others after a while.

    cell            seconds per update                     for
    k-sync          E[X_{K:P}]                             any law (Lemma 3)
    k-batch-sync    K E[X] / P                             exponential (Erlang)
    k-async         E[X_{K:P}]                             exponential (Lemma 5)
                    at most E[X_{K:P}]                     new-longer-than-used (Lemma 5)
    k-batch-async   K E[X] / P                             any law (Lemma 4)

and, at the edges: K = 1 makes k-batch-sync a k-sync and k-async a k-batch-async, K = P makes
k-async a hardsync, P = 1 leaves nobody to wait for, and constant delays are counted by hand.

Source: Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win the Race", AISTATS
2018, §3.1, §4 and supplement §7; its numbers of lemmas and theorems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from gruppetto.delays import Delay
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import Protocol
from gruppetto.theory.laws import Laws, check_num_learners

__all__ = [
    "Kind",
    "Prediction",
    "TimePrediction",
    "async_speedup",
    "batch_speedup",
    "epoch_time",
    "fresh_fraction",
    "mean_staleness",
    "mini_batches_per_update",
    "update_time",
    "update_time_bounds",
]

Kind: TypeAlias = Literal["exact", "upper-bound", "unknown"]

_NOT_ITS_CELL: Final = "the protocol has rules beyond its cell's, and no theory of them is here"
_NOT_INDEPENDENT: Final = "successive delays of a learner depend on each other, and learners wait"


@dataclass(frozen=True)
class Prediction:
    """A number that theory gives, or not."""

    #: None if unknown.
    value: float | None
    #: Whether it is the value, a bound from above, or neither.
    kind: Kind
    #: The result it follows from, or what stands in the way.
    why: str


@dataclass(frozen=True)
class TimePrediction:
    """Seconds that theory gives, or not; kind and why as in :class:`Prediction`."""

    #: Finite; None if unknown.
    seconds: float | None
    kind: Kind
    why: str


def _time(kind: Kind, seconds: float | None, why: str) -> TimePrediction:
    if kind == "unknown":
        return TimePrediction(None, "unknown", why)
    if seconds is None:
        return TimePrediction(None, "unknown", f"a tail too heavy to integrate: {why}")
    if math.isinf(seconds):
        return TimePrediction(None, "unknown", f"the mean is infinite: {why}")
    return TimePrediction(seconds, kind, why)


def _k_sync(laws: Laws, k: int) -> TimePrediction:
    return _time("exact", laws.order_statistic(k), "E[X_{K:P}], Lemma 3")


def _renewal(laws: Laws, k: int) -> TimePrediction:
    return _time("exact", laws.renewal_time(k), "K E[X]/P by renewal, Lemma 4: nobody waits")


def _k_batch_sync(laws: Laws, k: int) -> TimePrediction:
    p = len(laws)
    if laws.are_memoryless:
        return _time("exact", laws.renewal_time(k), "K E[X]/P: an Erlang time, exponential delays")
    if k == 1:
        return _time("exact", laws.order_statistic(1), "E[X_{1:P}]: k-sync with K = 1")
    if p == 1:
        return _time("exact", laws.renewal_time(k), "K E[X]: one learner, one after another")
    if laws.constant is not None:
        return _time("exact", math.ceil(k / p) * laws.constant, "ceil(K/P) rounds, constant delays")
    return _time("unknown", None, "all restart at every update: known for exponential delays only")


def _k_async(laws: Laws, k: int) -> TimePrediction:
    p = len(laws)
    if k == p:
        return _time("exact", laws.order_statistic(k), "E[X_{P:P}]: k-async with K = P is hardsync")
    if k == 1:
        return _renewal(laws, k)
    if laws.are_memoryless:
        return _time("exact", laws.order_statistic(k), "E[X_{K:P}], Lemma 5 with equality")
    if laws.constant is not None:
        return _time("exact", laws.constant / (p // k), "floor(P/K) updates at a time, constant")
    if laws.are_new_longer:
        why = "E[X_{K:P}], Lemma 5: old work is nearer to its end than new (new-longer-than-used)"
        return _time("upper-bound", laws.order_statistic(k), why)
    if laws.are_new_shorter:
        why = "old work takes longer than new (new-shorter-than-used), so at least E[X_{K:P}]"
        return _time("unknown", None, why)
    why = "the delays are not new-longer-than-used, which Lemma 5 needs: E[X_{K:P}] may be too low"
    return _time("unknown", None, why)


#: (distinct, cancels) -> the rule of the cell.
_RULES: Final = {
    (True, True): _k_sync,
    (False, True): _k_batch_sync,
    (True, False): _k_async,
    (False, False): _renewal,
}


def _open(
    protocol: Protocol, law: Delay, num_learners: int, laws: Mapping[int, Delay] | None
) -> tuple[Laws, int] | None:
    """The delays and K; None where the cell does not tell all of the protocol."""
    delays = Laws.of(law, num_learners, laws)
    protocol.check(num_learners)
    # A protocol that keeps its cell's rules and adds some has no closed form of staleness either;
    # one that adapts K has it for the K of now only.
    adapts = protocol.measures_every is not None
    if adapts or protocol.expected_mean_staleness(num_learners) is None:
        return None
    return delays, protocol.num_to_wait(num_learners)


def update_time(
    protocol: Protocol,
    law: Delay,
    num_learners: int,
    *,
    laws: Mapping[int, Delay] | None = None,
) -> TimePrediction:
    """Mean seconds from one update to the next, in the long run.

    Args:
        protocol: one of PROTOCOLS, hence its cell and K.
        law: of the seconds a learner takes for a mini-batch.
        num_learners: P.
        laws: learner -> its own law, for those that have one. The same results hold with X_{K:P}
            of times that differ in law, and with Σ 1/E[X_i] in place of P/E[X].

    Raises:
        InvalidSetting: fewer than 1 learner, a law for one that does not exist, or a protocol
            that so many learners cannot run.

    >>> from gruppetto.delays import Exponential, ShiftedExponential
    >>> from gruppetto.protocols import KAsync, KBatchAsync, KSync
    >>> round(update_time(KSync(k=10), Exponential(mean=1.0), 20).seconds, 3)
    0.669
    >>> update_time(KBatchAsync(k=10), ShiftedExponential(shift=1.0, mean=1.0), 20).seconds
    1.0
    >>> prediction = update_time(KAsync(k=10), ShiftedExponential(shift=1.0, mean=1.0), 20)
    >>> prediction.kind, round(prediction.seconds, 3)
    ('upper-bound', 1.669)
    """
    opened = _open(protocol, law, num_learners, laws)
    if opened is None:
        return _time("unknown", None, _NOT_ITS_CELL)
    cell = protocol.cell
    delays, k = opened
    nobody_waits = not cell.distinct and not cell.cancels
    if not delays.are_independent and not nobody_waits and len(delays) > 1:
        return _time("unknown", None, _NOT_INDEPENDENT)
    return _RULES[cell.distinct, cell.cancels](delays, k)


def update_time_bounds(
    protocol: Protocol,
    law: Delay,
    num_learners: int,
    *,
    laws: Mapping[int, Delay] | None = None,
) -> tuple[float, float]:
    """(low, high): what is certain about :func:`update_time`; equal where it is exact.

    Beyond the paper, with Λ = Σ 1/E[X_i], which is P/E[X] for learners alike:

    * k-async: at least K/Λ, since a learner brings a gradient every E[X] seconds at best; at least
      E[X_{K:P}] where delays are new-shorter-than-used (Lemma 5 turned around).
    * k-batch-sync: at most (K + P − 1)/Λ. When the update fires learner i has done N_i
      mini-batches and R_i seconds are left of one more, so E[T] + E[R_i] = E[X_i] (E[N_i] + 1) by
      Wald's identity; Σ N_i = K, R_i ≥ 0, and who finished last has all of a new one left. At least
      K/Λ where R_i is at most E[X_i] in the mean (new-longer-than-used), at most K/Λ where it is
      at least that (new-shorter-than-used); at most E[X_{K:P}] for K ≤ P, as the first mini-batches
      of K learners are K mini-batches; at least E[X_{1:P}].

    Returns:
        0 and infinity where nothing is known.

    >>> from gruppetto.delays import Pareto
    >>> from gruppetto.protocols import KBatchSync
    >>> low, high = update_time_bounds(KBatchSync(k=10), Pareto(shape=2.0, scale=1.0), 20)
    >>> round(low, 3), round(high, 3)
    (1.026, 1.405)
    """
    opened = _open(protocol, law, num_learners, laws)
    if opened is None:
        return 0.0, math.inf
    delays, k = opened
    known = update_time(protocol, law, num_learners, laws=laws)
    if known.kind == "exact" and known.seconds is not None:
        return known.seconds, known.seconds
    p, by_renewal = len(delays), delays.renewal_time(k)
    if not delays.are_independent:
        return (0.0 if protocol.cell.cancels else by_renewal), math.inf
    kth = delays.order_statistic(k) if k <= p else None
    if protocol.cell.distinct:
        low = 0.0 if protocol.cell.cancels else by_renewal
        if delays.are_new_shorter and kth is not None:
            low = max(low, kth)
        return low, math.inf if known.seconds is None else known.seconds
    if not protocol.cell.cancels:  # unknown because infinite
        return by_renewal, by_renewal
    first = delays.order_statistic(1)
    lows = [0.0 if first is None else first]
    highs = [delays.renewal_time(k + p - 1)]
    if kth is not None:
        highs.append(kth)
    if delays.are_new_longer:
        lows.append(by_renewal)
    if delays.are_new_shorter:
        highs.append(by_renewal)
    return max(lows), min(highs)


def mini_batches_per_update(
    protocol: Protocol, num_learners: int, *, on_late: Literal["requeue", "drop"] = "requeue"
) -> int:
    """How many mini-batches of an epoch one update settles.

    K in every cell, since what is cancelled goes back and is computed again. With
    ``on_late="drop"`` the cells that cancel lose what every other learner was computing: P − K
    more in k-sync, P − 1 more in k-batch-sync.

    >>> from gruppetto.protocols import Backup, KBatchSync
    >>> mini_batches_per_update(Backup(b=2), 10), mini_batches_per_update(KBatchSync(k=4), 10)
    (8, 4)
    >>> mini_batches_per_update(Backup(b=2), 10, on_late="drop")
    10
    >>> mini_batches_per_update(KBatchSync(k=4), 10, on_late="drop")
    13
    """
    check_num_learners(num_learners)
    protocol.check(num_learners)
    k = protocol.num_to_wait(num_learners)
    if on_late not in ("requeue", "drop"):
        raise InvalidSetting(f"epoch time: expected on_late requeue or drop, got {on_late!r}")
    if on_late == "drop" and protocol.cell.cancels:
        return k + num_learners - (k if protocol.cell.distinct else 1)
    return k


def epoch_time(
    protocol: Protocol,
    law: Delay,
    num_learners: int,
    mini_batches_per_epoch: int,
    *,
    laws: Mapping[int, Delay] | None = None,
    on_late: Literal["requeue", "drop"] = "requeue",
) -> TimePrediction:
    """Mean seconds of an epoch: mini-batches in it / those an update settles x :func:`update_time`.

    An update may mix two epochs, so the number of updates need not be whole. The last updates of
    a run wait for what is left and are not accounted for.

    Args:
        protocol: one of PROTOCOLS.
        law: of the seconds a learner takes for a mini-batch.
        num_learners: P.
        mini_batches_per_epoch: in one pass over the data.
        laws: learner -> its own law, for those that have one.
        on_late: what becomes of cancelled mini-batches.

    >>> from gruppetto.delays import Exponential
    >>> from gruppetto.protocols import Hardsync, KBatchAsync
    >>> round(epoch_time(Hardsync(), Exponential(mean=1.0), 20, 100).seconds, 3)
    17.989
    >>> epoch_time(KBatchAsync(k=10), Exponential(mean=1.0), 20, 100).seconds
    5.0
    """
    if mini_batches_per_epoch < 1:
        raise InvalidSetting(
            f"epoch time: expected mini_batches_per_epoch >= 1, got {mini_batches_per_epoch}"
        )
    one = update_time(protocol, law, num_learners, laws=laws)
    settled = mini_batches_per_update(protocol, num_learners, on_late=on_late)
    if one.seconds is None:
        return one
    return TimePrediction(one.seconds * mini_batches_per_epoch / settled, one.kind, one.why)


def mean_staleness(protocol: Protocol, law: Delay, num_learners: int) -> Prediction:
    """Mean staleness, in updates, over all that is applied; for any law, also several.

    (P − K)/K for k-async, (P − 1)/K for k-batch-async, 0 for the cells that cancel: an update makes
    each gradient still being computed one update older.

    >>> from gruppetto.delays import Pareto
    >>> from gruppetto.protocols import KAsync
    >>> mean_staleness(KAsync(k=5), Pareto(shape=2.0, scale=1.0), 20).value
    3.0
    """
    if _open(protocol, law, num_learners, None) is None:
        return Prediction(None, "unknown", _NOT_ITS_CELL)
    value = protocol.expected_mean_staleness(num_learners)
    cell = protocol.cell
    late = "P − K" if cell.distinct else "P − 1"
    why = (
        "late work is cancelled" if cell.cancels else f"{late} gradients age by one, K are applied"
    )
    return Prediction(value, "exact", why)


def fresh_fraction(protocol: Protocol, law: Delay, num_learners: int) -> Prediction:
    """The share of applied gradients of staleness 0; the mean of what p₀ bounds from below.

    1 in the cells that cancel. Exponential delays: K/P in k-async, where all P learners are equally
    likely to be next; 1 − (P−1)(1 − q^K)/K with q = 1 − 1/P in k-batch-async, whose n-th gradient
    of an update is fresh with probability 1 − q^n. So 1/P, the p₀ of the supplement's Lemma 8, is
    the first gradient's. Async under new-longer-than-used: at most 1/P (Lemma 8).

    >>> from gruppetto.delays import Exponential
    >>> from gruppetto.protocols import KBatchAsync
    >>> [round(fresh_fraction(KBatchAsync(k=k), Exponential(mean=1.0), 20).value, 3)
    ...  for k in (1, 5, 10, 16)]
    [0.05, 0.14, 0.238, 0.335]
    """
    opened = _open(protocol, law, num_learners, None)
    if opened is None:
        return Prediction(None, "unknown", _NOT_ITS_CELL)
    (laws, k), p, cell = opened, num_learners, protocol.cell
    if cell.cancels or p == 1 or (cell.distinct and k == p):
        return Prediction(1.0, "exact", "no gradient is ever late")
    if laws.are_memoryless and cell.distinct:
        return Prediction(k / p, "exact", "K/P: all learners are equally likely to be next")
    if laws.are_memoryless:
        value = 1.0 - (p - 1) * (1.0 - (1.0 - 1.0 / p) ** k) / k
        return Prediction(value, "exact", "the n-th of an update is fresh with 1 − (1 − 1/P)^n")
    if k == 1 and laws.are_new_longer:
        return Prediction(1.0 / p, "upper-bound", "1/P, Lemma 8: new work is seldom done first")
    return Prediction(None, "unknown", "it depends on the law; known for exponential delays")


def async_speedup(law: Delay, num_learners: int) -> float:
    """Theorem 1: an update of hardsync over one of async, P E[X_{P:P}] / E[X].

    Corollary 1 has about P log P for exponential delays; exactly it is P H_P.

    Raises:
        InvalidSetting: E[X] is 0 or infinite.

    >>> from gruppetto.delays import Pareto, ShiftedExponential
    >>> round(async_speedup(ShiftedExponential(shift=1.0, mean=1.0), 20), 1)
    46.0
    >>> round(async_speedup(Pareto(shape=2.0, scale=1.0), 20), 1)
    79.8
    """
    return batch_speedup(law, num_learners, num_learners) * num_learners


def batch_speedup(law: Delay, num_learners: int, k: int) -> float:
    """P E[X_{K:P}] / (K E[X]): an update of k-sync over one of k-batch-async.

    Theorem 2 has it for exponential delays, where it is also k-async over k-batch-async and k-sync
    over k-batch-sync, about (P/K) log(P/(P−K)).

    Raises:
        InvalidSetting: E[X] is 0 or infinite, or K is not from 1 to P.

    >>> from gruppetto.delays import Exponential
    >>> round(batch_speedup(Exponential(mean=1.0), 20, 10), 3)
    1.338
    """
    check_num_learners(num_learners)
    if not 1 <= k <= num_learners:
        raise InvalidSetting(f"speedup: expected k from 1 to {num_learners}, got k={k}")
    laws = Laws.of(law, num_learners)
    if not laws.are_independent:
        raise InvalidSetting(f"speedup: expected a law of independent delays: {_NOT_INDEPENDENT}")
    kth = laws.order_statistic(k)
    if kth is None or not 0 < law.expectation() < math.inf:
        raise InvalidSetting(
            f"speedup: expected a law with a mean above 0 and finite, got {law.expectation()} s"
        )
    return kth * laws.rate / k
