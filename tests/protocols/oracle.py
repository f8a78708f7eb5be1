"""A second opinion on the coordinator, written from the design and sharing no logic with it.

`LedgerModel` watches pairs of (event, commands). It predicts no list of commands: it keeps its own
places of mini-batches, members and leases, and asserts what must hold of any list.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bound_oracle import BoundModel

from gruppetto.protocols.messages import (
    NOT_FINITE,
    RESUMED,
    TOO_STALE,
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Discard,
    Event,
    Finish,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
    LearnerLost,
    ProgressMeasured,
    StopRequested,
)

#: name -> (waits for distinct learners, cancels unfinished work, K of P learners and a number);
#: AdaSync with its cell, its number is the K measured last.
RULES: dict[str, tuple[bool, bool, Callable[[int, int], int]]] = {
    "k-sync": (True, True, lambda p, k: k),
    "k-batch-sync": (False, True, lambda p, k: k),
    "k-async": (True, False, lambda p, k: k),
    "k-batch-async": (False, False, lambda p, k: k),
    "hardsync": (True, True, lambda p, _: p),
    "softsync": (False, False, lambda p, n: p // n),
    "async": (False, False, lambda p, _: 1),
    "backup": (True, True, lambda p, b: p - b),
    "rennala": (False, True, lambda p, k: k),
    "ringmaster": (False, False, lambda p, _: 1),
    "ssp": (False, False, lambda p, _: 1),
    "adasync:over=k-sync": (True, True, min),
    "adasync:over=k-batch-sync": (False, True, min),
    "adasync:over=k-async": (True, False, min),
    "adasync:over=k-batch-async": (False, False, min),
}
#: The order of commands in one list.
ORDER = (ApplyUpdate, Cancel, Compute, Finish)
FINAL = ("applied", "given up", "dropped")
LATE = {"requeue": "to do", "drop": "dropped"}


def best_k(k0: int, ratio: float, live: int, distinct: bool) -> int:
    """Where d/dK of F tau(K) + c/K is nearest to 0, K from 1 to P; c is what makes K0 best before.

    Distinct: tau = ln(P/(P - K)), so the root of K^2 / (P - K) = ratio K0^2 / (P - K0). Found by
    halving, not by a formula.
    """
    low, high = 0.0, float(live)
    for _ in range(100):
        k = (low + high) / 2
        if distinct:
            too_small = k * k * (live - k0) < ratio * k0 * k0 * (live - k)
        else:
            too_small = k * k < ratio * k0 * k0
        low, high = (k, high) if too_small else (low, k)
    return min(max(1, math.floor(low + 0.5)), live)


@dataclass(frozen=True)
class Settings:
    """Everything a run is made of, besides its events."""

    protocol: str
    learners: int = 3
    mini_batches: int | None = 12
    on_late: str = "requeue"
    modulation: str = "none"
    max_attempts: int = 3
    max_given_up: int = 0
    #: Mini-batches settled under hardsync's rules first.
    warmup: int = 0


class LedgerModel:
    """Where every mini-batch is, who is here, and when an update must fire."""

    def __init__(self, run: Settings) -> None:
        name = next(name for name in (run.protocol.split(",")[0], run.protocol.split(":")[0])
                    if name in RULES)  # fmt: skip
        self.own_rules, self.warmup = RULES[name], run.warmup
        self.is_warming_up = run.warmup > 0
        self._obey(RULES["hardsync"] if self.is_warming_up else self.own_rules)
        numbers = [int(x) for x in re.findall(r"=(\d+)", run.protocol)]
        self.number = numbers[0] if numbers else 0
        self.k0 = self.number if name.startswith("adasync") else None
        self.first_loss: float | None = None
        self.total, self.late = run.mini_batches, LATE[run.on_late]
        self.max_attempts, self.max_given_up = run.max_attempts, run.max_given_up
        self.place: dict[int, str] = {}  # of mini-batches leased before; all others are to do
        self.reserved: dict[int, int] = {}
        self.just_failed: int | None = None
        self.given: dict[int, Compute] = {}  # every lease ever
        self.open: dict[int, Compute] = {}
        self.held: list[GradientPushed] = []
        self.expected, self.here, self.gone = set(range(run.learners)), set[int](), set[int]()
        self.bound = BoundModel(run.protocol)
        for learner in self.expected:
            self.bound.joined(learner)
        self.attempts: Counter[int] = Counter()
        self.not_finite: set[int] = set()
        # cancelled, discarded, rejected, samples, staleness; and what a bound did
        self.counts: Counter[str] = Counter()
        self.version = 0
        self.finished: str | None = None

    def _obey(self, rules: tuple[bool, bool, Callable[[int, int], int]]) -> None:
        self.distinct, self.cancels, self.rule = rules

    def num_in(self, *places: str) -> int:
        everywhere = list(self.place.values())
        return sum(map(everywhere.count, places))

    def num_to_do(self) -> float:
        untouched = float("inf") if self.total is None else self.total - len(self.place)
        return untouched + self.num_in("to do")

    def num_left(self) -> int:
        total = len(self.place) if self.total is None else self.total
        return total - self.num_in(*FINAL)

    def lowest_unreserved(self) -> int | None:
        # Among so many numbers of an endless run at least one was never touched.
        end = len(self.place) + len(self.reserved) + 1 if self.total is None else self.total
        taken = set(self.reserved.values())
        free = [b for b in range(end) if self.place.get(b, "to do") == "to do" and b not in taken]
        # What has just failed is tried at another time, if there is anything else.
        return next((b for b in free if b != self.just_failed), next(iter(free), None))

    def free_learners(self) -> set[int]:
        """Who may start work: here, without an open lease, not waiting for the update."""
        return self.here - {c.learner for c in self.open.values()} - self._waiting()

    def num_to_wait(self) -> float:
        """min(K, what can still arrive)."""
        live = self.expected | self.here
        arriving = self.num_to_do() + len(self.open) if live else 0
        if self.distinct:
            arriving = min(arriving, len(live - self._waiting()))
        return min(max(1, self.rule(len(live), self.number)), len(self.held) + arriving)

    def k(self) -> int:
        """K of the live learners."""
        return max(1, self.rule(len(self.expected | self.here), self.number))

    def may_fire(self) -> bool:
        under_way = [compute.version for compute in self.open.values()]
        return self.is_warming_up or self.bound.may_fire(under_way, self.version, self.k())

    def may_start(self, learner: int) -> bool:
        others = [compute.version for compute in self.open.values()]
        others += [push.version for push in self.held]
        return self.is_warming_up or self.bound.may_start(learner, others, self.version, self.k())

    def watch(self, event: Event, commands: Sequence[Command]) -> None:
        """Follow one event and what the coordinator answered; AssertionError where it is wrong."""
        kinds = [type(command) for command in commands]
        if isinstance(event, GradientPushed | GradientFailed) and event.lease not in self.open:
            right = [c.lease for c in commands if isinstance(c, Discard)] == [event.lease]
            assert right and len(kinds) == 1, (
                f"an outdated event yields one Discard and no work, got {commands}"
            )
            self.counts["discarded"] += 1
            return
        refused: set[int] = set()
        if isinstance(event, GradientPushed) and self._is_refused(event):
            assert commands[:1] == [Discard(event.lease, TOO_STALE)], f"too stale: {commands}"
            self.counts.update(discarded=1, refused=1)
            refused = {self.given[event.lease].learner}
            commands, kinds = commands[1:], kinds[1:]
        assert Discard not in kinds, f"nothing is outdated here, got {commands}"
        stop = self._happened(event)
        if self.finished is not None:
            assert not commands, f"nothing follows Finish, got {commands}"
            return
        assert kinds == sorted(kinds, key=ORDER.index), f"wrong order of commands: {commands}"
        updates = [c for c in commands if isinstance(c, ApplyUpdate)]
        waits_for, held = self.num_to_wait(), len(self.held)
        is_enough = stop is None and held > 0 and held >= waits_for
        fires = is_enough and self.may_fire()
        self.counts["held back"] += is_enough and not fires
        self.counts["more than K at once"] += fires and held > self.k()
        assert len(updates) == fires, f"{len(updates)} updates with {held} held, {waits_for} needed"
        for update in updates:
            self._applied(update)
        late = list(self.open) if stop is not None or (fires and self.cancels) else []
        if fires and not self.is_warming_up:
            ages = {lease: self.version - compute.version for lease, compute in self.open.items()}
            restarted = [lease for lease, age in ages.items() if self.bound.is_too_old(age)]
            self.counts["restarted"] += len(restarted)
            late += restarted
        assert stop is None or Compute not in kinds, f"work after {stop}: {commands}"
        cancelled = [c.lease for c in commands if isinstance(c, Cancel)]
        assert sorted(cancelled) == late, f"expected Cancel of leases {late}, got {cancelled}"
        for lease in late:
            self.place[self.open.pop(lease).mini_batch] = self.late if stop is None else "to do"
        self.counts["cancelled"] += len(late)
        if fires and self.is_warming_up and self.num_in(*FINAL) >= self.warmup:
            # A clean cut: no gradient is held or on its way, whatever the protocol.
            assert not self.held and not self.open, f"{self.held}, {self.open} cross the cut"
            self.is_warming_up = False
            self._obey(self.own_rules)
        contributors = {self.given[c.lease].learner for u in updates for c in u.contributions}
        if refused:  # whoever was too slow comes last
            contributors |= self.free_learners() - refused
        self._worked([c for c in commands if isinstance(c, Compute)], contributors)
        kept = [learner for learner in self.free_learners() if not self.may_start(learner)]
        self.counts["kept idle"] += bool(kept) and stop is None and self.num_to_do() > 0
        idle = stop is None and self.num_to_do() > 0 and sorted(self.free_learners() - set(kept))
        assert not idle, f"learners {idle} are idle while {self.num_to_do()} mini-batches are to do"
        if stop is None and self.total is not None and self.num_left() == 0:
            stop = "epochs"
        reasons = [c.reason for c in commands if isinstance(c, Finish)]
        assert reasons == ([] if stop is None else [stop]), f"expected to end by {stop}: {reasons}"
        if stop is not None:
            self._end(stop)

    def _is_refused(self, event: GradientPushed) -> bool:
        return not self.is_warming_up and self.bound.refuses(self.version - event.version)

    def _waiting(self) -> set[int]:
        return {self.given[push.lease].learner for push in self.held} if self.distinct else set()

    def _happened(self, event: Event) -> str | None:
        """Take the event itself; the reason if it ends the run."""
        self.just_failed = None
        match event:
            case LearnerJoined(learner):
                self.expected.discard(learner)
                self.here.add(learner)
                self.bound.joined(learner)
            case LearnerLost(learner, reason):
                for place in (self.expected, self.here):
                    place.discard(learner)
                self.gone.add(learner)
                self.bound.lost(learner)
                self.reserved.pop(learner, None)
                for compute in [c for c in self.open.values() if c.learner == learner]:
                    if reason == RESUMED:
                        self.place[self.open.pop(compute.lease).mini_batch] = "to do"
                    else:
                        self._failed(compute.lease, self.late)
            case GradientPushed(lease) if self._is_refused(event):
                self.just_failed = self.open.pop(lease).mini_batch
                self.place[self.just_failed] = self.late
                self.not_finite.clear()
            case GradientPushed(lease):
                self.place[self.open.pop(lease).mini_batch] = "pushed"
                self.held.append(event)
                self.not_finite.clear()
            case GradientFailed(lease, reason):
                if reason == NOT_FINITE:
                    self.not_finite.add(self.open[lease].mini_batch)
                self.just_failed = self.open[lease].mini_batch
                self._failed(lease, "to do")
                self.counts["rejected"] += 1
            case ProgressMeasured(loss):
                self._measured(loss)
            case StopRequested(reason):
                return reason
        if len(self.not_finite) >= 3:
            return "diverged"
        return "given-up" if self.num_in("given up") > self.max_given_up else None

    def _measured(self, loss: float | None) -> None:
        """AdaSync's K, which the rule then takes as its number."""
        live = len(self.expected | self.here)
        if self.k0 is None or loss is None or live == 0:
            return
        if self.first_loss is None and loss > 0:
            self.first_loss = loss
        if self.first_loss is None:
            return
        distinct = self.own_rules[0]
        if loss <= 0 or (distinct and self.k0 >= live):
            self.number = live
        else:
            self.number = best_k(self.k0, self.first_loss / loss, live, distinct)

    def _failed(self, lease: int, place: str) -> None:
        mini_batch = self.open.pop(lease).mini_batch
        self.attempts[mini_batch] += 1
        enough = self.attempts[mini_batch] >= self.max_attempts
        self.place[mini_batch] = "given up" if enough else place

    def _applied(self, update: ApplyUpdate) -> None:
        got = [(c.lease, c.version, c.staleness, c.num_samples) for c in update.contributions]
        want = [(p.lease, p.version, self.version - p.version, p.num_samples) for p in self.held]
        assert got == want, f"expected the held pushes in arrival order {want}, got {got}"
        assert all(staleness >= 0 for _, _, staleness, _ in got), f"negative staleness: {got}"
        if self.bound.limits_staleness():
            assert all(n <= self.bound.s for _, _, n, _ in got), f"beyond the bound: {got}"
        factors = [c.factor for c in update.contributions]
        assert all(s is not None and 0 < s <= 1 for s in factors), f"factors {factors}"
        self.version += 1
        assert update.version == self.version, f"version {update.version} after {self.version - 1}"
        for lease, _, staleness, num_samples in got:
            mini_batch = self.given[lease].mini_batch
            assert self.place[mini_batch] == "pushed", f"mini-batch {mini_batch} applied twice"
            self.place[mini_batch] = "applied"
            self.bound.applied(self.given[lease].learner)
            self.counts.update(samples=num_samples, staleness=staleness)
        self.held.clear()

    def _worked(self, computes: Sequence[Compute], contributors: set[int]) -> None:
        """All lease, then all reserve, both in this order: contributors first, then by number."""
        free = self.free_learners()
        order = [*sorted(free & contributors), *sorted(free - contributors)]
        got = [compute.learner for compute in computes]
        at = 0
        for compute in computes:
            # Whoever may not start is passed over.
            while at < len(order) and not self.may_start(order[at]):
                at += 1
            assert order[at : at + 1] == [compute.learner], f"of {order} in order, got {got}"
            at += 1
            self._leased(compute)
        for compute in computes:
            self._reserves(compute)

    def _leased(self, compute: Compute) -> None:
        learner, mini_batch = compute.learner, compute.mini_batch
        assert compute.lease not in self.given, f"lease {compute.lease} is given twice"
        assert learner in self.free_learners(), f"learner {learner} may not start work"
        assert compute.version == self.version, f"{compute} is not at version {self.version}"
        want = self.reserved.pop(learner, None)
        want = self.lowest_unreserved() if want is None else want
        if want is None and self.reserved:
            want, holder = min((b, holder) for holder, b in self.reserved.items())
            del self.reserved[holder]
            self.counts["stolen"] += 1
        assert mini_batch == want, f"learner {learner} takes {want} next, got {mini_batch}"
        where = self.place.get(mini_batch, "to do")
        assert where == "to do", f"mini-batch {mini_batch} is leased and {where}"
        self.place[mini_batch] = "leased"
        self.given[compute.lease] = self.open[compute.lease] = compute

    def _reserves(self, compute: Compute) -> None:
        learner, got = compute.learner, compute.next_mini_batch
        # Who is still expected is to find the next of the stream free.
        want = None if self.expected else self.lowest_unreserved()
        assert got == want, f"learner {learner} reserves {want}, got {got}"
        if want is not None:
            self.reserved[learner] = want

    def _end(self, reason: str) -> None:
        self.finished = reason
        for push in self.held:
            self.place[self.given[push.lease].mini_batch] = "to do"
        self.held.clear()
