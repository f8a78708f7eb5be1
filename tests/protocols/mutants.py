"""Seeded mutants: what would we notice if a rule were broken?

Each mutant is one small edit of ledger.py, coordinator.py or collect.py, loaded in this process
beside the real modules. The random driver, and then the scripts, must tell it from the real thing.

    python tests/protocols/mutants.py        prints the table
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import test_adasync_scripts
import test_bound_scripts
import test_coordinator_scripts
import test_warmup_scripts
from driver import MakeCoordinator, Watched, drive, make_coordinator
from oracle import Settings

import gruppetto.protocols

#: Imported in this order: each may import those before it.
MODULES = (
    *("ledger", "clocks", "bounded", "collect", "bounded_async"),
    *("adaptive", "coordinator"),
)
FOLDER = Path(gruppetto.protocols.__file__).parent
MAX_SEEDS = 400


@dataclass(frozen=True)
class Mutant:
    """An edit of one module: ``old`` occurs once in it and becomes ``new``."""

    name: str
    module: str
    old: str
    new: str
    breaks: str


MUTANTS = (
    # -------------------------------------------------------------- mini-batches get lost
    Mutant(
        "cancel forgets to requeue",
        "ledger",
        "closed = self.leased.pop(lease)\n        self._late(closed.mini_batch)",
        "closed = self.leased.pop(lease)",
        "what is cancelled goes back",
    ),
    Mutant(
        "dead learner's mini-batch forgotten",
        "ledger",
        "                self._late(closed.mini_batch)",
        "                pass",
        "what is lost goes back",
    ),
    Mutant(
        "reservation not returned on loss",
        "ledger",
        "        self.unreserve(learner)\n",
        "        self._reserved.pop(learner, None)\n",
        "next_mini_batch returns if the learner is lost",
    ),
    Mutant(
        "reservation kept on loss",
        "ledger",
        "        self.unreserve(learner)\n",
        "",
        "next_mini_batch returns if the learner is lost",
    ),
    Mutant(
        "own reservation ignored",
        "ledger",
        "mini_batch = self._reserved.pop(learner, None)\n        if mini_batch is None:",
        "mini_batch = None\n        if mini_batch is None:",
        "a learner takes its reserved mini-batch next",
    ),
    Mutant(
        "nothing is taken from others",
        "ledger",
        "if mini_batch is None and self._reserved:",
        "if False:",
        "the lowest reserved one, when none is left",
    ),
    Mutant(
        "highest reserved taken",
        "ledger",
        "holder = min(self._reserved",
        "holder = max(self._reserved",
        "the lowest reserved one, when none is left",
    ),
    Mutant(
        "reserved not to do",
        "ledger",
        "return new + len(self._returned) + len(self._reserved)",
        "return new + len(self._returned)",
        "a reserved mini-batch still counts as to do",
    ),
    Mutant(
        "returned last in, first out",
        "ledger",
        "return heapq.heappop(self._returned)",
        "return self._returned.pop()",
        "the lowest number is leased first",
    ),
    Mutant(
        "stop gives work",
        "coordinator",
        "return [*(Cancel(lease.number) for lease in leases), Finish(reason)]",
        "cancels = [Cancel(lease.number) for lease in leases]\n"
        "        return [*cancels, *self._give_work(set(), None), Finish(reason)]",
        "open leases are cancelled, nothing follows",
    ),
    Mutant(
        "stop forgets the held",
        "ledger",
        "for lease in (*closed, *self.pushed.values()):",
        "for lease in closed:",
        "held contributions return when a run is stopped",
    ),
    # --------------------------------------------------------------- or counted wrongly
    Mutant(
        "drop not counted",
        "ledger",
        "self.num_dropped += 1",
        "pass",
        "applied + given up + dropped add up",
    ),
    Mutant(
        "failure dropped",
        "ledger",
        "            heapq.heappush(self._returned, closed.mini_batch)\n        return closed",
        "            self._late(closed.mini_batch)\n        return closed",
        "a failed mini-batch is retried, drop or not",
    ),
    Mutant(
        "max_attempts off by one",
        "ledger",
        "if failures < self.max_attempts:",
        "if failures <= self.max_attempts:",
        "given up after max_attempts failures",
    ),
    Mutant(
        "attempt counted for a cancel",
        "ledger",
        "closed = self.leased.pop(lease)\n        self._late(closed.mini_batch)",
        "closed = self.leased.pop(lease)\n        if not self._give_up(closed.mini_batch):\n"
        "            self._late(closed.mini_batch)",
        "only a mini-batch that itself fails is given up",
    ),
    Mutant(
        "death is no attempt",
        "ledger",
        "            elif not self._give_up(closed.mini_batch):\n                self._late",
        "            else:\n                self._late",
        "a mini-batch its learners die on is given up",
    ),
    Mutant(
        "a resume is an attempt",
        "coordinator",
        "is_failure=event.reason != RESUMED",
        "is_failure=True",
        "no mini-batch is to blame for a resume",
    ),
    Mutant(
        "what a resume interrupts is late",
        "ledger",
        "            if not is_failure:\n"
        "                heapq.heappush(self._returned, closed.mini_batch)",
        "            if not is_failure:\n                self._late(closed.mini_batch)",
        "no mini-batch is dropped for a resume",
    ),
    Mutant(
        "given up and retried",
        "ledger",
        "        self.num_given_up += 1\n        return True",
        "        self.num_given_up += 1\n        return False",
        "every mini-batch is in one place",
    ),
    Mutant(
        "reserved counted as leased",
        "ledger",
        "return self._next_new - len(self._fresh)",
        "return self._next_new",
        "without epochs: mini-batches ever leased",
    ),
    # ------------------------------------------------------------------------- leases
    Mutant(
        "lease not closed on push",
        "ledger",
        "closed = self.pushed[lease] = self.leased.pop(lease)",
        "closed = self.pushed[lease] = self.leased[lease]",
        "a lease closes at its push",
    ),
    Mutant(
        "duplicate push applied",
        "coordinator",
        "            return self._outdated(event.lease)\n        if not lease.version",
        "            if event.lease in self.ledger.pushed:\n"
        "                self._held.append(event)\n"
        "                return self._proceed([])\n"
        "            return self._outdated(event.lease)\n        if not lease.version",
        "none twice",
    ),
    Mutant(
        "version from the future taken",
        "coordinator",
        "if not lease.version <= event.version <= self.version:",
        "if not lease.version <= event.version:",
        "impossible events raise",
    ),
    Mutant(
        "refused too late",
        "coordinator",
        "        if not lease.version <= event.version",
        "        self._not_finite.clear()\n        if not lease.version <= event.version",
        "impossible events change nothing",
    ),
    Mutant(
        "number used again",
        "coordinator",
        "if learner in self._ever_joined or learner < 0:",
        "if learner in self._idle or learner < 0:",
        "a returning learner gets a new number",
    ),
    Mutant(
        "cancelled leases kept",
        "coordinator",
        "if self.current_protocol.cell.cancels:",
        "if False:",
        "cells that cancel close every open lease",
    ),
    Mutant(
        "cancelled learner forgotten",
        "coordinator",
        "        del self._computing[lease.learner]\n        self._idle.add(lease.learner)\n\n"
        "    def _give_work",
        "        del self._computing[lease.learner]\n\n    def _give_work",
        "the learner's next Compute follows in the same list",
    ),
    # ------------------------------------------------------------------ when it fires
    Mutant(
        "K off by one",
        "coordinator",
        "len(self._held) >= self.num_to_wait()",
        "len(self._held) > self.num_to_wait()",
        "an update waits for K",
    ),
    Mutant(
        "tail not clamped",
        "coordinator",
        "return int(min(k, self._num_that_can_arrive(live)))",
        "return k",
        "min(K, what can still arrive)",
    ),
    Mutant(
        "tail not clamped to distinct learners",
        "coordinator",
        "        if self.current_protocol.cell.distinct:\n            # Waiting",
        "        if False:\n            # Waiting",
        "distinct: the learners that can still bring one",
    ),
    Mutant(
        "dead learners waited for",
        "coordinator",
        "        self.num_lost += 1\n",
        "        self.num_lost += 1\n        self._expected.add(-1 - learner)\n",
        "nobody waits for the dead",
    ),
    Mutant(
        "expected not counted as live",
        "coordinator",
        "return len(self._expected) + len(self._idle) + len(self._computing)",
        "return len(self._idle) + len(self._computing)",
        "the first joiner does not train alone",
    ),
    Mutant(
        "expected cannot arrive",
        "coordinator",
        "to_do = min(to_do, len(self._idle) + len(self._expected))",
        "to_do = min(to_do, len(self._idle))",
        "the first joiner does not train alone",
    ),
    Mutant(
        "held lost with its learner",
        "coordinator",
        "        self.num_lost += 1\n",
        "        self.num_lost += 1\n"
        "        of = {n: held.learner for n, held in self.ledger.pushed.items()}\n"
        "        self._held = [p for p in self._held if of[p.lease] != learner]\n",
        "held contributions survive their learner",
    ),
    Mutant(
        "distinct learner contributes twice",
        "coordinator",
        "(self._waiting if distinct else self._idle).add(lease.learner)",
        "self._idle.add(lease.learner)",
        "K distinct learners; a finisher waits",
    ),
    Mutant(
        "waiting learners not released",
        "coordinator",
        "        self._idle |= self._waiting\n        self._waiting.clear()\n",
        "        self._waiting.clear()\n",
        "the update frees who waited for it",
    ),
    Mutant(
        "work before the update",
        "coordinator",
        "        is_enough = self._held and len(self._held) >= self.num_to_wait()",
        "        commands.extend(self._give_work(set(), avoid))\n"
        "        is_enough = self._held and len(self._held) >= self.num_to_wait()",
        "the K-th push updates first, then refetches",
    ),
    # ------------------------------------------------------------------- the warm-up
    Mutant(
        "warm-up never ends",
        "coordinator",
        "if self.ledger.num_settled >= self.warmup_mini_batches:",
        "if self.warmup_mini_batches == 0:",
        "hardsync until so many, then the protocol",
    ),
    Mutant(
        "no warm-up",
        "coordinator",
        "Hardsync() if warmup_mini_batches > 0 else protocol",
        "protocol",
        "hardsync until so many, then the protocol",
    ),
    Mutant(
        "warm-up ends one early",
        "coordinator",
        "self.ledger.num_settled >= self.warmup_mini_batches:",
        "self.ledger.num_settled >= self.warmup_mini_batches - 1:",
        "hardsync until so many are settled",
    ),
    Mutant(
        "warm-up ends one late",
        "coordinator",
        "self.ledger.num_settled >= self.warmup_mini_batches:",
        "self.ledger.num_settled > self.warmup_mini_batches:",
        "hardsync until so many are settled",
    ),
    Mutant(
        "warm-up counts only what is applied",
        "coordinator",
        "self.ledger.num_settled >= self.warmup_mini_batches:",
        "self.ledger.num_applied >= self.warmup_mini_batches:",
        "given up and dropped count as settled",
    ),
    Mutant(
        "warm-up does not count what is dropped",
        "ledger",
        "return self.num_applied + self.num_given_up + self.num_dropped",
        "return self.num_applied + self.num_given_up",
        "given up and dropped count as settled",
    ),
    Mutant(
        "warm-up counts updates",
        "coordinator",
        "self.ledger.num_settled >= self.warmup_mini_batches:",
        "self.version >= self.warmup_mini_batches:",
        "mini-batches are counted",
    ),
    Mutant(
        "warm-up ends at any event",
        "coordinator",
        "        contributors = set(first)\n",
        "        contributors = set(first)\n        self._end_warmup()\n",
        "nothing held is counted by other rules",
    ),
    Mutant(
        "warm-up ends before its last update",
        "coordinator",
        "            commands.append(self._apply(contributors))\n",
        "            if self.ledger.num_settled + len(self._held) >= self.warmup_mini_batches:\n"
        "                self.current_protocol = self.protocol\n"
        "            commands.append(self._apply(contributors))\n",
        "its last update is hardsync's, cancels included",
    ),
    Mutant(
        "warm-up ends before its cancels",
        "coordinator",
        "            if self.current_protocol.cell.cancels:\n",
        "            self._end_warmup()\n            if self.current_protocol.cell.cancels:\n",
        "its last update is hardsync's, cancels included",
    ),
    Mutant(
        "warm-up does not release who waited",
        "coordinator",
        "        self._idle |= self._waiting\n",
        "        self._idle |= set() if self.is_warming_up else self._waiting\n",
        "the update frees who waited for it",
    ),
    Mutant(
        "K of the protocol in the warm-up",
        "coordinator",
        "k = self.current_protocol.num_to_wait(live)",
        "k = self.protocol.num_to_wait(live)",
        "hardsync waits for every live learner",
    ),
    Mutant(
        "nobody waits in the warm-up",
        "coordinator",
        "distinct = self.current_protocol.cell.distinct",
        "distinct = self.protocol.cell.distinct",
        "hardsync waits for distinct learners",
    ),
    Mutant(
        "mean of the protocol in the warm-up",
        "coordinator",
        "known = self.current_protocol.expected_mean_staleness(",
        "known = self.protocol.expected_mean_staleness(",
        "gradients of the warm-up count fully",
    ),
    # ---------------------------------------------------------------- what it contains
    Mutant(
        "version not increased",
        "coordinator",
        "        self.version += 1\n",
        "",
        "the version counts the updates",
    ),
    Mutant(
        "staleness after the update",
        "coordinator",
        "Situation(self.version - push.version,",
        "Situation(self.version + 1 - push.version,",
        "staleness is taken just before applying",
    ),
    Mutant(
        "leased version believed",
        "coordinator",
        "Situation(self.version - push.version,",
        "Situation(self.version - self.ledger.pushed[push.lease].version,",
        "the version in the push is the truth",
    ),
    Mutant(
        "newest first",
        "coordinator",
        "zip(self._held, situations, factors, strict=True)",
        "zip(self._held[::-1], situations[::-1], factors[::-1], strict=True)",
        "contributions in arrival order",
    ),
    Mutant(
        "mean measured although known",
        "coordinator",
        "return self.staleness.mean if known is None else known",
        "return self.staleness.mean",
        "inverse-mean takes the closed form",
    ),
    Mutant(
        "highest learner first",
        "coordinator",
        "key=lambda n: (n not in contributors, n)",
        "key=lambda n: (n not in contributors, -n)",
        "the same events give the same commands",
    ),
    Mutant(
        "cancelled learners served first",
        "coordinator",
        "key=lambda n: (n not in contributors, n)",
        "key=lambda n: n",
        "an epoch cannot trail",
    ),
    Mutant(
        "reserves while learners are expected",
        "coordinator",
        "reserved = None if self._expected else self.ledger.reserve(",
        "reserved = self.ledger.reserve(",
        "nothing is reserved while somebody is to come",
    ),
    Mutant(
        "never reserves",
        "coordinator",
        "reserved = None if self._expected else self.ledger.reserve(lease.learner, avoid)",
        "reserved = None",
        "next_mini_batch is there to be prefetched",
    ),
    Mutant(
        "reserves before all have leased",
        "coordinator",
        "            commands.extend(self._give_work(contributors, avoid))\n",
        "            for one in sorted(self._idle, key=lambda n: (n not in contributors, n)):\n"
        "                others, self._idle = self._idle - {one}, {one}\n"
        "                commands.extend(self._give_work(contributors, avoid))\n"
        "                self._idle |= others\n",
        "hardsync takes P of the stream at a time",
    ),
    Mutant(
        "reserves for the lowest learner first",
        "coordinator",
        "        for lease in leases:\n            reserved",
        "        for lease in sorted(leases, key=lambda one: one.learner):\n            reserved",
        "reserved in the order leased",
    ),
    Mutant(
        "failed mini-batch leased at once",
        "coordinator",
        "self.ledger.lease(learner, self.version, avoid)",
        "self.ledger.lease(learner, self.version)",
        "a failure is tried at another time",
    ),
    Mutant(
        "failed mini-batch reserved at once",
        "coordinator",
        "self.ledger.reserve(lease.learner, avoid)",
        "self.ledger.reserve(lease.learner)",
        "a failure is tried at another time",
    ),
    Mutant(
        "failed mini-batch lost when set aside",
        "ledger",
        "            heapq.heappush(self._returned, avoid)\n",
        "",
        "every mini-batch is in one place",
    ),
    Mutant(
        "failed mini-batch retried at once",
        "ledger",
        "if self._returned[0] != avoid:",
        "if True:",
        "a failure is tried at another time",
    ),
    # ----------------------------------------------------------------------- the bounds
    Mutant(
        "discarded at the bound",
        "bounded",
        "return staleness > self.s",
        "return staleness >= self.s",
        "at most s old is applied",
    ),
    Mutant(
        "nothing is too stale",
        "bounded",
        "return staleness > self.s",
        "return False",
        "what is older than s is discarded",
    ),
    Mutant(
        "refused by the leased version",
        "coordinator",
        "if self.current_protocol.bound.refuses(staleness) and",
        "if self.current_protocol.bound.refuses(self.version - lease.version) and",
        "the version in the push is the truth",
    ),
    Mutant(
        "refused and forgotten",
        "coordinator",
        "        self._set_free(lease)\n        self.num_discarded",
        "        self.ledger.push(lease.number)\n        self.ledger.pushed.pop(lease.number)\n"
        "        del self._computing[lease.learner]\n        self._idle.add(lease.learner)\n"
        "        self.num_discarded",
        "what is discarded goes back",
    ),
    Mutant(
        "refused learner served first",
        "coordinator",
        "return self._proceed([Discard(lease.number, TOO_STALE)], lease.mini_batch, others)",
        "return self._proceed([Discard(lease.number, TOO_STALE)], lease.mini_batch)",
        "others take what one was too slow for",
    ),
    Mutant(
        "refused mini-batch taken again",
        "coordinator",
        "[Discard(lease.number, TOO_STALE)], lease.mini_batch, others)",
        "[Discard(lease.number, TOO_STALE)], None, others)",
        "others take what one was too slow for",
    ),
    Mutant(
        "refusal not counted",
        "coordinator",
        "        self.num_discarded += 1\n        return self._proceed(",
        "        return self._proceed(",
        "discarded counts what was too stale",
    ),
    Mutant(
        "restarted at the bound",
        "bounded",
        "if lease.version < oldest]",
        "if lease.version <= oldest]",
        "restarted when s + 1 old",
    ),
    Mutant(
        "restarted one late",
        "bounded",
        "oldest = now.version - self.s",
        "oldest = now.version - self.s - 1",
        "restarted when s + 1 old",
    ),
    Mutant(
        "never restarted",
        "coordinator",
        "            commands.extend(self._cancel(self.current_protocol.bound.too_old(self)))\n",
        "",
        "restarted when s + 1 old",
    ),
    Mutant(
        "fires in spite of what is under way",
        "coordinator",
        "if is_enough and self.current_protocol.bound.may_fire(self):",
        "if is_enough:",
        "an update waits for what would be too stale",
    ),
    Mutant(
        "fires as if nothing were published",
        "bounded",
        "return in_time(under_way, now.version + 1, now.k, self.s)",
        "return in_time(under_way, now.version, now.k, self.s)",
        "an update waits for what would be too stale",
    ),
    Mutant(
        "only the oldest deadline counts",
        "bounded",
        "first + n // k for n, v",
        "first for n, v",
        "K per update, earliest deadline first",
    ),
    Mutant(
        "deadlines in no order",
        "bounded",
        "in enumerate(sorted(versions))",
        "in enumerate(reversed(sorted(versions)))",
        "earliest deadline first",
    ),
    Mutant(
        "starts in spite of what is under way",
        "coordinator",
        "            if not bound.may_start(learner, self):\n                continue\n",
        "",
        "nobody starts what could not be in time",
    ),
    Mutant(
        "starts as if nothing were held",
        "bounded",
        "[*versions, *now.held_versions, now.version]",
        "[*versions, now.version]",
        "held gradients take places too",
    ),
    Mutant(
        "one clock too far ahead",
        "bounded",
        "now.clocks.lead(learner) <= self.s",
        "now.clocks.lead(learner) <= self.s + 1",
        "at most s clocks ahead",
    ),
    Mutant(
        "one clock too strict",
        "bounded",
        "now.clocks.lead(learner) <= self.s",
        "now.clocks.lead(learner) < max(1, self.s)",
        "s clocks ahead are allowed",
    ),
    Mutant(
        "joiner starts at clock 0",
        "clocks",
        "self.of.setdefault(learner, min(self.of.values(), default=0))",
        "self.of.setdefault(learner, 0)",
        "a joiner starts at the slowest live clock",
    ),
    Mutant(
        "joiner starts at the fastest clock",
        "clocks",
        "min(self.of.values(), default=0))",
        "max(self.of.values(), default=0))",
        "a joiner starts at the slowest live clock",
    ),
    Mutant(
        "the dead keep their clock",
        "coordinator",
        "        self.clocks.lose(learner)\n",
        "",
        "nobody waits for the dead",
    ),
    Mutant(
        "expected learners have no clock",
        "clocks",
        "self.of = dict.fromkeys(expected_learners, 0)",
        "self.of: dict[int, int] = {}",
        "the first joiner does not train alone",
    ),
    Mutant(
        "a failure moves the clock",
        "coordinator",
        "        self.num_rejected += 1\n",
        "        self.num_rejected += 1\n        self.clocks.tick([lease])\n",
        "clocks count gradients applied",
    ),
    Mutant(
        "one kept idle ends the giving",
        "coordinator",
        "                continue\n            lease = self.ledger.lease(",
        "                break\n            lease = self.ledger.lease(",
        "who may start is given work",
    ),
    Mutant(
        "bound keeps learners idle in the warm-up",
        "coordinator",
        "        bound = self.current_protocol.bound\n",
        "        bound = self.protocol.bound\n",
        "hardsync's rules first",
    ),
    Mutant(
        "bound holds updates back in the warm-up",
        "coordinator",
        "if is_enough and self.current_protocol.bound.may_fire(",
        "if is_enough and self.protocol.bound.may_fire(",
        "hardsync's rules first",
    ),
    Mutant(
        "late ones restarted before the warm-up ends",
        "coordinator",
        "            self._end_warmup()\n            commands.extend(",
        "            commands.extend(",
        "the warm-up ends at its last update",
    ),
    Mutant(
        "clock of a contributor stands still",
        "clocks",
        "                self.of[learner] += 1\n",
        "                pass\n",
        "clocks count gradients applied",
    ),
    Mutant(
        "ringmaster of r allows r",
        "bounded_async",
        "return RestartBound(self.r - 1)",
        "return RestartBound(self.r)",
        "max_staleness = r - 1",
    ),
    Mutant(
        "restart is not the default",
        "collect",
        '_ON_STALE: Final[OnStale] = "restart"',
        '_ON_STALE: Final[OnStale] = "discard"',
        "restart unless told otherwise",
    ),
    # ----------------------------------------------------------------------------- ends
    Mutant(
        "not-finite never cleared",
        "coordinator",
        "        self._not_finite.clear()\n",
        "",
        "three with no finite one between",
    ),
    Mutant(
        "diverged at two",
        "coordinator",
        "_NOT_FINITE_LIMIT: Final = 3",
        "_NOT_FINITE_LIMIT: Final = 2",
        "three different mini-batches",
    ),
    Mutant(
        "given up allowed one more",
        "coordinator",
        "if self.ledger.num_given_up > self.max_given_up:",
        "if self.ledger.num_given_up > self.max_given_up + 1:",
        "fails if more than max_given_up are",
    ),
    Mutant(
        "finished twice",
        "coordinator",
        "return self._stop(event.reason) if self.finished is None else []",
        "return self._stop(event.reason)",
        "nothing follows Finish",
    ),
    Mutant(
        "work after the end",
        "coordinator",
        "        if self.finished is not None:\n            return commands\n",
        "",
        "nothing follows Finish",
    ),
    # ------------------------------------------------------------------------ the table
    Mutant(
        "k-async cancels",
        "collect",
        "K_ASYNC: Final = Cell(distinct=True, cancels=False)",
        "K_ASYNC: Final = Cell(distinct=True, cancels=True)",
        "k-async keeps unfinished work",
    ),
    Mutant(
        "k-batch-sync waits for distinct learners",
        "collect",
        "K_BATCH_SYNC: Final = Cell(distinct=False, cancels=True)",
        "K_BATCH_SYNC: Final = Cell(distinct=True, cancels=True)",
        "a finisher starts another",
    ),
    Mutant(
        "softsync rounds up",
        "collect",
        "return max(1, num_live // self.n)",
        "return max(1, -(-num_live // self.n))",
        "K = floor(P/n)",
    ),
    Mutant(
        "backup waits for all",
        "collect",
        "return max(1, num_live - self.b)",
        "return max(1, num_live)",
        "K = P - b",
    ),
    Mutant(
        "backup's K may be zero",
        "collect",
        "return max(1, num_live - self.b)",
        "return num_live - self.b",
        "a derived K is at least 1",
    ),
    Mutant(
        "softsync's K may be zero",
        "collect",
        "return max(1, num_live // self.n)",
        "return num_live // self.n",
        "a derived K is at least 1",
    ),
    Mutant(
        "hardsync waits for the dead",
        "collect",
        "return max(1, num_live)",
        "object.__setattr__(self, 'p', max(getattr(self, 'p', 1), num_live))\n"
        "        return self.p",
        "hardsync follows P",
    ),
    Mutant(
        "mean staleness of the other cell",
        "collect",
        "(k if self.cell.distinct else 1)",
        "(1 if self.cell.distinct else k)",
        "(P-K)/K and (P-1)/K",
    ),
    # --------------------------------------------------------------------------- AdaSync
    Mutant(
        "first loss renewed",
        "adaptive",
        'object.__setattr__(after, "first_loss", first)',
        'object.__setattr__(after, "first_loss", loss)',
        "(K0, first loss) are kept",
    ),
    Mutant(
        "K0 renewed",
        "adaptive",
        'object.__setattr__(after, "k", self._k(first, loss, num_live))',
        'object.__setattr__(after, "k", self._k(first, loss, num_live))\n'
        '        object.__setattr__(after, "k0", after.k)',
        "(K0, first loss) are kept",
    ),
    Mutant(
        "square root everywhere",
        "adaptive",
        '"log" if self.cell.distinct else "linear"',
        '"linear"',
        "K^2/(P-K) where learners are distinct",
    ),
    Mutant(
        "k-async by the square root",
        "adaptive",
        '"log" if self.cell.distinct else "linear"',
        '"log" if self.cell.distinct and self.cell.cancels else "linear"',
        "k-async has k-sync's time per update",
    ),
    Mutant(
        "K rounded down",
        "adaptive",
        "return round(min(max(exact, 1.0), float(num_learners)))",
        "return int(min(max(exact, 1.0), float(num_learners)))",
        "rounded to the nearest",
    ),
    Mutant(
        "K above P",
        "adaptive",
        "return round(min(max(exact, 1.0), float(num_learners)))",
        "return round(max(exact, 1.0))",
        "K is from 1 to P",
    ),
    Mutant(
        "K below 1",
        "adaptive",
        "return round(min(max(exact, 1.0), float(num_learners)))",
        "return round(min(exact, float(num_learners)))",
        "K is from 1 to P",
    ),
    Mutant(
        "K never shrinks",
        "adaptive",
        'object.__setattr__(after, "k", self._k(first, loss, num_live))',
        'object.__setattr__(after, "k", max(self.k, self._k(first, loss, num_live)))',
        "K follows the loss in both directions",
    ),
    Mutant(
        "K of the dead",
        "adaptive",
        "return min(self.k, max(1, num_live))",
        "return self.k",
        "an update waits for no more than are left",
    ),
    Mutant(
        "a loss of 0 says nothing",
        "adaptive",
        "if loss <= 0 or (self.cell.distinct",
        "if loss <= 0:\n            return self.k\n        if (self.cell.distinct",
        "a loss of 0 is the limit, K = P",
    ),
    Mutant(
        "K adapts by who has joined",
        "coordinator",
        "self.protocol.measured(event.loss, self.num_live)",
        "self.protocol.measured(event.loss, self.num_live - len(self._expected))",
        "P counts the expected",
    ),
    Mutant(
        "nothing is measured in the warm-up",
        "coordinator",
        "        self.protocol = adapted\n",
        "        if self.current_protocol is adapted:\n            self.protocol = adapted\n",
        "the first loss is the run's first",
    ),
    Mutant(
        "a measurement ends the warm-up",
        "coordinator",
        "        if not self.is_warming_up:\n            self.current_protocol = adapted\n",
        "        self.current_protocol = adapted\n",
        "K counts after the warm-up only",
    ),
    Mutant(
        "a smaller K waits for the next push",
        "coordinator",
        "        # With a smaller K than before, what is held may be enough.\n"
        "        return self._proceed([])",
        "        return []",
        "a measurement may fire an update",
    ),
)


@cache
def _compiled(path: Path) -> CodeType:
    return compile(path.read_text(encoding="utf-8"), str(path), "exec")


@contextmanager
def mutated(mutant: Mutant | None) -> Iterator[MakeCoordinator]:
    """How to make a coordinator of freshly loaded modules, one of them mutated.

    The messages stay shared with the oracle, and the real modules are back afterwards.
    """
    names = [f"gruppetto.protocols.{module}" for module in MODULES]
    real = {name: sys.modules[name] for name in names}
    fresh: dict[str, ModuleType] = {}
    try:
        for module, name in zip(MODULES, names, strict=True):
            path = FOLDER / f"{module}.py"
            code = _compiled(path)
            if mutant is not None and mutant.module == module:
                text = path.read_text(encoding="utf-8").replace(mutant.old, mutant.new)
                code = compile(text, f"<mutated {module}.py>", "exec")
            spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
            assert spec is not None
            fresh[module] = sys.modules[name] = importlib.util.module_from_spec(spec)
            exec(code, vars(fresh[module]))
        protocols, coordinator = fresh["collect"].PROTOCOLS, fresh["coordinator"].Coordinator
        yield lambda settings: make_coordinator(settings, protocols, coordinator)
    finally:
        sys.modules.update(real)


@dataclass(frozen=True)
class Verdict:
    """How a mutant died; ``by`` is None when it lived."""

    by: str | None
    #: Driver seeds run, the killing one included.
    num_seeds: int


def scripts() -> dict[str, Any]:
    """The scripts that take nothing but a way to start a run."""
    return {
        name: test
        for module in (
            test_adasync_scripts,
            test_bound_scripts,
            test_coordinator_scripts,
            test_warmup_scripts,
        )
        for name, test in vars(module).items()
        if name.startswith("test_") and list(inspect.signature(test).parameters) == ["start"]
    }


def judge(mutant: Mutant | None, max_seeds: int = MAX_SEEDS) -> Verdict:
    """Run the driver's seeds, then the scripts, until something is noticed."""
    with mutated(mutant) as make:
        for seed in range(max_seeds):
            try:
                drive(seed, make)
            except AssertionError as error:
                return Verdict(str(error).split("\n")[0].split(" (Settings")[0], seed + 1)

        def start(protocol: str, **settings: Any) -> Watched:
            return Watched(Settings(protocol, **settings), make)

        for name, script in scripts().items():
            try:
                script(start)
            except Exception:
                return Verdict(name, max_seeds)
    return Verdict(None, max_seeds)


def main() -> int:
    print(f"| {'mutant':40} | {'what it breaks':51} | seeds | killed by |")
    print(f"|{'-' * 42}|{'-' * 53}|------:|-----------|")
    alive = 0
    for mutant in MUTANTS:
        verdict = judge(mutant)
        alive += verdict.by is None
        by = verdict.by or "NOTHING"
        print(f"| {mutant.name:40} | {mutant.breaks:51} | {verdict.num_seeds:5} | {by[:100]} |")
    print(f"\n{len(MUTANTS) - alive} of {len(MUTANTS)} killed; the real thing: {judge(None)}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
