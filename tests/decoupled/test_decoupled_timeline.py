"""Schedules in time: the papers' numbers, a closed form beside the simulation, grids, validity."""

from __future__ import annotations

import doctest
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.decoupled.grid import (
    format_columns,
    grid,
    parse_action,
    parse_columns,
    validate,
)
from gruppetto.decoupled.methods import METHODS, FeaturesReplay
from gruppetto.decoupled.pass_times import PassTimes
from gruppetto.decoupled.schedule import Action, Schedule
from gruppetto.decoupled.timeline import Held, Timeline, held, period, simulate
from gruppetto.errors import ImpossibleEvent, InvalidSetting


def _schedule(spec: str, **given: object) -> Schedule:
    method = METHODS.parse(spec)
    return Schedule(method.delays, barrier=method.schedule == "barrier", **given)  # type: ignore[arg-type]


def _balanced(modules: int) -> tuple[list[float], list[float]]:
    """T_B = 2 T_F, 3 seconds in all."""
    return [1 / modules] * modules, [2 / modules] * modules


def _apart(delays: tuple[int, ...]) -> int:
    return max((a - b for a, b in itertools.pairwise(delays)), default=0)


# ------------------------------------------------------------------- the papers' models


@pytest.mark.parametrize(
    ("spec", "speed_up"),
    [
        ("bp:modules=2", 1.0),
        ("bp:modules=4", 1.0),
        # Forward-locked with a barrier: (T_F + T_B) / (T_F + T_B / K).
        ("ddg:modules=2,schedule=barrier", 1.5),
        ("ddg:modules=3,schedule=barrier", 1.8),
        ("ddg:modules=4,schedule=barrier", 2.0),
        # A gradient is received when it is needed: K.
        ("ddg:modules=2", 2.0),
        ("ddg:modules=3", 3.0),
        ("ddg:modules=4", 4.0),
        ("fdg:modules=2", 2.0),
        ("fdg:modules=3", 3.0),
        ("fdg:modules=4", 4.0),
    ],
)
@pytest.mark.parametrize("capacity", [2, 3])
def test_speed_of_balanced_modules(spec: str, speed_up: float, capacity: int) -> None:
    schedule = _schedule(spec, capacity=capacity)
    times = _balanced(schedule.num_modules)
    predicted = simulate(schedule, *times)
    assert 3.0 / predicted.period == pytest.approx(speed_up)
    assert 3.0 / period(schedule, *times) == pytest.approx(speed_up)
    assert predicted.busy == pytest.approx([speed_up / schedule.num_modules] * len(times[0]))


@pytest.mark.parametrize("modules", [2, 3, 4])
def test_one_slot_is_enough_for_ddg(modules: int) -> None:
    schedule = _schedule(f"ddg:modules={modules}", capacity=1)
    assert 3.0 / simulate(schedule, *_balanced(modules)).period == pytest.approx(modules)


def test_the_slowest_module_sets_the_pace() -> None:
    schedule = _schedule("ddg:modules=3")
    predicted = simulate(schedule, (1.0, 2.0, 1.0), (2.0, 5.0, 2.0))
    assert predicted.period == pytest.approx(7.0)
    assert predicted.busy == pytest.approx([3 / 7, 1.0, 3 / 7])
    # The first waits for the gradients of the second, and the last for its outputs.
    (_, for_gradients, _), _, (for_inputs, *_) = predicted.waited
    assert for_gradients > 100 and for_inputs > 100


def test_replay_costs_a_forward_pass() -> None:
    method = FeaturesReplay(modules=2)
    times = PassTimes((0.5, 0.5), (1.0, 1.0)).of(method)
    assert times == PassTimes((0.5, 0.5), (1.5, 1.0))
    assert period(Schedule(method.delays), times.forward, times.backward) == 2.0
    assert PassTimes((0.5, 0.5), (1.0, 1.0)).of(METHODS.parse("ddg")) == PassTimes(
        (0.5, 0.5), (1.0, 1.0)
    )


_DELAYS = st.lists(st.integers(0, 3), max_size=4).map(
    lambda apart: tuple(sum(apart[: len(apart) - i]) for i in range(len(apart) + 1))
)


@settings(max_examples=40, deadline=None)
@given(_DELAYS, st.data(), st.booleans(), st.integers(0, 2))
def test_closed_form_is_what_the_simulation_comes_to(
    delays: tuple[int, ...], data: st.DataObject, barrier: bool, more: int
) -> None:
    seconds = st.lists(st.integers(1, 5), min_size=len(delays), max_size=len(delays))
    forward, backward = data.draw(seconds), data.draw(seconds)
    apart = _apart(delays)
    schedule = Schedule(delays, barrier=barrier, capacity=max(1, apart) + more)
    predicted = simulate(schedule, forward, backward, 100)
    # A cycle may hold several mini-batches, so its ends need not be those of the window.
    assert predicted.period == pytest.approx(period(schedule, forward, backward), rel=0.03)


@settings(max_examples=60, deadline=None)
@given(_DELAYS, st.data(), st.booleans(), st.sampled_from(["drain", "drop"]))
def test_a_timeline_keeps_the_rules(
    delays: tuple[int, ...], data: st.DataObject, barrier: bool, tail: str
) -> None:
    seconds = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=len(delays),
                       max_size=len(delays))  # fmt: skip
    forward, backward = data.draw(seconds), data.draw(seconds)
    apart = _apart(delays)
    schedule = Schedule(delays, data.draw(st.integers(1, 8)), tail, barrier, max(1, apart))  # type: ignore[arg-type]
    passes = {p.action: p for p in simulate(schedule, forward, backward).passes}
    for module in range(1, len(delays) + 1):
        free = 0.0
        for action in schedule.column(module):
            found = passes.pop(action)
            waited = found.for_inputs + found.for_gradients + found.for_others
            assert found.start == pytest.approx(free + waited)
            assert min(found.for_inputs, found.for_gradients, found.for_others) >= 0
            long = forward if action.kind == "F" else backward
            assert found.end == found.start + long[module - 1]
            free = found.end
    assert not passes, "every pass of every column, and no other"


@settings(max_examples=40, deadline=None)
@given(_DELAYS, st.data())
def test_nobody_begins_before_what_it_needs_nor_fills_a_ring(
    delays: tuple[int, ...], data: st.DataObject
) -> None:
    seconds = st.lists(st.integers(1, 6), min_size=len(delays), max_size=len(delays))
    apart = _apart(delays)
    schedule = Schedule(delays, 9, capacity=max(1, apart), barrier=data.draw(st.booleans()))
    found = simulate(schedule, data.draw(seconds), data.draw(seconds)).passes
    passes = {p.action: p for p in found}
    for p in found:
        for needed in schedule.needs(p.action):
            assert passes[needed].end <= p.start
    for module in range(1, len(delays) + 1):
        column = list(schedule.column(module))
        for sent, following in itertools.pairwise(column):
            to = module + (1 if sent.kind == "F" else -1)
            earlier = Action(to, sent.kind, sent.mini_batch - schedule.capacity)
            if earlier in passes:  # it has a slot when that pass has begun
                assert passes[following].start >= passes[earlier].start


def test_a_resumed_timeline_has_what_was_in_flight_behind_it() -> None:
    # At version 3 module 1 has run 3 forward, and module 2 has not.
    timeline = Timeline(Schedule((1, 0)), (1.0, 1.0), (2.0, 2.0), version=3, time=10.0)
    assert timeline.ready(Action(2, "F", 3)) == 10.0
    assert timeline.ready(Action(2, "F", 4)) is None
    assert timeline.run(Action(1, "F", 4))[1:3] == (10.0, 11.0)
    assert timeline.ready(Action(1, "B", 3)) is None
    assert timeline.run(Action(2, "F", 3))[1:] == (10.0, 11.0, 0.0, 0.0, 0.0)
    assert timeline.run(Action(2, "B", 3)).end == 13.0
    assert timeline.run(Action(1, "B", 3))[1:] == (13.0, 15.0, 0.0, 2.0, 0.0)


def test_a_pass_cannot_be_put_where_it_cannot_begin() -> None:
    timeline = Timeline(Schedule((1, 0)), (1.0, 1.0), (2.0, 2.0))
    with pytest.raises(ImpossibleEvent, match="2F0 cannot begin yet: it needs 1F0"):
        timeline.run(Action(2, "F", 0))
    assert timeline.run(Action(1, "F", 0)).end == 1.0
    assert timeline.run(Action(2, "F", 0)).for_inputs == 1.0


@pytest.mark.parametrize("times", [((1.0,), (1.0, 1.0)), ((1.0, 0.0), (1.0, 1.0)),
                                   ((1.0, float("inf")), (1.0, 1.0))])  # fmt: skip
def test_times_that_are_none(times: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    with pytest.raises(InvalidSetting, match="expected 2 positive seconds forward"):
        Timeline(Schedule((1, 0)), *times)


def test_pass_times_that_are_none() -> None:
    with pytest.raises(InvalidSetting, match="a forward and a backward time per module"):
        PassTimes((1.0,), ())
    with pytest.raises(InvalidSetting, match="seconds > 0"):
        PassTimes((1.0,), (float("nan"),))
    with pytest.raises(InvalidSetting, match="operations >= 0"):
        PassTimes.from_operations([1.0, -1.0])
    assert PassTimes.from_operations([0.0, 0.0]).forward == (0.5, 0.5)
    assert PassTimes.from_operations([0.0, 4.0]).forward == (1e-6, 1.0)


def test_memory_in_pieces() -> None:
    ddg = Schedule((2, 1, 0))
    assert held(ddg, "graph-on-copy") == (Held(3, 0, 3), Held(2, 0, 2), Held(1, 0, 0))
    assert held(ddg, "graph-on-live") == (Held(3, 0, 3), Held(2, 0, 2), Held(1, 0, 0))
    assert held(ddg, "input") == (Held(1, 3, 0), Held(1, 2, 0), Held(1, 0, 0))
    assert held(Schedule((0, 0)), "graph-on-live") == (Held(1, 0, 0), Held(1, 0, 0))
    # A short run never has more than its mini-batches in flight.
    assert held(Schedule((4, 2, 0), 2), "graph-on-copy")[0] == Held(2, 0, 2)


# ------------------------------------------------------------------------------ grids

GRIDS = {
    "bp": """
        step      0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        module 1  F0 .  .  .  .  B0 F1 .  .  .  .  B1 F2 .  .  .  .  B2
        module 2  .  F0 .  .  B0 .  .  F1 .  .  B1 .  .  F2 .  .  B2
        module 3  .  .  F0 B0 .  .  .  .  F1 B1 .  .  .  .  F2 B2
    """,
    "ddg": """
        step      0  1  2  3  4  5  6  7  8  9  10 11 12 13
        module 1  F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4
        module 2  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4
        module 3  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    """,
    "fdg": """
        step      0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15
        module 1  F0 F1 F2 F3 F4 B0 F5 B1 .  B2 .  B3 .  B4 .  B5
        module 2  .  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
        module 3  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """,
    "ddg:schedule=barrier": """
        step      0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        module 1  F0 .  .  .  F1 .  .  .  F2 B0 .  .  F3 B1 .  B2 .  B3
        module 2  .  F0 .  .  .  F1 B0 .  .  F2 B1 .  .  F3 B2 .  B3
        module 3  .  .  F0 B0 .  .  F1 B1 .  .  F2 B2 .  .  F3 B3
    """,
}


@pytest.mark.parametrize(
    ("spec", "n"), [("bp", 3), ("ddg", 5), ("fdg", 6), ("ddg:schedule=barrier", 4)]
)
def test_grids_of_three_modules(spec: str, n: int) -> None:
    name, _, key = spec.partition(":")
    golden = textwrap.dedent(GRIDS[spec]).strip()
    assert grid(_schedule(f"{name}:modules=3" + (f",{key}" if key else "")), n) == golden


def test_grid_of_a_dropped_tail() -> None:
    assert grid(Schedule((1, 0), tail="drop"), 2) == textwrap.dedent("""\
        step      0  1  2  3  4
        module 1  F0 F1 .  B0
        module 2  .  F0 B0 F1 B1""")


@given(_DELAYS, st.integers(1, 7))
def test_columns_as_text_parse_back(delays: tuple[int, ...], n: int) -> None:
    schedule = Schedule(delays, n, capacity=9)
    columns = tuple(tuple(schedule.column(k)) for k in range(1, len(delays) + 1))
    assert parse_columns(format_columns(columns)) == columns
    validate(schedule, columns)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "0F1", "2F-1", "2f0", " 2F0"])
def test_what_is_no_pass(text: str) -> None:
    with pytest.raises(InvalidSetting, match="expected a pass like 2F0"):
        parse_action(text)


@settings(max_examples=60, deadline=None)
@given(_DELAYS, st.booleans(), st.sampled_from(["drain", "drop"]),
       st.one_of(st.none(), st.integers(1, 9)))  # fmt: skip
def test_every_schedule_that_can_be_made_is_valid(
    delays: tuple[int, ...], barrier: bool, tail: str, total: int | None
) -> None:
    apart = _apart(delays)
    validate(Schedule(delays, total, tail, barrier, max(1, apart)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            "1F0 1F1 1F2\n2F0 2B0",
            """\
            schedule: 1F2 would make 3 in flight: the delay allows 2
            step      0   1   2   3
            module 1  F0  F1  .   !F2
            module 2  .   F0  B0""",
        ),
        (
            "1F0 1F1 1B0\n2F0 2B0 2B1",
            """\
            schedule: 2B1 is before its forward pass
            step      0   1   2   3   4
            module 1  F0  F1  .   B0
            module 2  .   F0  B0  .   !B1""",
        ),
        (
            "1F0 1F1 1B1\n2F0 2B0 2F1 2B1",
            """\
            schedule: 1B1 is out of order: expected 1B0
            step      0   1   2   3   4   5
            module 1  F0  F1  .   .   .   !B1
            module 2  .   F0  B0  F1  B1""",
        ),
        (
            # Module 1 wants a gradient of what module 2 has not got yet, and the other way round.
            "1F0 1B0 1F1\n2F0 2F1 2B0",
            """\
            schedule: 2F1 would make 2 in flight: the delay allows 1
            step      0   1   2
            module 1  F0
            module 2  .   F0  !F1""",
        ),
        (
            "1F0 1F1 1B0\n2F0 2B0 1F1",
            """\
            schedule: 1F1 is in the column of module 2
            step      0   1   2   3   4
            module 1  F0  F1  .   B0
            module 2  .   F0  B0  .   !F1""",
        ),
        (
            "1F0 1F1 1B0 1B1 1F2\n2F0 2B0 2F1 2B1",
            """\
            schedule: 1F2 is beyond the last mini-batch: the run has 2
            step      0   1   2   3   4   5   6
            module 1  F0  F1  .   B0  .   B1  !F2
            module 2  .   F0  B0  F1  B1""",
        ),
        ("1F0", "schedule: expected 2 columns, one per module, got 1"),
    ],
)
def test_columns_that_break_a_rule(columns: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        validate(Schedule((1, 0), 2 if "1B1 1F2" in columns else None), parse_columns(columns))
    assert str(caught.value) == textwrap.dedent(message)


def test_columns_that_wait_for_ever_are_marked() -> None:
    schedule = Schedule((1, 1, 0), capacity=1)
    columns = parse_columns("1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1\n3F0 3B0 3F1 3B1")
    with pytest.raises(InvalidSetting) as caught:
        validate(schedule, columns)
    sentence, drawn = str(caught.value).split("\n", 1)
    assert sentence == (
        "schedule: modules wait for each other for ever (1B0: it needs 2B0; 2F1: it needs 1F1; "
        "3F1: it needs 2F1)"
    )
    assert drawn == textwrap.dedent("""\
        step      0   1   2   3   4
        module 1  F0  .   .   .   !B0
        module 2  .   F0  .   .   !F1
        module 3  .   .   F0  B0  !F1""")


def test_schedules_do_not_wait_for_torch() -> None:
    code = (
        "import gruppetto.decoupled.grid, gruppetto.decoupled.pass_times, sys; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_examples_of_the_document() -> None:
    path = Path(__file__).parents[2] / "docs" / "decoupled.md"
    code = "".join(re.findall(r"```python\n(>>> .*?)```", path.read_text("utf-8"), re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, path.name, str(path), 0)
    assert len(test.examples) >= 8
    report: list[str] = []
    assert doctest.DocTestRunner().run(test, out=report.append).failed == 0, "".join(report)
