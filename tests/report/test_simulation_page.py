"""The page about simulations: what it says, what it draws, that it needs nothing from outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_report_page import Page

from gruppetto.errors import InvalidSetting, RunFolderError
from gruppetto.report.simulated import read_simulations
from gruppetto.report.simulation_page import render_simulation_page, write_simulation_page
from gruppetto.report.simulation_plots import (
    against_k,
    against_learners,
    side_by_side,
    update_times_png,
)
from gruppetto.report.simulation_share_plots import (
    MOST_PANELS,
    learners_time,
    shown_histograms,
    staleness_histograms,
)

COMMAND = "gruppetto simulate --delay 'exponential:mean=1'"
CELLS = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")


def record(cell: str = "k-async", k: int = 2, learners: int = 4, **changed: Any) -> dict[str, Any]:
    """What ``gruppetto simulate --json`` says, with made-up numbers."""
    late = cell.endswith("async")
    applied = 100 * k
    time = (k if "batch" in cell else 1.5 * k) / learners
    return {
        "protocol": f"{cell}:k={k}",
        "cell": cell,
        "k": k,
        "learners": learners,
        "updates": 100,
        "total_time": 100 * time,
        "mean_update_time": time,
        "update_time_range": [0.9 * time, 1.1 * time],
        "expected_update_time": None if cell == "k-batch-sync" else 1.2 * time,
        "expected_is": {"k-batch-sync": "unknown", "k-async": "upper-bound"}.get(cell, "exact"),
        "expected_why": f"Lemma of {cell}",
        "mean_staleness": (learners - 1) / k if late else 0.0,
        "p95_staleness": 5 if late else 0,
        "max_staleness": 9 if late else 0,
        "fresh_fraction": 0.25 if late else 1.0,
        "staleness_histogram": [applied // 4, applied // 2, applied // 4] if late else [applied],
        "mini_batches_applied": applied,
        "mini_batches_cancelled": 0 if late else 1234,
        "idle_fraction": 0.25,
        "cancelled_time_fraction": 0.0 if late else 0.5,
        "delay": "exponential:mean=1.0",
        "delays": {},
        "seed": 7,
        "repeats": 1,
    } | changed


def sweep(*learners: int) -> list[dict[str, Any]]:
    return [record(c, k, p) for p in learners or (4,) for c in CELLS for k in range(1, p + 1)]


@pytest.fixture(scope="module")
def html() -> str:
    return render_simulation_page(sweep(), COMMAND)


def test_numbers_and_kinds_in_words_are_on_the_page(html: str) -> None:
    text = Page(html).text
    assert "16 simulations with 4 learners" in text
    assert "k-sync:k=4 4 4 1.50 1.80, exact 2.67 0.00 0 0 100 1,234 50 25" in text
    assert "k-async:k=2 4 2 0.75 at most 0.9 2.67 1.50 5 9 25 0 0 25" in text
    assert re.search(r"k-batch-sync:k=1 4 1 .* unknown", text)
    assert "upper bound: Lemma of k-async k-async:k=1, k-async:k=2" in text
    assert "exponential:mean=1.0" in text and "seeds 7" in text
    assert COMMAND in text


def test_the_summary_compares_by_mini_batches_per_second() -> None:
    records = [record("k-sync", 4), record("k-batch-async", 1), record("k-batch-async", 2)]
    text = Page(render_simulation_page(records)).text
    assert (
        "Where a mini-batch takes exponential:mean=1.0 seconds, k-batch-async:k=1 applies most of "
        "them, 4.00 per second (1 other comes within 2 %), and k-sync:k=4 fewest, 2.67 per second. "
        "Gradients are stalest in k-batch-async:k=1: 3.00 updates in the mean."
    ) in text
    assert "The command" not in text


def test_it_is_self_contained_and_can_be_read_aloud(html: str) -> None:
    assert not re.search(r"<script|https?:|@import|<link", html)
    page = Page(html)
    assert page.values("src") == []
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    used = [link[1:] for link in page.values("href")]
    used += [link[1:] for link in re.findall(r"url\(([^)]*)\)", html)]
    assert set(used) | set(page.values("aria-labelledby")) <= set(ids)
    assert page.count("figure") == page.count("figcaption") == 3
    assert page.count("table") == page.count("caption") == 2
    labels = " ".join(page.values("aria-label"))
    assert "k-async:k=2: 0.75 s, theory at most 0.9 s" in labels
    shares = "25 % computing what is applied, 50 % computing what is cancelled or discarded"
    assert f"k-sync:k=1: {shares}" in labels


def test_it_is_the_same_every_time(tmp_path: Path, html: str) -> None:
    path = write_simulation_page(sweep(), tmp_path / "deep" / "page.html", COMMAND)
    assert path.read_bytes() == html.encode()


def test_which_plots_there_are() -> None:
    over_k, over_learners = "Time per update against K", "Time per update against learners"
    one = [record("k-async"), record("k-sync")]
    for records, headings in (
        (sweep(4), {over_k}),
        (sweep(2, 3), {over_k, over_learners}),
        ([record(learners=p) for p in (2, 4, 8)], {over_learners}),
        (one, {"Time per update"}),
    ):
        cases = read_simulations(records)
        text = Page(render_simulation_page(records)).text
        assert (over_k in text, over_learners in text) == (
            over_k in headings,
            over_learners in headings,
        )
        assert (against_k(cases) is not None) == (over_k in headings)
        assert (against_learners(cases) is not None) == (over_learners in headings)
    assert side_by_side(read_simulations(one)) is not None


def test_dots_are_simulated_and_lines_are_theory() -> None:
    figure = against_k(read_simulations(sweep()))
    assert figure is not None
    lines = figure.axes[0].get_lines()
    dots = [line for line in lines if line.get_linestyle() == "None"]
    assert sorted(line.get_ydata().tolist() for line in dots) == sorted(
        [record(cell, k)["mean_update_time"] for k in (1, 2, 3, 4)] for cell in CELLS
    )
    theory = [line for line in lines if line.get_linestyle() in ("-", "--")]
    assert [line.get_linestyle() for line in theory] == ["-"] * 3 + ["--"] * 3 + ["-"] * 3
    assert theory[0].get_ydata() == pytest.approx(
        [record("k-sync", k)["expected_update_time"] for k in (1, 2)]
    )
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [*CELLS, "theory, exact", "theory, upper bound"]


def test_what_theory_knows_at_one_point_alone_is_a_mark() -> None:
    cases = [record("k-batch-sync", k) for k in (1, 2, 4)]
    cases[0] |= {"expected_update_time": 0.5, "expected_is": "exact"}
    figure = against_k(read_simulations(cases))
    assert figure is not None
    assert [line.get_marker() for line in figure.axes[0].get_lines()] == ["_", "s"]


def test_histograms_hold_shares_and_are_not_too_many() -> None:
    cases = read_simulations(sweep(8))
    shown = shown_histograms(cases)
    assert len(shown) == MOST_PANELS
    assert {case.cell for case in shown} == {"k-async", "k-batch-async"}
    figure = staleness_histograms(read_simulations([record()]))
    assert figure is not None
    assert [bar.get_height() for bar in figure.axes[0].patches] == [25.0, 50.0, 25.0]
    assert staleness_histograms(read_simulations([record("k-sync")])) is None
    assert (
        "not shown: those where no gradient is late" in Page(render_simulation_page(sweep())).text
    )


def test_shares_of_time_add_up() -> None:
    figure = learners_time(read_simulations(sweep()))
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].patches]
    assert max(ends) == pytest.approx(100.0)


def test_repeats_and_own_delays_are_told() -> None:
    records = [record(repeats=3, delays={"2": "constant:value=9"}), record("k-sync", repeats=3)]
    text = Page(render_simulation_page(records)).text
    assert "seeds 7 to 9; numbers are medians over them" in text
    assert "learner 2: constant:value=9" in text
    assert "lowest to highest of 3 seeds" in text


def test_times_that_are_not_finite_or_zero_make_a_page() -> None:
    nothing = {"mean_update_time": None, "update_time_range": [None, None], "idle_fraction": None,
               "expected_update_time": None, "expected_is": "unknown"}  # fmt: skip
    page = Page(render_simulation_page([record(**nothing)]))
    assert "not finite" in page.text
    zero = {"mean_update_time": 0.0, "update_time_range": [0.0, 0.0], "expected_update_time": 0.0}
    render_simulation_page([record(k=k, **zero) for k in (1, 2)])


def test_text_is_escaped() -> None:
    html = render_simulation_page([record(delay="<script>")], "gruppetto <b>")
    assert "<script" not in html and "<b>" not in html


def test_no_simulations_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="at least one"):
        render_simulation_page([])


def test_the_picture(tmp_path: Path) -> None:
    for number, records in enumerate((sweep(), [record(learners=p) for p in (2, 4)], [record()])):
        path = update_times_png(records, tmp_path / f"{number}.png")
        first = path.read_bytes()
        assert first.startswith(b"\x89PNG")
        assert update_times_png(records, path).read_bytes() == first
    with pytest.raises(RunFolderError, match="cannot write"):
        update_times_png([record()], tmp_path / "0.png" / "x.png")
