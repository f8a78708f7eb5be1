"""What the figures draw, looked up in matplotlib's own objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure
from synthetic_runs import eight_runs, four_runs, make_run, make_trace

from gruppetto.report import plots
from gruppetto.trace import Trace


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def test_error_against_time_draws_the_evaluations() -> None:
    runs = four_runs(delay="exponential:mean=1")
    axes = drawn(plots.error_against_time(runs)).axes[0]
    assert axes.get_xlabel() == "virtual time (s)"
    assert axes.get_ylabel() == "test error (%), log scale"
    assert len(axes.lines) == 4
    for run, line in zip(runs, axes.lines, strict=True):
        rows = run.trace.evaluations
        assert line.get_label() == run.name
        assert list(line.get_xdata()) == [row.time for row in rows]  # type: ignore[arg-type]
        errors = [100 * (1 - row.metrics["accuracy"]) for row in rows]
        assert list(line.get_ydata()) == pytest.approx(errors)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "time (virtual units)"),
        ({"delay": "constant:value=2"}, "virtual time (s)"),
        ({"engine": "local"}, "wall time (s)"),
        ({"engine": "ray", "delay": "constant:value=2"}, "wall time (s)"),
    ],
)
def test_time_axes_name_their_unit(settings: dict[str, Any], label: str) -> None:
    runs = [make_run(**settings)]
    assert drawn(plots.error_against_time(runs)).axes[0].get_xlabel() == label
    assert drawn(plots.loss_against_time(runs)).axes[0].get_xlabel() == label
    assert drawn(plots.error_against_updates(runs)).axes[0].get_xlabel() == "updates"
    assert drawn(plots.loss_against_updates(runs)).axes[0].get_xlabel() == "updates"


def test_mixed_units_are_named_so() -> None:
    runs = [make_run(), make_run(engine="local")]
    assert plots.time_label(runs) == "time (each run in its own unit)"


def test_a_small_range_is_drawn_from_zero() -> None:
    trace = make_trace(final_error=0.4)
    axes = drawn(plots.error_against_time([make_run(trace=trace)])).axes[0]
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0.0


def test_the_target_is_drawn_on_the_error() -> None:
    figure = drawn(plots.error_against_time([make_run()], ("accuracy", 0.9)))
    assert figure.axes[0].lines[-1].get_ydata() == pytest.approx([10.0, 10.0])
    other = drawn(plots.error_against_time([make_run()], ("f1", 0.9)))
    assert len(other.axes[0].lines) == 1


def test_runs_keep_their_style_and_eight_differ() -> None:
    runs = eight_runs()
    styles = {(plots.run_style(i).colour, plots.run_style(i).marker) for i in range(8)}
    assert len(styles) == 8
    assert len({c for c, _ in styles}) == len({m for _, m in styles}) == 8
    for figure in (plots.error_against_time(runs), plots.loss_against_updates(runs)):
        for index, line in enumerate(drawn(figure).axes[0].lines):
            assert line.get_color() == plots.run_style(index).colour
            assert line.get_marker() == plots.run_style(index).marker
    panels = drawn(plots.staleness_histogram(runs)).axes
    for index in range(8):
        colour = plots.run_style(index).colour
        assert panels[index].patches[0].get_facecolor() == pytest.approx(
            [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] + [1.0]
        )


def test_staleness_panels_show_shares_that_add_up() -> None:
    runs = [make_run(trace=make_trace(mean_staleness=m)) for m in (0.0, 2.0)]
    for run, axes in zip(runs, drawn(plots.staleness_histogram(runs)).axes, strict=True):
        heights = [bar.get_height() for bar in axes.patches]  # type: ignore[attr-defined]
        assert sum(heights) == pytest.approx(100.0)
        assert len(heights) == run.outcome.max_staleness + 1


def test_a_wide_histogram_is_binned() -> None:
    run = make_run(trace=make_trace(updates=800, mean_staleness=200.0))
    figure = drawn(plots.staleness_histogram([run]))
    assert len(figure.axes[0].patches) <= 50
    assert "per bar" in figure.get_supxlabel()


def test_bars_stack_to_what_was_handed_out() -> None:
    runs = [make_run(trace=make_trace(cancelled=10, discarded=5, given_up=2)), make_run()]
    axes = drawn(plots.mini_batch_bars(runs)).axes[0]
    edges = [(bar.get_x(), bar.get_width()) for bar in axes.patches]  # type: ignore[attr-defined]
    assert edges[0::2] == [(0, 60), (60, 10), (70, 5), (75, 2)]
    assert edges[1::2] == [(0, 60), (60, 0), (60, 0), (60, 0)]


def test_nothing_to_show_is_no_figure() -> None:
    empty = [make_run(trace=Trace())]
    assert plots.error_against_time(empty) is None
    assert plots.loss_against_updates(empty) is None
    assert plots.staleness_histogram(empty) is None
    assert plots.mini_batch_bars(empty) is None


def test_svg_has_no_size_and_no_namespaces() -> None:
    svg = plots.to_svg(drawn(plots.error_against_time([make_run()])), "x")
    head = svg[: svg.index(">")]
    assert head.startswith("<svg viewBox=")
    assert "width" not in head
    assert "height" not in head
    assert "xmlns" not in svg
    assert "xlink" not in svg
    assert "http" not in svg


def test_png_is_the_same_every_time(tmp_path: Path) -> None:
    runs = four_runs()
    first = plots.error_against_time_png(runs, tmp_path / "a.png")
    second = plots.error_against_time_png(runs, tmp_path / "b.png")
    assert first is not None
    assert second is not None
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")
    assert plots.error_against_time_png([make_run(trace=Trace())], tmp_path / "c.png") is None


def test_a_table_does_not_wait_for_matplotlib_and_nothing_for_torch() -> None:
    code = (
        "import sys, gruppetto.report; assert 'matplotlib' not in sys.modules;"
        "import gruppetto.report.page; assert 'matplotlib.pyplot' not in sys.modules;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_drawing_leaves_matplotlib_settings_alone() -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 33.0}):
        odd = plots.to_svg(drawn(plots.error_against_time([make_run()])), "x")
        assert matplotlib.rcParams["font.size"] == 33.0
    assert odd == plots.to_svg(drawn(plots.error_against_time([make_run()])), "x")
    assert dict(matplotlib.rcParams) == before
