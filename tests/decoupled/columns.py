"""Random runs of the programs of a decoupled schedule, against a model that knows only the paper.

The model: in iteration t a module runs mini-batch t forward, then mini-batch t - d backward. A pass
can be run once its neighbour has sent what it takes. Everything else is checked from outside.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from gruppetto.errors import ImpossibleEvent
from gruppetto.protocols.messages import (
    Backward,
    BackwardFinished,
    Command,
    Event,
    Finish,
    Forward,
    ForwardFinished,
    GradientFailed,
    ModuleUpdated,
    PassFailed,
    Step,
    StopAt,
    StopPassedOn,
    StopRequested,
)

#: Passes as the tests write them: "F0", "B0".
Column = list[str]


@dataclass(frozen=True)
class Scenario:
    """A run: its schedule, when somebody wants it to stop, and who is served first."""

    delays: tuple[int, ...]
    num_mini_batches: int
    tail: str = "drain"
    #: Events before the run is asked to stop.
    stop_after: int | None = None
    updates: int | None = None
    choices: tuple[int, ...] = (0,)

    def schedule(self, code: ModuleType, **more: Any) -> Any:
        apart = max((a - b for a, b in zip(self.delays, self.delays[1:], strict=False)), default=0)
        given = {"capacity": max(1, apart), "updates": self.updates, **more}
        return code.Schedule(self.delays, self.num_mini_batches, self.tail, **given)


def scenario_of(seed: int) -> Scenario:
    """One drawn from a seed."""
    rng = random.Random(seed)
    delays = [0]
    for _ in range(rng.randrange(4)):
        delays.append(delays[-1] + rng.choice((0, 1, 1, 2, 2, 3)))
    return Scenario(
        tuple(reversed(delays)),
        rng.randint(1, 9),
        rng.choice(("drain", "drain", "drop")),
        rng.choice((None, rng.randrange(90))),
        rng.choice((None, None, rng.randint(1, 10))),
        tuple(rng.randrange(12) for _ in range(rng.randint(1, 9))),
    )


def expected_column(delay: int, total: int, tail: str = "drain") -> Column:
    """The paper's iterations of a module."""
    found = []
    for t in range(total + (delay if tail == "drain" else 0)):
        if t < total:
            found.append(f"F{t}")
        if t >= delay:
            found.append(f"B{t - delay}")
    return found


@dataclass
class Log:
    """What the modules of one run did."""

    columns: dict[int, Column]
    versions: dict[int, int]
    #: (module, mini-batch) -> version at the forward pass, and at the update.
    forward_at: dict[tuple[int, int], int] = field(default_factory=dict)
    update_at: dict[tuple[int, int], int] = field(default_factory=dict)
    most_in_flight: dict[int, int] = field(default_factory=dict)
    reason: str | None = None


def play(code: ModuleType, scenario: Scenario, version: int = 0, *, checks: bool = False) -> Log:
    """Run a scenario's network to its end; every event is answered before the next.

    Args:
        code: the module of schedules, or a mutant of it.
        scenario: which run.
        version: at which the modules begin.
        checks: feed events that cannot have happened, too.
    """
    schedule = scenario.schedule(code)
    program = code.NetworkProgram(schedule, version)
    modules = range(1, len(scenario.delays) + 1)
    log = Log({k: [] for k in modules}, dict.fromkeys(modules, version))
    in_flight = {k: set(_flying(scenario, k, version)) for k in modules}
    log.forward_at = {(k, b): max(0, b - scenario.delays[k - 1]) for k in modules
                      for b in in_flight[k]}  # fmt: skip
    sent = {(k, "F", b) for k in modules for b in range(_forwarded(scenario, k, version))}
    told: dict[int, Command] = {}
    starting = set(modules)
    choices = _cycle(scenario.choices)
    num_events = 0
    while log.reason is None:
        assert num_events < 2000, "the run does not end"
        ready = sorted(k for k in (*starting, *told) if k in starting or _can(told[k], sent))
        if scenario.stop_after == num_events:
            event: Event = StopRequested("asked")
        else:
            assert ready, f"modules wait for each other for ever: {told}"
            event = _event_of(ready[next(choices) % len(ready)], starting, told, log, in_flight,
                              sent, len(modules))  # fmt: skip
        # Not at every event: it takes a hundred of them.
        if checks and (num_events + scenario.choices[0]) % 6 == 0:
            check_impossible(program, event, told, starting, log)
        num_events += 1
        for command in program.handle(event):
            assert log.reason is None, "nothing follows Finish"
            match command:
                case Forward(module=k) | Backward(module=k) | Step(module=k):
                    assert k not in told, f"module {k} was told two things at once"
                    told[k] = command
                    _check_command(command, log, in_flight, schedule)
                case StopAt(version=at):
                    for k in [k for k in told if log.versions[k] == at]:
                        assert isinstance(told[k], Forward), "a backward pass is forgotten"
                        del told[k]
                    starting -= {k for k in starting if log.versions[k] == at}
                case Finish(reason=reason):
                    log.reason = reason
    assert not told, "Finish comes when nobody has anything to do"
    log.most_in_flight = {k: max(most, default=0) for k, most in _flights(log).items()}
    return log


def _forwarded(scenario: Scenario, module: int, version: int) -> int:
    ahead = version + scenario.delays[module - 1] if version else 0
    return min(ahead, scenario.num_mini_batches)


def _flying(scenario: Scenario, module: int, version: int) -> range:
    return range(version, _forwarded(scenario, module, version))


def _can(command: Command, sent: set[tuple[int, str, int]]) -> bool:
    match command:
        case Forward(module, mini_batch):
            return module == 1 or (module - 1, "F", mini_batch) in sent
        case Backward(module, mini_batch):
            is_last = (module, "loss", mini_batch) in sent
            return is_last or (module + 1, "B", mini_batch) in sent
    return True


def _event_of(
    k: int,
    starting: set[int],
    told: dict[int, Command],
    log: Log,
    in_flight: dict[int, set[int]],
    sent: set[tuple[int, str, int]],
    last: int,
) -> Event:
    if k in starting:
        starting.discard(k)
        return ModuleUpdated(k, log.versions[k])
    match told.pop(k):
        case Forward(mini_batch=b):
            log.columns[k].append(f"F{b}")
            log.forward_at[k, b] = log.versions[k]
            in_flight[k].add(b)
            sent.add((k, "F", b))
            if k == last:
                sent.add((k, "loss", b))
            return ForwardFinished(k, b, log.versions[k], 0.5 if k == last else None)
        case Backward(mini_batch=b):
            log.columns[k].append(f"B{b}")
            in_flight[k].discard(b)
            sent.add((k, "B", b))
            return BackwardFinished(k, b, log.versions[k])
        case Step(mini_batch=b):
            log.update_at[k, b] = log.versions[k]
            log.versions[k] += 1
            return ModuleUpdated(k, log.versions[k])
    raise AssertionError("no such command")


def _check_command(
    command: Command, log: Log, in_flight: dict[int, set[int]], schedule: Any
) -> None:
    match command:
        case Forward(module, mini_batch):
            assert mini_batch < schedule.num_mini_batches
            assert mini_batch not in in_flight[module]
            most = schedule.most_in_flight(module)
            assert len(in_flight[module]) + 1 <= most, "more in flight than predicted"
        case Backward(module, mini_batch):
            assert mini_batch in in_flight[module], "backward before forward"
            assert mini_batch == log.versions[module], "applied out of order"


def _flights(log: Log) -> dict[int, list[int]]:
    counts: dict[int, list[int]] = {}
    for k, column in log.columns.items():
        now, seen = 0, []
        for action in column:
            now += 1 if action[0] == "F" else -1
            seen.append(now)
        counts[k] = seen
    return counts


def _cycle(choices: Sequence[int]) -> Iterator[int]:
    while True:
        yield from choices


# ------------------------------------------------------------------ what must not be


def check_impossible(
    program: Any,
    legal: Event,
    told: dict[int, Command],
    starting: set[int],
    log: Log,
) -> None:
    """Events that cannot have happened raise, and change nothing."""
    before = picture(program)
    for event in _impossible(legal, program, told, starting, log):
        try:
            program.handle(event)
        except ImpossibleEvent:
            assert picture(program) == before, f"{event} was refused and left a mark"
        else:
            raise AssertionError(f"{event} was taken, though nothing led to it")


def _impossible(
    legal: Event,
    program: Any,
    told: dict[int, Command],
    starting: set[int],
    log: Log,
) -> Iterable[Event]:
    last = len(program.modules)
    yield GradientFailed(0, "not of a module")
    yield ModuleUpdated(0, 0)
    yield ModuleUpdated(last + 1, 0)
    for k in range(1, last + 1):
        now = log.versions[k]
        command = told.get(k)
        # A legal event was taken from the model already: its module is judged by what it was told.
        if getattr(legal, "module", None) == k:
            yield from _beside(legal)
            continue
        for b in range(max(0, now - 1), now + 3):
            for version in (now - 1, now, now + 1):
                if not (isinstance(command, Forward) and (b, version) == (command.mini_batch, now)):
                    yield ForwardFinished(k, b, version, None)
                if not (
                    isinstance(command, Backward) and (b, version) == (command.mini_batch, now)
                ):
                    yield BackwardFinished(k, b, version)
            if not (isinstance(command, Forward | Backward | Step) and b == command.mini_batch):
                yield PassFailed(k, b, "no such pass")
        for version in range(max(0, now - 1), now + 3):
            is_first = k in starting and version == now
            if not is_first and not (isinstance(command, Step) and version == now + 1):
                yield ModuleUpdated(k, version)


def _beside(legal: Event) -> Iterable[Event]:
    match legal:
        case ForwardFinished(k, b, version, loss):
            yield BackwardFinished(k, b, version)
            yield ModuleUpdated(k, version)
            yield ModuleUpdated(k, version + 1)
            yield ForwardFinished(k, b, version + 1, loss)
            yield ForwardFinished(k, b + 1, version, loss)
        case BackwardFinished(k, b, version):
            yield ForwardFinished(k, b, version, None)
            yield ModuleUpdated(k, version)
            yield ModuleUpdated(k, version + 1)
            yield BackwardFinished(k, b, version + 1)
            yield BackwardFinished(k, b + 1, version)
        case ModuleUpdated(k, version):
            yield ModuleUpdated(k, version - 1)
            yield ModuleUpdated(k, version + 1)
            yield ForwardFinished(k, version, version, None)
            yield BackwardFinished(k, version - 1, version - 1)


def picture(program: Any) -> Any:
    """All state of a program, to be compared; values are immutable, or lists of such."""
    modules = [tuple(vars(module).values()) for module in program.modules]
    rest = [tuple(v) if isinstance(v, list) else v for k, v in vars(program).items()
            if k != "modules"]  # fmt: skip
    return modules, rest


# --------------------------------------------------- each module with a program of its own


def play_apart(code: ModuleType, scenario: Scenario, version: int = 0) -> Log:
    """The same, as processes do it: a stop travels behind the mini-batches sent before it."""
    schedule = scenario.schedule(code)
    modules = range(1, len(scenario.delays) + 1)
    programs = {k: code.ModuleProgram(schedule, k, version) for k in modules}
    log = Log({k: [] for k in modules}, dict.fromkeys(modules, version))
    in_flight = {k: set(_flying(scenario, k, version)) for k in modules}
    #: What module k finds in its ring: mini-batches in order, or a stop.
    rings: dict[int, list[int | StopAt]] = {k: [] for k in modules}
    gradients: set[tuple[int, int]] = set()
    for k in modules[1:]:
        between = range(_forwarded(scenario, k, version), _forwarded(scenario, k - 1, version))
        rings[k] = list(between)
    told: dict[int, Command] = {}
    starting = set(modules)
    choices = _cycle(scenario.choices)
    num_events, last = 0, len(modules)
    reasons: dict[int, str] = {}

    def able(k: int) -> bool:
        if k in reasons:
            return False
        if k in starting:
            return True
        match told.get(k):
            case Forward():
                return k == 1 or bool(rings[k])
            case Backward(mini_batch=b):
                return k == last or (k + 1, b) in gradients
            case Step():
                return True
        return False

    def take(k: int, event: Event) -> None:
        for command in programs[k].handle(event):
            match command:
                case StopAt():
                    if k < last:
                        rings[k + 1].append(command)
                case Finish(reason=reason):
                    reasons[k] = reason
                    told.pop(k, None)
                case _:
                    told[k] = command
                    _check_command(command, log, in_flight, schedule)

    while len(reasons) < last:
        assert num_events < 2000, "the run does not end"
        if scenario.stop_after == num_events and 1 not in reasons:
            take(1, StopRequested("asked"))
        num_events += 1
        ready = [k for k in modules if able(k)]
        if not ready:
            assert (
                scenario.stop_after is None
                or num_events > scenario.stop_after
                or len(reasons) == last
            ), f"modules wait for each other for ever: {told}"
            continue
        k = ready[next(choices) % len(ready)]
        if k not in starting and isinstance(told.get(k), Forward) and k > 1:
            found = rings[k].pop(0)
            if isinstance(found, StopAt):
                take(k, StopPassedOn(found.version, found.reason))
                continue
            assert found == told[k].mini_batch  # type: ignore[union-attr]
        event = _event_of(k, starting, told, log, in_flight, set(), last)
        if isinstance(event, ForwardFinished) and k < last:
            rings[k + 1].append(event.mini_batch)
        if isinstance(event, BackwardFinished):
            gradients.add((k, event.mini_batch))
        take(k, event)
    log.reason = reasons[last]
    return log


# ------------------------------------------------------------------------- the judge


def check(code: ModuleType, scenario: Scenario) -> None:
    """Everything that holds of any run."""
    total, tail = scenario.num_mini_batches, scenario.tail
    modules = range(1, len(scenario.delays) + 1)
    whole = {k: expected_column(scenario.delays[k - 1], total, tail) for k in modules}
    schedule = scenario.schedule(code)
    for k in modules:
        assert [str(a)[1:] for a in schedule.column(k)] == whole[k], "the column of a module"
    for log in (play(code, scenario, checks=True), play_apart(code, scenario)):
        for (k, b), then in log.forward_at.items():
            if (k, b) in log.update_at:
                staleness = log.update_at[k, b] - then
                assert staleness == schedule.staleness(k, b) == min(b, scenario.delays[k - 1])
        if log.columns == whole:
            least = min(len(column) for column in whole.values()) - total
            assert scenario.updates is None or scenario.updates >= least, "ends at its updates"
            assert log.reason in ("epochs", "updates"), "whoever is asked too late goes on"
            if log.most_in_flight:
                most = {k: schedule.most_in_flight(k) for k in modules}
                assert log.most_in_flight == most, "as many in flight as predicted"
            continue
        assert log.reason in ("asked", "updates"), "ended early without a reason"
        assert len(set(log.versions.values())) == 1, "stopped at one version of the network"
        version = log.versions[1]
        if log.reason == "updates":
            assert version == scenario.updates
        rest = Scenario(scenario.delays, total, tail, choices=scenario.choices)
        for again in (play(code, rest, version), play_apart(code, rest, version)):
            both = {k: log.columns[k] + again.columns[k] for k in modules}
            assert both == whole, f"went on from version {version} in another way"
