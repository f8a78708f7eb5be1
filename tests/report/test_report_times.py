"""Where time went: per update, on each learner, and what evaluating cost."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from synthetic_runs import (
    add_work,
    four_local_runs,
    four_runs,
    local_run,
    make_run,
    make_trace,
    two_large_local_runs,
)
from test_report_page import Page, words

from gruppetto.report import ReportedRun, results_table, time_plots
from gruppetto.report.page import render_page
from gruppetto.report.summary import remarks
from gruppetto.report.table import rows
from gruppetto.report.times import Spent, UpdateTime, mean_spent, places, update_time
from gruppetto.trace import EventRow, Trace, WorkRow


def work(learner: int, time: float, outcome: str = "pushed", waiting: float = 1.0) -> WorkRow:
    """A lease with 2 s of delay, 0.5 s of loading and 3 s of computing."""
    return WorkRow(0, learner, 0, outcome, time, waiting, 2.0, 0.5, 3.0)


def trace_of(*work_rows: WorkRow, end: float = 20.0) -> Trace:
    trace = Trace()
    trace.add(EventRow(0, end, end, "StopRequested", msgspec.Raw(b'{"reason":"x"}'), "0" * 16))
    for row in work_rows:
        trace.add(row)
    return trace


def event(kind: str, learner: int) -> EventRow:
    reason = b',"reason":"x"' if kind == "LearnerLost" else b""
    body = msgspec.Raw(b'{"learner":%d%b}' % (learner, reason))
    return EventRow(0, 1.0, 1.0, kind, body, "0" * 16)


# ------------------------------------------------------------ time per update


def test_old_traces_and_killed_runs_have_no_time_per_update() -> None:
    old, killed = make_run(), make_run(trace=make_trace(ends=False))
    assert update_time(old) is update_time(killed) is None
    assert "time per update" not in rows([old, killed])[0]
    assert time_plots.update_times([old, killed]) is None


def test_time_per_update_beside_the_expected_one() -> None:
    run = local_run(result={"mean_update_time": 0.0632, "expected_update_time": 0.061})
    assert update_time(run) == UpdateTime(0.0632, 0.061)
    row = rows([run, make_run(engine="local")])
    assert row[0]["time per update"] == "63.2 ms (expected 61.0)"
    assert row[0]["ratio to expected"] == "1.04"
    assert row[1]["time per update"] == row[1]["ratio to expected"] == "-"


def test_without_delays_only_the_measured_time_is_shown() -> None:
    run = local_run(result={"mean_update_time": 2.5, "expected_update_time": None})
    row = rows([run])[0]
    assert row["time per update"] == "2.50 s"
    assert "ratio to expected" not in row
    assert time_plots.update_times([run]) is None
    assert len(results_table([run]).columns) == 6


def test_virtual_times_per_update_keep_their_unit() -> None:
    run = local_run(result={"mean_update_time": 0.5, "expected_update_time": 0.5})
    virtual = make_run(trace=run.trace, delay="constant:value=1")
    row = rows([virtual])[0]
    assert row["time per update"] == "0.5 virtual s (expected 0.5)"
    assert row["ratio to expected"] == "1.00"
    figure = time_plots.update_times([virtual])
    assert figure is not None
    assert figure.axes[0].get_xlabel() == "virtual time per update (s)"


@pytest.mark.parametrize("value", [0, 0.0, True, "x", float("nan"), float("inf")])
def test_strange_expected_times_make_no_ratio(value: object) -> None:
    run = local_run(result={"mean_update_time": 0.1, "expected_update_time": value})
    time = update_time(run)
    assert time is not None
    assert time.ratio is None
    assert "ratio to expected" not in rows([run])[0]
    assert time_plots.update_times([run]) is None


def test_the_terminal_shows_both_in_six_columns() -> None:
    runs = four_local_runs()
    for target in (None, ("accuracy", 0.9)):
        assert len(results_table(runs, target).columns) == 6
        for width in (80, 120):
            console = Console(width=width, file=io.StringIO(), force_terminal=False)
            console.print(results_table(runs, target))
            text = console.file.getvalue()  # type: ignore[attr-defined]
            assert max(map(len, text.splitlines())) <= width
            assert "(expected 131.0)" in text
            assert "…" not in text


def test_the_plot_of_updates_has_a_bar_and_a_mark_per_run() -> None:
    runs = four_local_runs()
    figure = time_plots.update_times(runs)
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_xlabel() == "time per update (ms)"
    widths = [bar.get_width() for bar in axes.patches if bar.get_width()]  # type: ignore[attr-defined]
    times = [update_time(run) for run in runs]
    assert widths == pytest.approx([1000 * t.measured for t in times if t is not None])
    marks = {round(path.vertices[0][0], 6) for c in axes.collections for path in c.get_paths()}  # type: ignore[index]
    assert marks == {131.0, 71.0, 40.0, 10.1}
    labels = " ".join(time_plots.update_times_words(runs).split())
    assert "Bars of time per update (ms)" in labels
    assert "expected 131.0; k-sync:k=6: measured" in labels


# ------------------------------------------------------------- learners' time


def test_a_learners_time_is_split_and_fills_the_run() -> None:
    run = make_run(trace=trace_of(work(0, 7.0), work(0, 14.0, "cancelled")), learners=1)
    (place,) = places(run)
    assert place.spent == Spent(
        computing=3.0, delay=2.0, cancelled=5.0, loading=1.0, waiting=2.0, rest=7.0
    )
    assert place.spent.total == 20.0


def test_failed_work_counts_as_cancelled_work() -> None:
    run = make_run(trace=trace_of(work(0, 7.0, "failed")), learners=1)
    assert places(run)[0].spent.cancelled == 5.0


def test_waiting_before_the_run_began_is_not_counted() -> None:
    run = make_run(trace=trace_of(work(0, 6.0, waiting=9.0)), learners=1)
    assert places(run)[0].spent.waiting == pytest.approx(0.5)


def test_a_learner_that_never_answered_has_a_bar_too() -> None:
    run = make_run(trace=trace_of(work(0, 7.0)), learners=2)
    assert [place.spent.rest for place in places(run)] == [13.5, 20.0]


def test_replacements_share_the_place_of_the_dead() -> None:
    trace = trace_of(work(0, 7.0), work(1, 7.0), work(2, 17.0), work(3, 18.0), work(9, 19.0))
    for kind, learner in (
        ("LearnerJoined", 0), ("LearnerJoined", 1), ("LearnerLost", 1), ("LearnerLost", 0),
        ("LearnerJoined", 2), ("LearnerJoined", 3),
    ):  # fmt: skip
        trace.add(event(kind, learner))
    run = make_run(trace=trace, learners=2)
    # Learner 9 never joined as far as the trace tells.
    assert [place.learners for place in places(run)] == [(0, 3), (1, 2), (9,)]
    assert [place.name for place in places(run)] == ["0, 3", "1, 2", "9"]
    assert places(run)[0].spent.computing == 6.0


@pytest.mark.parametrize("learners", [1, 4, 16, 17, 64])
def test_bars_of_one_run_up_to_sixteen_learners(learners: int) -> None:
    trace = add_work(make_trace(updates=10, evaluations=0), learners)
    run = make_run(trace=trace, engine="local", learners=learners)
    figure = time_plots.learners_time([run])
    assert figure is not None
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    expected = {1: ["0"], 17: ["mean of 17"], 64: ["mean of 64"]}
    assert labels == expected.get(learners, ["mean", *map(str, range(learners))])


def test_bars_are_as_long_as_their_runs() -> None:
    runs = four_local_runs()
    figure = time_plots.learners_time(runs)
    assert figure is not None
    ends: dict[float, float] = {}
    for bar in figure.axes[0].patches:
        ends[round(bar.get_y(), 3)] = bar.get_x() + bar.get_width()  # type: ignore[attr-defined]
    assert list(ends.values()) == pytest.approx([run.outcome.time for run in runs])
    assert figure.axes[0].get_xlabel() == "wall time (s)"


def test_the_mean_of_many_learners_adds_up() -> None:
    run = two_large_local_runs()[0]
    several = places(run)
    assert len(several) == 40
    assert several[7].learners == (7, 40)
    mean = mean_spent(several)
    assert mean.total == pytest.approx(run.outcome.time)
    assert mean.computing == pytest.approx(np.mean([p.spent.computing for p in several]))
    assert mean.cancelled > 0.0


def test_the_caption_explains_replaced_learners() -> None:
    run = local_run(work={"replaced": 2})
    assert "“2, 4”" in time_plots.learners_time_caption([run])
    for runs in ([local_run()], [run, run], [two_large_local_runs()[0]]):
        assert "“" not in time_plots.learners_time_caption(runs)


def test_runs_without_work_rows_are_left_out() -> None:
    virtual, local = make_run(), local_run()
    assert places(virtual) == []
    assert time_plots.learners_time([virtual]) is None
    text = time_plots.learners_time_words([virtual, local])
    assert text.startswith("Stacked bars of the time of learners. hardsync: ")
    assert text.count("computing") == 1


def test_a_killed_run_of_processes_is_drawn() -> None:
    run = make_run(trace=trace_of(work(0, 7.0)), engine="local", learners=2)
    assert [place.spent.rest for place in places(run)] == [13.5, 20.0]
    assert time_plots.learners_time([run, local_run("b")]) is not None


# ------------------------------------------------------------------- the page


def test_the_page_has_two_more_pictures_and_says_what_they_show() -> None:
    runs = four_local_runs()[:2]
    html = render_page(runs)
    page = Page(html)
    assert page.count("figure") == 8
    labels = words(" ".join(page.values("aria-label")))
    assert "k-sync:k=6: measured" in labels
    assert "% cancelled work" in labels
    assert "Live evaluation took" in page.text
    assert html == render_page(four_local_runs()[:2])
    for row in rows(runs):
        assert " ".join(row.values()) in page.text


def test_virtual_runs_have_no_pictures_of_time_spent() -> None:
    runs = four_runs()
    assert time_plots.update_times(runs) is time_plots.learners_time(runs) is None
    assert "time per update" not in rows(runs)[0]
    assert remarks(runs) == ""


def test_an_overlong_name_is_cut_above_its_bar() -> None:
    runs = [local_run(), local_run("async")]
    long = ReportedRun("x" * 90, "f", runs[0].settings, {}, runs[0].trace)
    figure = time_plots.learners_time([long, runs[1]])
    assert figure is not None
    assert [len(text.get_text()) for text in figure.axes[0].texts] == [54, 5]


# -------------------------------------------------------------------- remarks


@pytest.mark.parametrize(
    ("result", "where"),
    [
        ({}, "beside the learners, which slows them down where there are not cores enough"),
        ({"cores": 6}, "on a core of its own."),
        ({"cores": 5}, "on cores that it shared with the learners, which slows them down."),
    ],
)
def test_what_live_evaluation_cost(result: dict[str, Any], where: str) -> None:
    run = local_run(result={"time": 10.0, "evaluation_time": 0.45, **result})
    text = words(remarks([run]))
    assert text.startswith(f"Live evaluation took 0.45 s (4.5 % of the run's time), {where}")


def test_what_live_evaluation_cost_several_runs() -> None:
    text = words(remarks(four_local_runs()))
    assert text.count("(5 % of its time)") == 4
    many = [*four_local_runs(), local_run("x", result={"evaluation_time": 99.0})]
    text = words(remarks(many))
    assert text.startswith("Live evaluation took from ")
    assert "to 99.0 s in x (" in text


@pytest.mark.parametrize(
    "run",
    [
        local_run(settings={"evaluate": "deferred"}),
        local_run(settings={"evaluate": "off"}, result={"evaluation_time": 0.0}),
        local_run(result={"evaluation_time": None}),
        make_run(trace=local_run().trace, evaluate="live"),
        make_run(engine="local"),
    ],
    ids=["deferred", "off", "unknown", "virtual", "old"],
)
def test_other_evaluation_has_no_remark(run: ReportedRun) -> None:
    assert remarks([run]) == ""


def test_times_of_runs_evaluated_differently_are_not_comparable() -> None:
    live, deferred = local_run("a"), local_run("b", settings={"evaluate": "deferred"})
    text = remarks([live, deferred])
    assert "evaluated in different ways (live: a; deferred: b)" in text
    assert "not comparable" in text
    assert "Caution" not in remarks([live, live])
    assert "Caution" not in remarks([live, make_run(evaluate="off")]), "its times are virtual"


def test_learners_lost_and_restarted_are_told() -> None:
    quiet = {"evaluate": "off"}
    one = local_run("a", result={"learners_lost": 1}, settings=quiet)
    two = local_run("b", result={"learners_lost": 3, "learners_restarted": 2}, settings=quiet)
    assert remarks([one]) == "It lost 1 learner."
    assert remarks([one, two]) == "a lost 1 learner; b lost 3 learners and restarted 2."
    killed = trace_of()
    killed.add(event("LearnerLost", 1))
    assert remarks([make_run(trace=killed)]) == "It lost 1 learner."
