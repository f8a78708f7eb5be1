"""What gradients counted, from small traces whose numbers are known by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from synthetic_runs import four_runs, make_run

from gruppetto.protocols.account import LearnerAccount
from gruppetto.report import ReportedRun
from gruppetto.report.account_plots import (
    effective_rates,
    effective_rates_words,
    learners_rows,
    learners_words,
)
from gruppetto.report.accounts import (
    effective_rate,
    fresh_fraction,
    gamma,
    learner_shares,
    rate_varies,
    unused,
)
from gruppetto.report.page import render_page
from gruppetto.report.table import rows
from gruppetto.runs.accounts import measured_gamma
from gruppetto.theory.estimates import estimate_p0
from gruppetto.trace import EndRow, GammaRow, Trace, UpdateRow


def update(
    version: int, learners: list[int], staleness: list[int], rate: float | None = 0.1
) -> UpdateRow:
    size = len(learners)
    return UpdateRow(
        version=version, time=float(version), samples=4 * size * version, epoch=0.1 * version,
        learning_rate=0.1, staleness=staleness, num_samples=[4] * size, factors=[1.0] * size,
        learners=learners, losses=[1.0] * size, applied=size * version, cancelled=0, discarded=0,
        given_up=0, effective_rate=rate,
    )  # fmt: skip


def account(learner: int, **counts: int) -> dict[str, int]:
    return {"learner": learner, "leases": 0, "applied": 0, "cancelled": 0, "rejected": 0,
            "lost": 0, "discarded": 0, **counts}  # fmt: skip


def small(per_learner: Any = None, rates: tuple[float | None, ...] = (0.1, 0.1, 0.05)) -> Trace:
    """Three updates of two gradients; learner 2 never makes it."""
    trace = Trace()
    for row in (
        update(1, [0, 1], [0, 0], rates[0]),
        update(2, [0, 0], [0, 1], rates[1]),
        update(3, [1, 0], [2, 0], rates[2]),
    ):
        trace.add(row)
    trace.add(EndRow(rows=9, result={"per_learner": per_learner}, commands_sha256="0" * 64))
    return trace


TOLD = [
    account(0, leases=5, applied=4, cancelled=1),
    account(1, leases=4, applied=2, rejected=1, lost=1),
    account(2, leases=3, cancelled=3, discarded=2),
]


def run_of(trace: Trace, name: str = "async") -> ReportedRun:
    return make_run("async", trace, name)


def test_learners_by_hand() -> None:
    run = run_of(small(TOLD))
    shares = learner_shares(run)
    assert [(s.learner, s.applied, s.leases, s.unused, s.discarded) for s in shares] == [
        (0, 4, 5, 1, 0), (1, 2, 4, 2, 0), (2, 0, 3, 3, 2),
    ]  # fmt: skip
    assert [s.share for s in shares] == pytest.approx([4 / 6, 2 / 6, 0.0])
    assert [(s.mean_staleness, s.max_staleness) for s in shares] == [(0.25, 1), (1.0, 2), (0.0, 0)]
    assert [s.unused_share for s in shares] == [0.2, 0.5, 1.0]
    assert unused(run) == 6 / 12
    assert fresh_fraction(run) == estimate_p0([0, 0, 0, 1, 2, 0]) == 4 / 6
    assert learners_words(run) == (
        "3 learners, 0 to 66.7 % of the gradients each; 50 % of the mini-batches handed out came "
        "to nothing."
    )
    assert list(learners_rows(run)[0].items()) == [
        ("learner", "0"), ("gradients", "4"), ("share (%)", "66.7"), ("mean staleness", "0.25"),
        ("max staleness", "1"), ("handed out", "5"), ("to nothing (%)", "20.0"), ("too late", "0"),
    ]  # fmt: skip
    assert list(learners_rows(run)[2].values()) == ["2", "0", "0.0", "-", "-", "3", "100.0", "2"]


def test_a_trace_of_before_tells_what_it_can() -> None:
    run = run_of(small(None, (None, None, None)))
    assert [s.learner for s in learner_shares(run)] == [0, 1]
    assert unused(run) is None
    assert learners_words(run) == "2 learners, 33.3 to 66.7 % of the gradients each."
    assert list(learners_rows(run)[0].values())[5:] == ["-", "-", "-"]
    assert len(effective_rate(run)) == 0 and not rate_varies(run)
    assert "Effective learning rate" not in render_page([run])


def test_the_page_reads_what_the_account_writes() -> None:
    names = set(LearnerAccount.__slots__)
    assert {"leases", "cancelled", "rejected", "lost", "discarded", "learner"} <= names


def test_effective_rates_are_drawn_where_they_vary() -> None:
    varies, same = run_of(small(TOLD)), run_of(small(TOLD, (0.1, 0.1, 0.1)), "same")
    assert rate_varies(varies) and not rate_varies(same)
    curve = effective_rate(varies)
    assert curve.values.tolist() == [0.1, 0.1, 0.05] and curve.updates.tolist() == [1, 2, 3]
    assert effective_rate(varies, max_points=2).values.tolist() == [0.1, 0.05]
    assert effective_rates([same]) is None
    assert effective_rates([varies, same]) is not None
    assert "async: from 0.05 to 0.1, 0.05 at the end" in effective_rates_words([varies, same])
    assert "Effective learning rate" in render_page([varies, same])


def gammas() -> list[GammaRow]:
    """(1 + 0 + 3) / (4 + 4 + 8) = 0.25."""
    return [
        GammaRow(2, 2.0, [1, 0], [1.0, 0.0], 4.0),
        GammaRow(3, 3.0, [2], [3.0], 8.0),
    ]


def test_gamma_by_hand() -> None:
    trace = small(TOLD)
    for row in gammas():
        trace.add(row)
    run = run_of(trace)
    assert gamma(run) == measured_gamma(gammas()) == 0.25
    assert measured_gamma([]) is None
    assert measured_gamma([GammaRow(1, 1.0, [0], [0.0], 0.0)]) is None
    table = rows([run, run_of(small(TOLD), "without")])
    assert [row["gamma"] for row in table] == ["0.25", "-"]
    assert [row["fresh (%)"] for row in table] == ["66.7", "66.7"]
    assert "Gamma: how far" in render_page([run])
    assert "Gamma: how far" not in render_page([run_of(small(TOLD))])


def test_of_many_learners_the_most_and_the_fewest_are_listed() -> None:
    trace = Trace()
    random = np.random.default_rng(0)
    for version in range(1, 400):
        trace.add(update(version, [int(random.integers(40))], [3]))
    table = learners_rows(run_of(trace))
    assert len(table) == 17 and table[8]["learner"] == "24 more"
    counts = [int(row["gradients"]) for row in table if row["gradients"]]
    assert counts == sorted(counts, reverse=True)
    assert {len(row) for row in table} == {8}


def test_each_run_of_a_comparison_has_its_learners() -> None:
    html = render_page(four_runs())
    assert html.count("<details") == 4 and "open><summary>" not in html
    alone = render_page(four_runs()[:1])
    assert alone.count('<details class="box" open>') == 1


def test_a_run_without_updates() -> None:
    run = run_of(Trace())
    assert learners_words(run) == "No learner was handed a mini-batch."
    assert learners_rows(run) == [] and fresh_fraction(run) is None
    assert "No learner was handed" in render_page([run])
