"""K over time: folded from the event rows, drawn as steps, on the page where something adapts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from matplotlib.figure import Figure
from synthetic_runs import make_run, make_trace

from gruppetto.report import ReportedRun, adaptive_plots
from gruppetto.report.page import render_page
from gruppetto.trace import EventRow

ADASYNC = "adasync:over=k-batch-async,k0=1,interval=10.0"


def adaptive_run(
    events: Sequence[tuple[float, str, dict[str, Any]]],
    protocol: str = ADASYNC,
    learners: int = 4,
    **more: Any,
) -> ReportedRun:
    """A run of 60 s whose trace has these events besides."""
    trace = make_trace(updates=60)
    assert trace.end is not None
    trace.end.result["time"] = 60.0
    for number, (time, kind, body) in enumerate(events):
        raw = msgspec.Raw(json.dumps(body).encode())
        trace.add(EventRow(number, time, time, kind, raw, "0" * 16))
    return make_run(protocol, trace, learners=learners, **more)


def measured(time: float, loss: float | None) -> tuple[float, str, dict[str, Any]]:
    return time, "ProgressMeasured", {"loss": loss}


#: sqrt(2/0.5) = 2, a death leaves 3, sqrt(2/0.02) = 10 of which 3 are possible, and 4 again.
EVENTS = [
    measured(0.0, 2.0),
    measured(10.0, 0.5),
    measured(20.0, None),
    (25.0, "LearnerLost", {"learner": 1, "reason": "killed"}),
    measured(30.0, 0.02),
    (35.0, "LearnerJoined", {"learner": 4}),
    measured(40.0, 0.02),
    (45.0, "LearnerLost", {"learner": 0, "reason": "killed"}),
]


def test_k_is_folded_from_losses_and_members() -> None:
    waiting = adaptive_plots.waiting_of(adaptive_run(EVENTS))
    assert waiting == adaptive_plots.Waiting(
        times=(0.0, 10.0, 30.0, 40.0, 45.0, 60.0),
        values=(1, 2, 3, 4, 3, 3),
        losses=(2.0, 0.5, None, 0.02, 0.02),
    )


@pytest.mark.parametrize("protocol", ["k-async:k=2", "of-tomorrow:k=2"])
def test_other_protocols_have_no_k_over_time(protocol: str) -> None:
    run = adaptive_run(EVENTS, protocol)
    assert adaptive_plots.waiting_of(run) is None
    assert adaptive_plots.waiting_against_time([run]) is None
    assert "K over time" not in render_page([run])


def test_steps_are_drawn_to_the_end_in_the_colour_of_the_run() -> None:
    runs = [make_run(), adaptive_run(EVENTS, name="adasync")]
    figure = adaptive_plots.waiting_against_time(runs)
    assert isinstance(figure, Figure)
    [line] = figure.axes[0].lines
    assert list(line.get_xdata()) == [0.0, 10.0, 30.0, 40.0, 45.0, 60.0]  # type: ignore[arg-type]
    assert list(line.get_ydata()) == [1, 2, 3, 4, 3, 3]  # type: ignore[arg-type]
    assert line.get_drawstyle() == "steps-post"
    assert line.get_color() == adaptive_plots.run_style(1).colour
    assert figure.axes[0].get_ylim()[0] == 0.0


def test_the_page_shows_and_says_it() -> None:
    page = render_page([adaptive_run(EVENTS, delay="exponential:mean=1")])
    assert "K over time" in page
    assert "from 1 to 3 in 4 steps" in page


def test_a_run_that_never_measured_keeps_its_first_k() -> None:
    waiting = adaptive_plots.waiting_of(adaptive_run([]))
    assert waiting is not None
    assert (waiting.times, waiting.values, waiting.losses) == ((0.0, 60.0), (1, 1), ())
