"""The page about a plan: what it says of each candidate, in whichever form numbers come."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report_page import Page

from gruppetto.errors import InvalidSetting
from gruppetto.report.plan_page import render_plan_page, write_plan_page

TIMES = np.random.default_rng(0).gamma(2.0, 0.5, size=500)
SECONDS = np.linspace(0.01, 6.0, 200)


def candidate(protocol: str, seconds: float | None, **changed: Any) -> dict[str, Any]:
    return {
        "protocol": protocol,
        "batch_size": 32,
        "learning_rate_factor": 1.0,
        "update_time": 0.25,
        "update_time_band": [0.2, 0.3],
        "time_to_target": seconds,
        "time_to_target_band": None if seconds is None else [0.8 * seconds, 1.5 * seconds],
        "staleness": 3.0,
        "error_floor": 0.0125,
    } | changed


def plan(**changed: Any) -> dict[str, Any]:
    return {
        "delay": {
            "spec": "gamma:shape=2.0,scale=0.5",
            "warnings": ["times of learner 2 are longer than those of the others"],
            "n": 500,
            "times": TIMES.tolist(),
            "density": {"seconds": SECONDS, "density": 4 * SECONDS * np.exp(-2 * SECONDS)},
        },
        "candidates": [
            candidate("k-async:k=4", 120.0),
            candidate("async", 150.0, batch_size=16),
            candidate("hardsync", 300.0, update_time_band=None),
            candidate("k-batch-async:k=2", None),
        ],
        "recommendation": "Train with k-async:k=4, batch 32.",
        "why": "It reaches the target first; hardsync waits for the slowest learner.",
        "learners": 8,
    } | changed


@pytest.fixture(scope="module")
def html() -> str:
    return render_plan_page(plan(), "gruppetto plan times.csv")


def test_what_is_recommended_and_what_speaks_against(html: str) -> None:
    text = Page(html).text
    assert "Train with k-async:k=4, batch 32." in text
    assert "hardsync waits for the slowest learner." in text
    assert "times of learner 2 are longer than those of the others" in text
    assert "measured times 500" in text and "learners 8" in text
    assert "gruppetto plan times.csv" in text


def test_every_candidate_with_its_bands(html: str) -> None:
    text = Page(html).text
    assert "k-async:k=4 32 1 120.0 96.0 to 180.0 250.0 200.0 to 300.0 3.00 0.0125" in text
    assert "hardsync 32 1 300.0 240.0 to 450.0 250.0 - 3.00 0.0125" in text
    assert "k-batch-async:k=2 32 1 not reached - 250.0" in text
    assert html.count("background:#D55E00") == 1


def test_it_is_self_contained_and_can_be_read_aloud(html: str, tmp_path: Path) -> None:
    assert not re.search(r"<script|https?:|@import|<link", html)
    page = Page(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert set(page.values("aria-labelledby")) <= set(ids)
    assert page.count("figure") == page.count("figcaption") == 3
    labels = " ".join(page.values("aria-label"))
    assert "k-async:k=4, batch 32: 120.0 s (96.0 to 180.0)" in labels
    path = write_plan_page(plan(), tmp_path / "new" / "plan.html", "gruppetto plan times.csv")
    assert path.read_bytes() == html.encode()


@pytest.mark.parametrize(
    "form",
    [
        {"time_to_target": 10.0, "time_to_target_band": [8.0, 20.0]},
        {"time_to_target": 10.0, "time_to_target_low": 8.0, "time_to_target_high": 20.0},
        {"time_to_target": {"median": 10.0, "low": 8.0, "high": 20.0}},
        {"time_to_target": {"value": 10.0, "band": (8.0, 20.0)}},
    ],
)
def test_bands_come_in_several_forms(form: dict[str, Any]) -> None:
    bare = {"protocol": "async", "update_time": 0.5}
    text = Page(render_plan_page({"candidates": [bare | form]})).text
    assert "async 10.0 8.00 to 20.0 0.5" in text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (1, "Recommended: async with mini-batches of 16 and the learning rate times 1; it should "
         "reach the target after 150.0 s (120.0 to 225.0)."),
        ({"protocol": "async", "batch_size": 16}, "Recommended: async with mini-batches of 16"),
        ("hardsync", "Recommended: hardsync with mini-batches of 32"),
        (None, "Nothing is recommended."),
    ],
)  # fmt: skip
def test_the_recommendation_comes_in_several_forms(given: object, sentence: str) -> None:
    assert sentence in Page(render_plan_page(plan(recommendation=given, why=["a", "b"]))).text


def test_little_is_enough() -> None:
    page = Page(render_plan_page({"candidates": [{"protocol": "async"}]}))
    assert page.count("figure") == 0
    assert "Nothing is recommended." in page.text and "Warnings" not in page.text
    with pytest.raises(InvalidSetting, match="at least one candidate"):
        render_plan_page({"candidates": []})


def test_histograms_and_odd_numbers() -> None:
    delay = {"spec": "<b>", "histogram": {"edges": [0.0, 1.0, 3.0], "counts": [3, 1]}}
    several = [candidate("async", math.inf), candidate("k-async:k=2", 5.0)]
    several[1]["time_to_target_band"] = [4.0, math.inf]
    html = render_plan_page(plan(delay=delay, candidates=several))
    assert "<b>" not in html and "4.00 to ?" in html
    assert Page(html).count("figure") == 3
    same = {"spec": "constant:value=1", "times": [1.0, 1.0, 1.0]}
    assert Page(render_plan_page(plan(delay=same))).count("figure") == 3
