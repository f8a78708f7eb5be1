"""The rows that the terminal and the page share."""

from __future__ import annotations

import io

from rich.console import Console
from synthetic_runs import eight_runs, four_runs, make_run, make_trace

from gruppetto.report import results_table
from gruppetto.report.table import rows


def printed(runs, target=None, width=100) -> str:  # type: ignore[no-untyped-def]
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(results_table(runs, target))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_rows_have_the_numbers_of_the_runs() -> None:
    runs = four_runs(delay="exponential:mean=1")
    table = rows(runs, ("accuracy", 0.9))
    assert list(table[0]) == [
        "protocol", "time to target (virtual s)", "final accuracy (%)", "time (virtual s)",
        "updates", "mean staleness", "max staleness", "fresh (%)", "applied", "cancelled",
        "discarded", "given up", "dropped", "stopped by",
    ]  # fmt: skip
    assert all(list(row) == list(table[0]) for row in table)
    assert [row["protocol"] for row in table] == [
        "hardsync", "k-sync:k=6", "k-batch-async:k=4", "async",
    ]  # fmt: skip
    assert [row["updates"] for row in table] == ["60", "80", "120", "480"]
    assert [row["cancelled"] for row in table] == ["0", "150", "0", "0"]
    for run, row in zip(runs, table, strict=True):
        time = run.time_to(("accuracy", 0.9))
        assert time is not None
        assert abs(float(row["time to target (virtual s)"]) - time) <= 0.05
        accuracy = run.trace.evaluations[-1].metrics["accuracy"]
        assert row["final accuracy (%)"] == f"{100 * accuracy:.2f}"
        assert row["mean staleness"] == f"{run.outcome.mean_staleness:.2f}"


def test_units_stand_in_the_cells_where_they_differ() -> None:
    table = rows([make_run(), make_run(engine="local")], ("accuracy", 1.1))
    assert table[0]["time to target"] == "not reached"
    assert table[0]["time"].endswith(" virtual units")
    assert table[1]["time"].endswith(" s")


def test_runs_without_accuracy_show_their_loss() -> None:
    run = make_run(trace=make_trace(metrics=("loss",)))
    loss = run.trace.evaluations[-1].metrics["loss"]
    assert rows([run])[0]["final loss"] == f"{loss:.4g}"


def test_a_run_without_evaluations_shows_a_dash() -> None:
    table = rows([make_run(), make_run(trace=make_trace(evaluations=0))])
    assert table[1]["final accuracy (%)"] == "-"


def test_the_terminal_says_what_did_not_end() -> None:
    text = printed([make_run(), make_run("async", make_trace(ends=False))])
    assert "async (did not end)" in text
    assert "hardsync (did not end)" not in text


def test_the_terminal_table_has_six_columns_and_the_target() -> None:
    table = results_table(four_runs(), ("accuracy", 0.9))
    assert len(table.columns) == 6
    assert table.row_count == 4
    assert "target: accuracy 0.9" in printed(four_runs(), ("accuracy", 0.9))


def test_eight_long_names_fit_eighty_letters() -> None:
    text = printed(eight_runs(), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_square_brackets_in_a_name_are_no_markup() -> None:
    assert "[bold]x" in printed([make_run(name="[bold]x")])


def test_no_runs_make_an_empty_table() -> None:
    assert rows([]) == []
    assert results_table([]).row_count == 0
