"""Which choices are trained for how long, so that a budget tells most about the best of them.

Successive halving. All choices train with one seed to the same virtual time; the better ones go on
to twice that time, until a few have reached the target. Whoever then needs more than a multiple of
their time is stopped. Those that chance alone may keep from being the best are repeated with more
seeds, those with the fewest first, until one is left or the budget is spent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Final

from gruppetto.errors import InvalidSetting
from gruppetto.runs.plan_pilot import Entry, Trainer
from gruppetto.theory.planner import may_be_best, pooled_spread

__all__ = ["run_race"]

#: Of the budget, what the first look at all choices may take.
_FIRST_LOOK: Final = 0.25
#: A choice that needs so many times the time of the third best so far is stopped...
_SLACK: Final = 2.0
#: ... and hardsync so many times, because what is gained over it is the question.
_SLACK_HARDSYNC: Final = 4.0
#: With so many seeds all is said.
_MAX_SEEDS: Final = 24
#: Choices that go on where nobody has reached the target yet, at least.
_FINALISTS: Final = 4
#: So many go on in any case until there are a few seeds: one seed's best may be lucky.
_MANY: Final = 6
_FEW_SEEDS: Final = 4


def run_race(entries: Sequence[Entry], trainer: Trainer) -> None:
    """Fill in what training says of every entry; the first one is hardsync, or the same SGD.

    Raises:
        InvalidSetting: the budget does not even pay for an update of each.
    """
    groups = _alike(entries)
    _race([group[0] for group in groups], trainer)
    for first, *others in groups:
        for other in others:
            other.take_over(first)


def _alike(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that need equally many updates, the one that makes them fastest first.

    Where late work is cancelled, an update is K mini-batches of the newest version whoever computed
    them: k-sync and k-batch-sync are the same SGD, and one pilot run tells of both.
    """
    groups: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        choice = entry.choice
        key: Hashable = choice
        if choice.protocol.cell.cancels:
            k = choice.protocol.num_to_wait(entry.machines.num_learners)
            key = k, choice.batch_size, round(choice.rate_factor, 9)
        groups.setdefault(key, []).append(entry)
    return [sorted(group, key=lambda entry: entry.update.seconds) for group in groups.values()]


def _race(entries: Sequence[Entry], trainer: Trainer) -> None:
    _first_seed(list(entries), trainer)
    for entry in entries:
        trainer.drop(entry)
    while True:
        contenders = _contenders(entries, entries[0])
        few = [entry for entry in contenders if len(entry.updates) < _MAX_SEEDS]
        if len(contenders) < 2 or not few:
            return
        fewest = min(len(entry.updates) for entry in few)
        best = min(entry.center for entry in contenders)
        for entry in few:
            if len(entry.updates) == fewest:
                if trainer.left < entry.cost:
                    return
                _repeat(entry, fewest, trainer, 2 * _SLACK * best)


def _contenders(entries: Sequence[Entry], hardsync: Entry) -> list[Entry]:
    """All that chance may keep from being the best, and until there are a few seeds hardsync and
    the fastest in any case; best first.

    Whoever was out comes back when the others turn out to have been lucky.
    """
    reached = sorted((e for e in entries if e.updates), key=lambda entry: entry.center)
    times = [entry.times for entry in reached]
    close = may_be_best(times, pooled_spread(times))
    return [
        entry
        for number, entry in enumerate(reached)
        if close[number]
        or (len(entry.updates) < _FEW_SEEDS and (number < _MANY or entry is hardsync))
    ]


def _repeat(entry: Entry, seed: int, trainer: Trainer, limit: float) -> None:
    trainer.train(entry, seed, limit)
    if seed not in entry.updates:
        # It takes longer than the limit; to count it as that is better than to leave it out.
        entry.updates[seed] = entry.run_times.count(limit)
        entry.num_cut += 1
        trainer.drop(entry, seed)


def _first_seed(entries: list[Entry], trainer: Trainer) -> None:
    """Everybody once, with the first seed."""
    alive = list(entries)
    horizon = _FIRST_LOOK * trainer.budget / sum(entry.samples_per_second for entry in entries)
    least = max(entry.update.seconds for entry in entries) * 1.001
    if sum(least * entry.samples_per_second for entry in entries) > trainer.budget:
        raise InvalidSetting(_too_little(entries, least, trainer))
    horizon = max(horizon, least)
    while alive:
        for entry in alive:
            _advance(entry, trainer, min(horizon, _limit(entry, entries)))
        alive = [entry for entry in alive if not entry.updates]
        if _typical_best(entries) < math.inf:
            break
        alive = _halve(alive, horizon, trainer, entries[0])
        horizon *= 2.0
    for entry in sorted(alive, key=lambda entry: (entry is not entries[0], entry.loss)):
        _advance(entry, trainer, _limit(entry, entries))


def _typical_best(entries: Sequence[Entry]) -> float:
    """Seconds of the third best: one of many is fast by luck alone, three are not."""
    centers = sorted(entry.center for entry in entries)
    return centers[min(2, len(centers) - 1)]


def _limit(entry: Entry, entries: Sequence[Entry]) -> float:
    """Virtual seconds after which a choice is out; infinite while few have reached the target."""
    return _typical_best(entries) * (_SLACK_HARDSYNC if entry is entries[0] else _SLACK)


def _advance(entry: Entry, trainer: Trainer, limit: float) -> None:
    """Go on to ``limit`` virtual seconds, if the budget allows and it is not there yet."""
    affordable = entry.horizon + max(0.0, trainer.left) / entry.samples_per_second
    limit = min(limit, affordable)
    if entry.updates or entry.at_least == math.inf or limit <= entry.horizon + entry.update.seconds:
        return
    trainer.train(entry, 0, limit)


def _halve(alive: list[Entry], horizon: float, trainer: Trainer, hardsync: Entry) -> list[Entry]:
    """Hardsync, and the half with the smaller loss at the same virtual time, or as many as can go
    on as long."""
    ranked = sorted(alive, key=lambda entry: (entry is not hardsync, entry.loss))
    kept = [entry for entry in ranked if entry.loss < math.inf]
    kept = kept[: max(_FINALISTS, math.ceil(len(kept) / 2))]
    while kept and trainer.left < horizon * sum(entry.samples_per_second for entry in kept):
        kept.pop()
    if len(kept) < 2:
        kept = []  # one alone has nothing to be compared with at that time
    for entry in ranked:
        if entry not in kept:
            trainer.drop(entry)
    return kept


def _too_little(entries: Sequence[Entry], least: float, trainer: Trainer) -> str:
    need = sum(least * entry.samples_per_second for entry in entries)
    epoch = trainer.samples_per_epoch
    return (
        f"budget: expected at least {need / epoch:.3g} epochs, one update of each of "
        f"{len(entries)} choices, got {trainer.budget / epoch:g}"
    )
