"""Decoupled runs in the report: where modules' time went, from rows known by hand and made up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic_decoupled import (
    decoupled_run,
    decoupled_runs,
    decoupled_settings,
    decoupled_trace,
    lay_out,
)
from synthetic_runs import VERSIONS, four_local_runs, make_run, make_settings
from test_report_page import Page

from gruppetto.cli import _run
from gruppetto.decoupled.schedule import Schedule
from gruppetto.protocols.messages import BackwardFinished, ForwardFinished
from gruppetto.report import ReportedRun, distinct_labels, load_runs, results_table
from gruppetto.report.data import setting_text, told_settings
from gruppetto.report.module_plots import (
    modules_time,
    modules_time_caption,
    modules_time_words,
    passes_strip,
    passes_words,
)
from gruppetto.report.module_table import module_json, modules_rows, modules_table, modules_words
from gruppetto.report.modules import (
    ModuleSpent,
    Pass,
    first_passes,
    module_reports,
    num_modules,
    speed,
    utilisation,
)
from gruppetto.report.page import render_page
from gruppetto.report.summary import remarks
from gruppetto.report.table import rows
from gruppetto.trace import EndRow, EventRow, FailureRow, ModuleRow, Trace, encode_message


def row(
    module: int,
    mini_batch: int,
    time: float,
    *,
    staleness: int = 0,
    loading: float = 0.0,
    forward: float = 1.0,
    backward: float = 2.0,
    step: float = 0.5,
    inputs: float = 0.0,
    gradients: float = 0.0,
    others: float = 0.0,
) -> ModuleRow:
    return ModuleRow(
        module=module, mini_batch=mini_batch, time=time, staleness=staleness, loading=loading,
        forward=forward, backward=backward, step=step, waiting_for_inputs=inputs,
        waiting_for_gradients=gradients, waiting_for_others=others, in_flight=0,
    )  # fmt: skip


def pass_event(kind: type[ForwardFinished | BackwardFinished], *fields: Any) -> Any:
    """An event at the time given first; then module and mini-batch."""
    time, module, mini_batch = fields
    last = (None,) if kind is ForwardFinished else ()
    body = msgspec.Raw(encode_message(kind(module, mini_batch, 0, *last)))
    return EventRow(0, time, time, kind.__name__, body, "0" * 16)


def by_hand() -> Trace:
    """Two modules, ddg, two mini-batches; a forward pass takes 1 s, a backward one 2 s, a step 0.5.

    Module 1: 0.25 s of loading, F0 F1, waiting, B0, B1. Module 2: 1.25 s until its inputs are
    there; F0 B0 F1 B1.
    """
    trace = Trace()
    for event in (
        pass_event(ForwardFinished, 1.25, 1, 0),
        pass_event(ForwardFinished, 2.5, 1, 1),
        pass_event(BackwardFinished, 6.25, 1, 0),
        pass_event(ForwardFinished, 2.25, 2, 0),
        pass_event(BackwardFinished, 4.25, 2, 0),
        pass_event(BackwardFinished, 10.25, 1, 1),
        pass_event(ForwardFinished, 5.75, 2, 1),
        pass_event(BackwardFinished, 7.75, 2, 1),
    ):
        trace.add(event)
    for each in (
        row(1, 0, 6.75, loading=0.5, forward=2.0, gradients=1.75),
        row(2, 0, 4.75, inputs=1.25),
        row(1, 1, 10.75, staleness=1, forward=0.0, gradients=1.5),
        row(2, 1, 8.25),
    ):
        trace.add(each)
    return trace


def ended(trace: Trace, time: float, **result: Any) -> Trace:
    trace.add(EndRow(len(trace.events), {"time": time, **result}, "0" * 64))
    return trace


# ------------------------------------------------------------------- numbers


def test_modules_by_hand() -> None:
    memory = {"module": 1, "peak_bytes": 2**20, "predicted_bytes": 2**19, "blocks": ["a", "b"]}
    run = decoupled_run(trace=ended(by_hand(), 11.0, per_module=[memory]))
    first, second = module_reports(run)
    assert first.spent == ModuleSpent(
        forward=2.0, backward=4.0, step=1.0, loading=0.5, waiting_for_gradients=3.25, end=0.25
    )
    # Its first pass began when the inputs came; half of what its wait was called is a start.
    assert second.spent == ModuleSpent(
        forward=2.0, backward=4.0, step=1.0, start=1.25, end=2.75, waiting_for_inputs=0.0
    )
    assert first.spent.total == second.spent.total == 11.0
    assert first.utilisation == second.utilisation == pytest.approx(7.0 / 11.0)
    assert utilisation(run) == pytest.approx(7.0 / 11.0)
    assert (first.rate, second.rate) == (pytest.approx(1 / 4.0), pytest.approx(1 / 3.5))
    assert speed(run) == pytest.approx(0.25)
    assert (first.updates, first.mean_staleness, first.max_staleness) == (2, 0.5, 1)
    assert (second.updates, second.mean_staleness, second.max_staleness) == (2, 0.0, 0)
    assert (first.peak_bytes, first.predicted_bytes, first.begins_at) == (2**20, 2**19, "a")
    assert (second.peak_bytes, second.predicted_bytes, second.begins_at) == (None, None, None)


def test_passes_by_hand() -> None:
    passes = first_passes(decoupled_run(trace=by_hand()), 2)
    assert [each for each in passes if each.module == 1] == [
        Pass(1, "forward", 0, 0.25, 1.25), Pass(1, "forward", 1, 1.5, 2.5),
        Pass(1, "backward", 0, 4.25, 6.25), Pass(1, "step", 0, 6.25, 6.75),
        Pass(1, "backward", 1, 8.25, 10.25), Pass(1, "step", 1, 10.25, 10.75),
    ]  # fmt: skip
    assert [str(each.kind[0]) + str(each.mini_batch) for each in passes if each.module == 2] == [
        "f0", "b0", "s0", "f1", "b1", "s1",
    ]  # fmt: skip
    assert len(first_passes(decoupled_run(trace=by_hand()), 1)) == 4 + 3


def test_a_slow_first_pass_is_seen_where_the_others_leave_it_no_other_place() -> None:
    trace = Trace()
    # Three forward passes without a pause: 5 s, then 1 s each.
    for number, end in enumerate((5.0, 6.0, 7.0)):
        trace.add(pass_event(ForwardFinished, end, 1, number))
    trace.add(pass_event(BackwardFinished, 9.0, 1, 0))
    trace.add(row(1, 0, 9.5, forward=7.0))
    passes = first_passes(decoupled_run(trace=trace), 1)
    assert [(each.start, each.end) for each in passes[:3]] == [(0.0, 5.0), (5.0, 6.0), (6.0, 7.0)]


def test_a_process_that_waited_before_the_clock_went() -> None:
    trace = Trace()
    trace.add(row(2, 0, 4.0, inputs=1.5))  # 5 s accounted for, in 4
    (report,) = module_reports(decoupled_run(trace=ended(trace, 4.0)))
    assert report.spent == ModuleSpent(1.0, 2.0, 0.5, waiting_for_inputs=0.5)
    trace = Trace()
    trace.add(row(1, 0, 5.0, loading=0.5))  # 4 s accounted for, in 5
    (report,) = module_reports(decoupled_run(trace=ended(trace, 6.0)))
    assert (report.spent.start, report.spent.end, report.spent.total) == (1.0, 1.0, 6.0)


def test_what_no_row_accounts_for_is_the_rest() -> None:
    trace = Trace()
    trace.add(row(1, 0, 3.5))
    trace.add(row(1, 1, 8.0))  # 3.5 s of 4.5
    (report,) = module_reports(decoupled_run(trace=ended(trace, 8.0)))
    assert report.spent.rest == pytest.approx(1.0)
    assert report.spent.total == pytest.approx(8.0)


@given(
    delays=st.sampled_from([(0,), (0, 0), (1, 0), (2, 0), (2, 1, 0), (4, 2, 0)]),
    mini_batches=st.integers(1, 12),
    barrier=st.booleans(),
    seed=st.integers(0, 99),
    ends=st.booleans(),
)
def test_every_modules_time_adds_up_and_passes_lie_where_they_were(
    delays: tuple[int, ...], mini_batches: int, barrier: bool, seed: int, ends: bool
) -> None:
    size = len(delays)
    how: dict[str, Any] = {
        "forward": [1.0] * size, "backward": [2.0] * size, "loading": 0.1, "step": 0.2,
        "seed": seed,
    }  # fmt: skip
    trace = decoupled_trace(
        delays, mini_batches=mini_batches, barrier=barrier, ends=ends, evaluations=0, **how
    )
    run = decoupled_run(f"ddg:modules={size}", trace)
    reports = module_reports(run)
    assert len(reports) == size == num_modules(run)
    for each in reports:
        last = max(r.time for r in trace.modules if ends or r.module == each.module)
        assert each.spent.total == pytest.approx(last)
        assert min(each.spent.parts()) >= 0.0
        assert each.spent.rest == 0.0
        assert each.spent.computing == pytest.approx(mini_batches * 3.2)
        assert each.max_staleness == min(delays[each.module - 1], mini_batches - 1)
    laid = lay_out(Schedule(delays, mini_batches, barrier=barrier), **how)
    expected = {
        (module, {"F": "forward", "B": "backward"}[one.action.kind], one.action.mini_batch): one
        for module, column in laid.items()
        for one in column
    }
    passes = [each for each in first_passes(run, mini_batches) if each.kind != "step"]
    assert len(passes) == len(expected)
    for one in passes:
        known = expected[one.module, one.kind, one.mini_batch]
        assert (one.start, one.end) == (pytest.approx(known.start), pytest.approx(known.end))


def test_other_runs_have_no_modules() -> None:
    run = make_run()
    assert module_reports(run) == first_passes(run, 5) == modules_rows(run) == []
    assert utilisation(run) is speed(run) is num_modules(run) is None
    assert modules_time([run]) is passes_strip([run]) is None


# ---------------------------------------------------------------- their names


def test_decoupled_runs_are_named_by_their_method() -> None:
    ddg, bp = decoupled_settings("ddg:modules=2"), decoupled_settings("bp:modules=2")
    assert distinct_labels([ddg]) == ["ddg:modules=2"]
    assert distinct_labels([ddg, bp]) == ["ddg:modules=2", "bp:modules=2"]
    other = decoupled_settings("ddg:modules=2", seed=1)
    assert distinct_labels([ddg, other]) == ["seed 0", "seed 1"]
    assert distinct_labels([ddg, other, bp]) == [
        "ddg:modules=2, seed 0", "ddg:modules=2, seed 1", "bp:modules=2, seed 0",
    ]  # fmt: skip


def test_names_beside_runs_of_learners() -> None:
    ddg = decoupled_settings("ddg:modules=2", modulation="none")
    hardsync, many = make_settings(modulation="none"), make_settings(modulation="none", learners=8)
    assert distinct_labels([ddg, hardsync]) == ["ddg:modules=2, engine local", "hardsync, engine virtual"]  # fmt: skip # noqa: E501
    ddg["engine"] = "virtual"
    assert distinct_labels([ddg, hardsync]) == ["ddg:modules=2", "hardsync"]
    assert distinct_labels([ddg, hardsync, many]) == [
        "ddg:modules=2", "hardsync, learners 4", "hardsync, learners 8",
    ]  # fmt: skip
    told = told_settings(ddg, [ddg, hardsync, many])
    assert "learners" not in told and "decouple" not in told and "seed" in told


def write_run(folder: Path, settings: dict[str, object], trace: Trace) -> Path:
    (folder / "trace").mkdir(parents=True)
    config = {"settings": settings, "versions": VERSIONS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = [b'{"kind":"segment","format":"gruppetto-trace-1","segment":0}']
    rows_of_all = [*trace.events, *trace.modules, *trace.updates, *trace.evaluations]
    lines += [msgspec.json.encode(each) for each in rows_of_all]
    if trace.end is not None:
        lines.append(msgspec.json.encode(trace.end))
    (folder / "trace" / "000.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def small(delays: tuple[int, ...] = (1, 0), **more: Any) -> Trace:
    size = len(delays)
    return decoupled_trace(
        delays, mini_batches=8, forward=[0.01] * size, backward=[0.02] * size, **more
    )


def test_folders_are_named_without_what_follows_from_the_method(tmp_path: Path) -> None:
    specs = {"bp:modules=2": (0, 0), "ddg:modules=3": (2, 1, 0)}
    folders = [
        write_run(tmp_path / str(number), decoupled_settings(spec), small(delays))
        for number, (spec, delays) in enumerate(specs.items())
    ]
    learners = make_settings("async", engine="local", modulation_is_default=True)
    folders.append(write_run(tmp_path / "async", learners, make_run().trace))
    assert [run.name for run in load_runs(folders)] == [*specs, "async"]
    cut = decoupled_settings("bp:modules=2", begins=["layer3.0"])
    others = [folders[0], write_run(tmp_path / "cut", cut, small((0, 0)))]
    assert [run.name for run in load_runs(others)] == ["begins layer2.0", "begins layer3.0"]


# ------------------------------------------------------------ tables and words


def test_the_table_of_decoupled_runs() -> None:
    runs = decoupled_runs()
    table = rows(runs, ("accuracy", 0.9))
    assert next(iter(table[0])) == "method"
    assert {"cancelled", "discarded", "given up", "dropped", "max staleness"}.isdisjoint(table[0])
    assert [each["staleness per module"] for each in table] == [
        "0, 0", "1, 0", "1, 0", "3, 2, 1, 0", "2, 0",
    ]  # fmt: skip
    assert [each["modules"] for each in table] == ["2", "2", "2", "4", "2"]
    used = [utilisation(run) for run in runs]
    assert [each["utilisation (%)"] for each in table] == [f"{100 * (u or 0):.1f}" for u in used]
    assert float(table[1]["mini-batches per s"]) == pytest.approx(speed(runs[1]), rel=0.01)
    for target in (None, ("accuracy", 0.9)):
        assert len(results_table(runs, target).columns) == 6


def test_beside_runs_of_learners_a_dash_stands_for_what_there_is_not() -> None:
    runs = [decoupled_runs()[1], four_local_runs()[1]]
    table = rows(runs)
    assert next(iter(table[0])) == "run"
    assert (table[0]["cancelled"], table[1]["cancelled"]) == ("-", "150")
    assert (table[0]["modules"], table[1]["modules"]) == ("2", "-")
    assert (table[1]["utilisation (%)"], table[1]["staleness per module"]) == ("-", "-")
    assert len(results_table(runs).columns) == 6
    assert "protocol" in rows([runs[1]])[0] and "utilisation (%)" not in rows([runs[1]])[0]


def test_virtual_times_have_the_unit_of_their_pass_times() -> None:
    plain = decoupled_run(engine="virtual", pass_times=None)
    timed = decoupled_run(engine="virtual", pass_times="0.1/0.2")
    assert "mini-batches per virtual unit" in rows([plain])[0]
    assert "mini-batches per virtual s" in rows([timed])[0]
    assert rows([plain, timed])[1]["mini-batches per time"].endswith(" per virtual s")
    assert modules_words(plain).endswith("mini-batches per virtual unit.")


def test_a_dropped_tail_is_in_the_table() -> None:
    trace = small()
    assert trace.end is not None
    trace.end.result["mini_batches_dropped"] = 1
    assert rows([decoupled_run(trace=trace)])[0]["dropped"] == "1"


def test_runs_beside_their_control() -> None:
    runs = decoupled_runs()
    ratio = (speed(runs[1]) or 0.0) / (speed(runs[0]) or 1.0)
    assert ratio > 1.5
    text = remarks(runs)
    assert f"ddg:modules=2 was {ratio:.2f} times as fast as bp:modules=2" in text
    assert "modules=4 was" not in text  # another number of modules than the control has
    assert "times as fast" not in remarks(runs[1:])
    slower = decoupled_run("ddg:modules=2", runs[1].trace, batch_size=64)
    assert "times as fast" not in remarks([runs[0], slower])


def test_evaluation_competes_with_modules() -> None:
    trace = small()
    assert trace.end is not None
    trace.end.result.update(evaluation_time=0.1, cores=2)
    run = decoupled_run(trace=trace, evaluate="live")
    assert "on cores that it shared with the modules" in remarks([run])
    trace.end.result["cores"] = 4
    assert "on a core of its own" in remarks([run])
    other = make_run(engine="local", evaluate="deferred")
    assert "competes with learners and modules" in remarks([run, other])


def test_modules_as_rows_words_table_and_json_say_the_same() -> None:
    run = decoupled_run(
        trace=ended(by_hand(), 11.0, per_module=[{"module": 2, "peak_bytes": 2**21}])
    )
    first, second = modules_rows(run)
    assert first == {
        "module": "1", "staleness": "1", "used": "63.6", "forward": "18.2", "backward": "36.4",
        "step": "9.1", "loading": "4.5", "for inputs": "0.0", "for gradients": "29.5",
        "for others": "0.0", "start, end": "2.3", "rest": "0.0", "peak (MiB)": "-",
    }  # fmt: skip
    assert (second["start, end"], second["peak (MiB)"]) == ("36.4", "2")
    words = (
        "2 modules, used 63.6 to 63.6 % of the time, 63.6 % on average; 0.25 mini-batches per s."
    )
    assert modules_words(run) == words
    made = module_json(run)
    assert [each["utilisation"] for each in made] == pytest.approx([7 / 11, 7 / 11])
    assert sum(made[0]["shares"].values()) == pytest.approx(1.0)
    assert made[1]["peak_bytes"] == 2**21 and made[0]["peak_bytes"] is None
    console = Console(width=80, file=io.StringIO())
    console.print(modules_table(run))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "63.6" in text and "29.5" in text and "…" not in text


def test_one_module_is_plain_training() -> None:
    run = decoupled_run("ddg:modules=1", small((0,)))
    assert modules_words(run).startswith("1 module, used 100 % of the time; ")
    assert "staleness per module" in rows([run])[0]


# ------------------------------------------------------------ figures and page


def test_bars_in_groups_are_as_long_as_their_runs() -> None:
    runs = decoupled_runs()
    figure = modules_time(runs)
    assert figure is not None
    axes = figure.axes[0]
    ends: dict[int, float] = {}
    for bar in axes.patches:
        middle = round(bar.get_y() + bar.get_height() / 2)  # type: ignore[attr-defined]
        right = bar.get_x() + bar.get_width()  # type: ignore[attr-defined]
        ends[middle] = max(ends.get(middle, 0.0), right)
    bars = [ends[int(place)] for place in axes.get_yticks()]
    expected = [run.outcome.time for run in runs for _ in module_reports(run)]
    assert bars == pytest.approx(expected)
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if "modules" in text] == [run.name for run in runs]
    shares = [f"{100 * each.utilisation:.0f} %" for run in runs for each in module_reports(run)]
    assert [text for text in texts if text.endswith(" %")] == shares
    assert "fdg:modules=2, module 2: " in modules_time_words(runs)


def test_the_strip_shows_columns_on_one_axis() -> None:
    runs = decoupled_runs()
    figure = passes_strip(runs)
    assert figure is not None
    assert len(figure.axes) == 5
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert "module 1 begins with forward 0, backward 0, forward 1" in passes_words(runs[:1])
    assert "module 1 begins with forward 0, forward 1, backward 0" in passes_words(runs[1:2])
    # Much shorter runs have an axis of their own.
    quick = decoupled_run(trace=small(), name="quick")
    figure = passes_strip([runs[0], quick])
    assert figure is not None
    assert len({axes.get_xlim() for axes in figure.axes}) == 2
    assert len(passes_strip(runs * 2).axes) == 6  # type: ignore[union-attr]


def test_the_page_of_one_decoupled_run() -> None:
    page = Page(render_page(decoupled_runs()[3:4]))
    headings = " ".join(page.text.split())
    for heading in ("Modules", "Where the modules' time went", "The first passes"):
        assert heading in headings
    assert "learner" not in page.text.lower()
    assert "handed" not in page.text
    assert page.count("figure") == 7
    assert "Modules of ddg:modules=4" in page.text


def test_the_page_beside_runs_of_learners() -> None:
    runs = [decoupled_runs()[1], *four_local_runs()[:1]]
    page = Page(render_page(runs))
    assert "Learners of hardsync" in page.text and "Modules of ddg:modules=2" in page.text
    assert "Learners of ddg" not in page.text
    labels = " ".join(page.values("aria-label"))
    assert "mini-batches handed to learners. hardsync: 480 applied" in labels
    assert "of decoupled runs, updates that a module made" in page.text
    texts = [setting_text(runs[0].settings[key]) for key in ("decouple", "tail")]
    assert f"ddg:modules=2 {texts[0]} - {texts[1]}" in page.text  # no protocol, and none to miss


def test_the_page_is_the_same_every_time() -> None:
    pages = [render_page([decoupled_run(trace=small())]) for _ in range(2)]
    assert pages[0] == pages[1]


def test_a_killed_run_is_told_up_to_its_last_rows() -> None:
    whole = small()
    killed = small(groups=5, ends=False)
    run = decoupled_run(trace=killed)
    assert not run.outcome.has_ended and run.outcome.updates == 5
    for each in module_reports(run):
        assert each.spent.end == 0.0 and each.peak_bytes is None
        last = [r.time for r in whole.modules if r.module == each.module][4]
        assert each.spent.total == pytest.approx(last)
    page = Page(render_page([run]))
    assert "did not end" in page.text and "peak (MiB)" not in page.text
    assert "up to each module's last update" in modules_time_caption([run])
    assert rows([run])[0]["modules"] == "2"


def test_a_run_whose_modules_have_done_nothing_yet() -> None:
    run = decoupled_run(trace=Trace())
    page = Page(render_page([run]))
    assert "No module has applied a mini-batch." in page.text
    assert rows([run])[0]["staleness per module"] == "-"
    assert module_json(run) == []


def test_a_failed_pass_is_told_by_its_module() -> None:
    trace = small()
    trace.add(FailureRow(row=3, learner=2, mini_batch=7, traceback="Traceback: it broke"))
    assert "mini-batch 7, module 2" in Page(render_page([decoupled_run(trace=trace)])).text


def test_text_is_escaped() -> None:
    run = ReportedRun("<b>x</b>", "<i>", {"decouple": "ddg:modules=2"}, {}, small())
    html = render_page([run, decoupled_run(trace=small())])
    assert "<b>x" not in html and "<i>" not in html


def test_many_mini_batches_make_no_wide_numbers() -> None:
    figure = passes_strip([decoupled_runs()[3], decoupled_runs()[0]])
    assert figure is not None
    forward = [text for text in figure.axes[0].texts if text.get_color() == "white"]
    assert forward == []  # beside bp, passes of four modules are too narrow for numbers
    assert np.all([text.get_fontsize() >= 8.0 for text in figure.axes[1].texts])


# ----------------------------------------------------------------- the command


def test_the_command_prints_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "ddg", decoupled_settings("ddg:modules=2"), small())
    write_run(tmp_path / "async", make_settings("async"), make_run().trace)
    assert _run(["report", "ddg", "async", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert list(made["modules"]) == ["ddg"]
    assert [each["module"] for each in made["modules"]["ddg"]] == [1, 2]
    assert _run(["report", "ddg"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "ddg:modules=2" and lines[-1] == "ddg/report.html"
    assert any("backward" in line for line in lines)
    assert _run(["report", "async", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["report", "runs"]
