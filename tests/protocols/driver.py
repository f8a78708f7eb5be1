"""Random runs of a coordinator against the oracle, each replayable from its seed.

A run is its `Settings` and a list of choices (kind of event, which one); `play` turns choices into
events. `drive` draws both from a seed; property-based tests hand `play` lists that shrink. Events
that cannot have happened must raise and leave no mark, and a run must end when everybody pushes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from bound_oracle import BOUNDABLE
from oracle import RULES, LedgerModel, Settings

from gruppetto.errors import ImpossibleEvent
from gruppetto.protocols import PROTOCOLS, Coordinator
from gruppetto.protocols.messages import (
    NOT_FINITE,
    RESUMED,
    ApplyUpdate,
    Cancel,
    Command,
    Compute,
    Event,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
    LearnerLost,
    ProgressMeasured,
    StopRequested,
)
from gruppetto.staleness import MODULATIONS

T = TypeVar("T")

#: Kinds of choices; `outdated` is any push or failure of a closed lease: late, twice, or a ghost's.
KINDS = (
    *("push", "push-newer", "fail", "not-finite", "join", "lose"),
    *("outdated", "impossible", "measure", "stop"),
)

#: Weights of KINDS: a calm run, a failing task, dying learners, numerical trouble, and all at once.
MOODS = (
    (80, 8, 0.5, 0.5, 3, 1, 3, 2, 1, 0.05),
    (60, 6, 18, 2, 3, 1, 4, 3, 1, 0.05),
    (60, 6, 1, 0, 9, 8, 5, 3, 1, 0.05),
    (40, 6, 1, 30, 3, 1, 4, 3, 1, 0.05),
    (40, 10, 5, 4, 6, 5, 8, 8, 2, 0.5),
)

#: What a measurement may say, falling mostly; no two of them put K between two whole numbers.
LOSSES = (2.31, 1.73, 1.19, 0.83, 0.53, 0.29, 0.113, 0.041, 0.0107, 1e-7, 0.0, -0.5, None, 9.7, 1e9)

MakeCoordinator = Callable[[Settings], Any]


def make_coordinator(settings: Settings, protocols: Any = PROTOCOLS, cls: Any = Coordinator) -> Any:
    """The coordinator of some settings; a mutant brings its own classes."""
    return cls(
        protocols.parse(settings.protocol),
        range(settings.learners),
        settings.mini_batches,
        modulation=MODULATIONS.parse(settings.modulation),
        on_late=settings.on_late,
        max_attempts=settings.max_attempts,
        max_given_up=settings.max_given_up,
        warmup_mini_batches=settings.warmup,
    )


class Watched:
    """A coordinator and the oracle that watches it; they must agree after every event."""

    def __init__(self, settings: Settings, make: MakeCoordinator = make_coordinator) -> None:
        self.settings = settings
        self.coordinator = make(settings)
        self.model = LedgerModel(settings)
        self.log: list[tuple[Event, list[Command]]] = []
        #: What was seen, so that a test can tell that the driver reaches every corner.
        self.seen: Counter[str] = Counter()
        self.last: Event | None = None

    def send(self, event: Event) -> list[Command]:
        """Handle an event that may happen."""
        self.last = event
        was_warming_up = self.model.is_warming_up
        if isinstance(event, LearnerLost):
            holders = {self.model.given[push.lease].learner for push in self.model.held}
            self.seen["lost while expected"] += event.learner in self.model.expected
            self.seen["lost while its contribution is held"] += event.learner in holders
        k = self.model.number
        commands: list[Command] = self.coordinator.handle(event)
        self.log.append((event, commands))
        self.model.watch(event, commands)
        computes = [command for command in commands if isinstance(command, Compute)]
        reserving = [compute for compute in computes if compute.next_mini_batch is not None]
        self.seen["leased while somebody is expected"] += bool(computes and self.model.expected)
        self.seen["several reserve at once"] += len(reserving) > 1
        self.seen["K grows"] += self.model.number > k
        self.seen["K shrinks"] += self.model.number < k
        self.seen["a measurement fires an update"] += isinstance(event, ProgressMeasured) and any(
            isinstance(command, ApplyUpdate) for command in commands
        )
        if was_warming_up:
            over = not self.model.is_warming_up
            self.seen["warm-up over"] += over
            self.seen["warm-up's last update cancels"] += over and any(
                isinstance(command, Cancel) for command in commands
            )
            self.seen["lost in the warm-up"] += isinstance(event, LearnerLost)
            self.seen["stopped in the warm-up"] += isinstance(event, StopRequested)
            self.seen["measured in the warm-up"] += isinstance(event, ProgressMeasured)
            self.seen["warm-up shortened by what is given up or dropped"] += (
                over and self.model.num_in("applied") < self.model.warmup
            )
        self._compare()
        return commands

    def refuse(self, event: Event) -> None:
        """Handle an event that cannot have happened: it raises and leaves no mark."""
        self.last = event
        before = snapshot(self.coordinator)
        try:
            commands = self.coordinator.handle(event)
        except ImpossibleEvent:
            after = snapshot(self.coordinator)
            assert before == after, f"the refused {event} left a mark: {before} became {after}"
        else:
            raise AssertionError(f"the impossible {event} was answered by {commands}")

    def _compare(self) -> None:
        coordinator, model = self.coordinator, self.model
        ledger, counts = coordinator.ledger, self.model.counts
        places = Counter(model.place.values())
        pairs = {
            "version": (coordinator.version, model.version),
            "finished": (coordinator.finished, model.finished),
            "warming up": (coordinator.is_warming_up, model.is_warming_up),
            "live": (coordinator.num_live, len(model.expected) + len(model.here)),
            "to wait": (coordinator.num_to_wait(), model.num_to_wait()),
            "held": (coordinator.num_held, len(model.held)),
            "to do": (ledger.num_to_do, model.num_to_do()),
            "leased": (len(ledger.leased), len(model.open)),
            "pushed": (len(ledger.pushed), places["pushed"]),
            "applied": (ledger.num_applied, places["applied"]),
            "given up": (ledger.num_given_up, places["given up"]),
            "dropped": (ledger.num_dropped, places["dropped"]),
            "left": (ledger.num_left, model.num_left()),
            "ever leased": (ledger.num_ever_leased, len(model.place)),
            "cancelled": (coordinator.num_cancelled, counts["cancelled"]),
            "discarded": (coordinator.num_discarded, counts["discarded"]),
            "rejected": (coordinator.num_rejected, counts["rejected"]),
            "lost": (coordinator.num_lost, len(model.gone)),
            "samples": (coordinator.num_samples_applied, counts["samples"]),
            "staleness": (coordinator.staleness.total, counts["staleness"]),
            "staleness count": (coordinator.staleness.count, places["applied"]),
        }
        wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        assert not wrong, f"the coordinator counts, and should: {wrong}"
        if model.total is not None:
            accounted = ledger.num_applied + ledger.num_given_up + ledger.num_dropped
            unfinished = ledger.num_to_do + len(ledger.leased) + len(ledger.pushed)
            assert accounted + unfinished == model.total, (
                f"{accounted} accounted for and {unfinished} unfinished of {model.total}"
            )


def snapshot(coordinator: Any) -> str:
    """The whole state as text, order of dicts included."""
    state = {k: v for k, v in vars(coordinator).items() if k not in ("_handlers", "ledger")}
    seen = state.pop("staleness")
    return repr((state, vars(coordinator.ledger), seen.histogram, seen.count, seen.total))


def _pick(options: Sequence[T], which: int) -> T:
    return options[which % len(options)]


def choose(watched: Watched, kind: str, which: int) -> Event | None:
    """The event of a choice; None when there is none of this kind now. Impossible ones apart."""
    model = watched.model
    if kind in ("push", "push-newer", "fail", "not-finite"):
        if not model.open:
            return None
        compute = _pick(list(model.open.values()), which)
        if kind in ("push", "push-newer"):
            newer = (1 + which) % (model.version - compute.version + 1)
            version = compute.version + (newer if kind == "push-newer" else 0)
            return GradientPushed(compute.lease, version, 0.5, 1 + which % 7)
        return GradientFailed(compute.lease, NOT_FINITE if kind == "not-finite" else "bad data")
    if kind == "join":
        new = 1 + max(model.expected | model.here | model.gone, default=-1)
        return LearnerJoined(_pick([*sorted(model.expected), new], which))
    if kind == "lose":
        live = sorted(model.expected | model.here)
        reason = RESUMED if which % 5 == 4 else "killed"
        return LearnerLost(_pick(live, which), reason) if live else None
    if kind == "outdated":
        closed = [lease for lease in model.given if lease not in model.open]
        if not closed:
            return None
        lease, reason = _pick(closed, which), _pick(("bad data", NOT_FINITE), which // 2)
        pushed = GradientPushed(lease, which % (model.version + 1), 0.5, 4)
        return GradientFailed(lease, reason) if which % 3 == 0 else pushed
    if kind == "measure":
        return ProgressMeasured(_pick(LOSSES, which))
    return StopRequested("max-time")


def choose_impossible(watched: Watched, which: int) -> Event:
    """An event that cannot have happened."""
    model = watched.model
    ever = model.expected | model.here | model.gone
    never = len(model.given) + which % 3
    options: list[Event] = [
        GradientPushed(never, model.version, 0.5, 4),
        GradientPushed(-1, model.version, 0.5, 4),
        GradientFailed(never, NOT_FINITE),
        LearnerLost(max(ever, default=0) + 1 + which % 3, "never joined"),
        LearnerJoined(-1),
        ProgressMeasured(math.nan),
        ProgressMeasured(-math.inf),
    ]
    options += [LearnerLost(learner, "again") for learner in sorted(model.gone)[:2]]
    options += [LearnerJoined(learner) for learner in sorted(model.here | model.gone)[:3]]
    if model.open:
        lease, version = _pick([(c.lease, c.version) for c in model.open.values()], which)
        options += [
            GradientPushed(lease, model.version + 1, 0.5, 4),
            GradientPushed(lease, version - 1, 0.5, 4),
            GradientPushed(lease, version, math.nan, 4),
            GradientPushed(lease, version, math.inf, 4),
            GradientPushed(lease, version, 0.5, 0),
        ]
    return _pick(options, which)


def play(
    settings: Settings, choices: Iterable[tuple[str, int]], make: MakeCoordinator = make_coordinator
) -> Watched:
    """Play the choices, then let everybody push until the run ends, as it must."""
    watched = Watched(settings, make)
    try:
        for kind, which in choices:
            if kind == "impossible":
                watched.refuse(choose_impossible(watched, which))
            else:
                event = choose(watched, kind, which)
                if event is None:
                    continue
                watched.seen["after the end"] += watched.model.finished is not None
                watched.send(event)
            watched.seen[kind] += 1
        _finish(watched)
    except Exception as error:
        what = f"{error}" if isinstance(error, AssertionError) else f"{error!r}"
        where = f"{settings}, event {len(watched.log)}: {watched.last}"
        raise AssertionError(f"{what} ({where})") from error
    return watched


def _finish(watched: Watched) -> None:
    model = watched.model
    for learner in sorted(model.expected):  # they come or are given up on: nobody else knows
        lost = (learner + len(watched.log)) % 3 == 0
        watched.send(LearnerLost(learner, "start timed out") if lost else LearnerJoined(learner))
    if not model.here:
        watched.send(choose(watched, "join", 0) or LearnerJoined(0))
    if model.total is None:
        watched.send(StopRequested("updates"))
    left = most = model.num_left()
    if model.bound.kind == "discard":  # between two updates everybody may push one in vain
        most = (left + 1) * (len(model.here) + 1)
    for n in range(most + 1):
        if model.finished is not None:
            break
        assert n < most, f"{n} pushes into an open run with {left} mini-batches left did not end it"
        assert model.open, f"nobody computes, and {model.num_left()} mini-batches are left"
        event = choose(watched, "push", n * 7)
        assert event is not None
        watched.send(event)
    watched.seen[f"finished: {model.finished}"] += 1
    for kind in ("stolen", "refused", "restarted", "held back", "kept idle", "more than K at once"):
        watched.seen[kind] += model.counts[kind]
    for kind in ("outdated", "join", "lose", "stop", "measure"):
        event = choose(watched, kind, 1)
        if event is not None:
            watched.send(event)
    watched.refuse(choose_impossible(watched, len(watched.log)))


def draw_settings(rng: random.Random, name: str, bound: str | None = None) -> Settings:
    """Random settings of a protocol that its `check` allows at the start.

    ``bound`` is discard, restart or wait, for a protocol that can have one.
    """
    learners = rng.randint(1, 6)
    most = learners if name in ("k-sync", "k-async", "softsync") else 2 * learners + 1
    number = rng.randint(1, most)
    key = {"softsync": ":n=", "hardsync": "", "async": ""}.get(name, ":k=")
    spec = name + (f"{key}{number}" if key else "")
    if name.startswith("adasync"):
        spec = f"{name},k0={min(number, learners)},interval=1"
    spec = {"ringmaster": f"ringmaster:r={number}", "ssp": f"ssp:s={number - 1}"}.get(name, spec)
    if bound is not None:
        k = {"softsync": learners // number, "async": 1}.get(name, number)
        least = -(-learners // k) - 1 if bound == "wait" else 0
        s = least + rng.choice([0, 0, 1, 1, 2, 4])
        spec += f"{',' if key else ':'}max_staleness={s},on_stale={bound}"
    if name == "backup":
        spec = f"backup:b={rng.randint(0, learners - 1)}"
    return Settings(
        spec,
        learners,
        rng.choice([None, rng.randint(1, 5), rng.randint(5, 20), rng.randint(10, 50)]),
        rng.choice(["requeue", "requeue", "drop"]),
        rng.choice(["none", "inverse", "inverse-mean", "inverse-mean:cap=true"]),
        rng.choice([1, 2, 3, 3]),
        rng.choice([0, 1, 100, 100]),
        # Mostly none, else from one mini-batch to about the whole run, or past its end.
        rng.choice([0, 0, rng.randint(1, 8), rng.randint(1, 30)]),
    )


def drive(
    seed: int,
    make: MakeCoordinator = make_coordinator,
    *,
    protocol: str | None = None,
    bound: str | None = None,
) -> Watched:
    """One random run; any disagreement is an AssertionError that names the seed.

    Args:
        seed: of everything.
        make: builds the coordinator.
        protocol: the name of one; drawn from the seed when None, with or without a bound.
        bound: discard, restart or wait; None for none.
    """
    rng = random.Random(seed)
    name = protocol if protocol is not None else rng.choice(sorted(RULES))
    if protocol is None and name in BOUNDABLE:
        bound = rng.choice([None, None, "discard", "restart", "wait"])
    settings = draw_settings(rng, name, bound)
    mood = rng.choice(MOODS)
    if name.startswith("adasync"):  # it listens to what others ignore
        mood = tuple(15 if kind == "measure" else w for kind, w in zip(KINDS, mood, strict=True))
    num_choices = rng.randint(0, 10 + 3 * (settings.mini_batches or 20))
    kinds = rng.choices(KINDS, mood, k=num_choices)
    choices = [(kind, rng.randrange(1 << 16)) for kind in kinds]
    # Most engines start with everybody joining; the rest of the runs have late starters.
    if rng.random() < 0.6:
        choices = [("join", 0)] * settings.learners + choices
    try:
        return play(settings, choices, make)
    except AssertionError as error:
        chosen = f", protocol={protocol!r}, bound={bound!r}" if protocol is not None else ""
        again = f"drive({seed}{chosen})"
        raise AssertionError(f"{error}\nreplay it with {again}") from error
