"""Schedules and their programs: the same columns however modules are served and stopped."""

from __future__ import annotations

import re

import pytest
from columns import Scenario, check, expected_column, play
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.decoupled import schedule as code
from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.schedule import (
    COMPLETED,
    Action,
    ModuleProgram,
    NetworkProgram,
    Schedule,
)
from gruppetto.errors import ImpossibleEvent, InvalidSetting
from gruppetto.protocols.messages import (
    NOT_FINITE,
    Backward,
    BackwardFinished,
    Finish,
    Forward,
    ForwardFinished,
    ModuleUpdated,
    PassFailed,
    Step,
    StopAt,
    StopPassedOn,
    StopRequested,
)

#: Differences between neighbours, from the last module on.
_DELAYS = st.lists(st.integers(0, 3), max_size=3).map(
    lambda apart: tuple(sum(apart[: len(apart) - i]) for i in range(len(apart) + 1))
)
_METHODS = st.sampled_from(["bp", "ddg", "fr", "fdg"])
_SCENARIOS = st.builds(
    Scenario,
    delays=st.one_of(
        _DELAYS,
        st.builds(lambda m, k: METHODS.parse(f"{m}:modules={k}").delays, _METHODS,
                  st.integers(1, 4)),
    ),
    num_mini_batches=st.integers(1, 9),
    tail=st.sampled_from(["drain", "drop"]),
    stop_after=st.one_of(st.none(), st.integers(0, 90)),
    updates=st.one_of(st.none(), st.integers(1, 10)),
    choices=st.lists(st.integers(0, 11), min_size=1, max_size=9).map(tuple),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(_SCENARIOS)
def test_any_run_any_stop_any_order(scenario: Scenario) -> None:
    check(code, scenario)


@pytest.mark.parametrize("stop_after", range(40))
def test_a_stop_at_every_moment(stop_after: int) -> None:
    for delays in ((0, 0, 0), (2, 1, 0), (4, 2, 0)):
        for tail in ("drain", "drop"):
            check(code, Scenario(delays, 6, tail, stop_after, choices=(1, 0, 2)))


def test_columns_of_the_paper() -> None:
    schedule = Schedule((2, 1, 0), 4)
    assert " ".join(map(str, schedule.column(1))) == "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"
    assert " ".join(map(str, schedule.column(3))) == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3"
    dropped = Schedule((2, 1, 0), 4, "drop")
    assert " ".join(map(str, dropped.column(1))) == "1F0 1F1 1F2 1B0 1F3 1B1"
    assert [dropped.last_version(k) for k in (1, 2, 3)] == [2, 3, 4]


def test_a_run_too_short_for_any_update_still_runs_forward() -> None:
    schedule = Schedule((2, 1, 0), 2, "drop")
    assert [str(a) for a in schedule.column(1)] == ["1F0", "1F1"]
    log = play(code, Scenario((2, 1, 0), 2, "drop"))
    assert log.versions == {1: 0, 2: 1, 3: 2} and log.reason == COMPLETED


def test_an_endless_column_goes_on() -> None:
    column = Schedule((1, 0)).column(1)
    taken = [next(column) for _ in range(60)]
    assert [str(a)[1:] for a in taken] == expected_column(1, 1000)[:60]


def test_what_a_pass_needs() -> None:
    free, barrier = Schedule((2, 1, 0)), Schedule((2, 1, 0), barrier=True)
    assert free.needs(Action(1, "F", 5)) == []
    assert free.needs(Action(2, "F", 5)) == [Action(1, "F", 5)]
    assert free.needs(Action(2, "B", 5)) == [Action(3, "B", 5)]
    assert free.needs(Action(3, "B", 5)) == []
    assert [str(a) for a in barrier.needs(Action(1, "F", 5))] == ["1B2", "2B3", "3B4"]
    assert [str(a) for a in barrier.needs(Action(1, "F", 1))] == ["3B0"]
    assert barrier.needs(Action(1, "F", 0)) == []
    # Modules that stop at version 3 have applied mini-batch 2, and come to no barrier more.
    assert [str(a) for a in barrier.needs(Action(1, "F", 5), stop=3)] == ["1B2", "2B2", "3B2"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"delays": ()}, "one per module"),
        ({"delays": (-1, 0)}, "delays >= 0"),
        ({"delays": (2, 1)}, "the last module is never late"),
        ({"delays": (1, 2, 0)}, "do not grow towards the last module"),
        ({"delays": (0,), "capacity": 0}, "capacity >= 1, as"),
        ({"delays": (4, 2, 0), "capacity": 1}, "capacity >= 2, as neighbouring modules are 2"),
        ({"delays": (0,), "num_mini_batches": 0}, "at least one mini-batch"),
        ({"delays": (0,), "updates": 0}, "at least one update"),
    ],
)
def test_impossible_schedules(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(message)):
        Schedule(**given)  # type: ignore[arg-type]


def test_a_script_of_one_module() -> None:
    program = ModuleProgram(Schedule((1, 0)), 1)
    assert program.handle(ModuleUpdated(1, 0)) == [Forward(1, 0)]
    assert program.handle(ForwardFinished(1, 0, 0, None)) == [Forward(1, 1)]
    assert program.handle(ForwardFinished(1, 1, 0, None)) == [Backward(1, 0)]
    assert program.handle(BackwardFinished(1, 0, 0)) == [Step(1, 0)]
    assert program.handle(ModuleUpdated(1, 1)) == [Forward(1, 2)]
    assert program.handle(StopRequested("asked")) == [StopAt(3, "asked")]
    assert program.handle(StopRequested("again")) == []
    assert program.handle(ForwardFinished(1, 2, 1, None)) == [Backward(1, 1)]
    assert program.handle(BackwardFinished(1, 1, 1)) == [Step(1, 1)]
    assert program.handle(ModuleUpdated(1, 2)) == [Forward(1, 3)]
    assert program.handle(ForwardFinished(1, 3, 2, None)) == [Backward(1, 2)]
    assert program.handle(BackwardFinished(1, 2, 2)) == [Step(1, 2)]
    assert program.handle(ModuleUpdated(1, 3)) == [Finish("asked")]
    assert program.finished == "asked"
    with pytest.raises(ImpossibleEvent, match="module 1 has finished"):
        program.handle(ModuleUpdated(1, 4))


def test_a_script_of_a_module_that_a_stop_reaches() -> None:
    program = ModuleProgram(Schedule((1, 0)), 2)
    program.handle(ModuleUpdated(2, 0))
    program.handle(ForwardFinished(2, 0, 0, 0.5))
    program.handle(BackwardFinished(2, 0, 0))
    assert program.handle(ModuleUpdated(2, 1)) == [Forward(2, 1)]
    # It waited for an input, and found the stop instead.
    stop = [StopAt(1, "asked"), Finish("asked")]
    assert program.handle(StopPassedOn(1, "asked")) == stop


def test_only_module_1_says_where_a_run_stops() -> None:
    with pytest.raises(ImpossibleEvent, match="module 1 chooses"):
        ModuleProgram(Schedule((1, 0)), 2).handle(StopRequested("asked"))


def test_a_failed_pass_ends_everything() -> None:
    program = NetworkProgram(Schedule((1, 0)))
    program.handle(ModuleUpdated(1, 0))
    assert program.handle(PassFailed(1, 0, NOT_FINITE)) == [Finish(NOT_FINITE)]


def test_a_failed_step_ends_everything() -> None:
    program = NetworkProgram(Schedule((0,)))
    program.handle(ModuleUpdated(1, 0))
    program.handle(ForwardFinished(1, 0, 0, 0.5))
    assert program.handle(BackwardFinished(1, 0, 0)) == [Step(1, 0)]
    assert program.handle(PassFailed(1, 0, NOT_FINITE)) == [Finish(NOT_FINITE)]


def test_a_stop_where_all_stand_at_one_version_ends_there() -> None:
    program = NetworkProgram(Schedule((1, 0)), version=4)
    assert program.handle(ModuleUpdated(1, 4)) == [Forward(1, 5)]
    assert program.handle(ModuleUpdated(2, 4)) == [Forward(2, 4)]
    assert program.handle(StopRequested("asked")) == [StopAt(4, "asked"), Finish("asked")]


def test_a_run_that_is_over_when_it_is_resumed() -> None:
    program = NetworkProgram(Schedule((1, 0), 3), version=3)
    assert program.handle(ModuleUpdated(1, 3)) == []
    assert program.handle(ModuleUpdated(2, 3)) == [Finish(COMPLETED)]


def test_how_far_a_look_ahead_goes() -> None:
    ddg = METHODS.parse("ddg:modules=4,lookahead=0.5")
    assert [ddg.leap(k) for k in (1, 2, 3, 4)] == [0.875, 0.75, 0.5, 0.0]
    # One update far is Nesterov's; with 1 it is linear in the delay.
    assert [METHODS.parse("fdg:modules=2,lookahead=1").leap(k) for k in (1, 2)] == [2.0, 0.0]
    assert METHODS.parse("ddg:modules=4").leap(1) == METHODS.parse("fr:modules=4").leap(1) == 0.0
    for wrong in ("1.5", "-0.1", "nan"):
        with pytest.raises(InvalidSetting, match=re.escape("lookahead in [0, 1]")):
            METHODS.parse(f"ddg:lookahead={wrong}")
