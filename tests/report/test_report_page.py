"""The page: its numbers, that it needs nothing from outside, that it is the same every time."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_runs import VERSIONS, eight_runs, four_runs, make_run, make_trace

from gruppetto.errors import InvalidSetting, RunFolderError
from gruppetto.report import ReportedRun
from gruppetto.report.page import render_page, write_page
from gruppetto.report.summary import summary
from gruppetto.report.table import rows
from gruppetto.trace import FailureRow, Trace

_VOID = {"meta", "link", "br", "hr", "img", "input"}
TARGET = ("accuracy", 0.9)


def words(text: str) -> str:
    """The text with every white space, non-breaking ones too, as one blank."""
    return " ".join(text.split())


class Page(HTMLParser):
    """Tags with attributes, ids, text, and a check that tags close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return words(" ".join(self.words))

    def values(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(attribute)) is not None]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def html() -> str:
    return render_page(four_runs(delay="exponential:mean=1"), TARGET)


def test_every_number_of_the_table_is_on_the_page(html: str) -> None:
    text = Page(html).text
    for row in rows(four_runs(delay="exponential:mean=1"), TARGET):
        assert " ".join(row.values()) in text


def test_the_summary_names_the_winner(html: str) -> None:
    text = Page(html).text
    first = rows(four_runs(delay="exponential:mean=1"), TARGET)[2]
    assert (
        f"k-batch-async:k=4 reached test accuracy 90 % first, "
        f"after {first['time to target (virtual s)']} virtual s; hardsync took longest"
    ) in text
    assert "Final test accuracy: hardsync " in text


def test_nothing_comes_from_outside(html: str) -> None:
    assert "<script" not in html
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    page = Page(html)
    assert page.values("src") == []
    assert page.count("link") == 0
    links = page.values("href")
    assert links
    assert all(link.startswith("#") for link in links)
    assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", html))


def test_ids_are_unique_and_references_resolve(html: str) -> None:
    page = Page(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    used = [link[1:] for link in page.values("href")]
    used += [link[1:] for link in re.findall(r"url\(([^)]*)\)", html)]
    used += page.values("aria-labelledby")
    assert set(used) <= set(ids)


def test_figures_and_tables_can_be_read_aloud(html: str) -> None:
    page = Page(html)
    assert page.count("figure") == page.count("figcaption") == 6
    pictures = [attrs for _, attrs in page.tags if attrs.get("role") == "img"]
    assert len(pictures) == 6
    assert all(attrs.get("aria-label") for attrs in pictures)
    assert page.count("table") == page.count("caption")
    labels = " ".join(page.values("aria-label"))
    assert "Line chart of test error (%) against virtual time (s) for hardsync" in labels
    assert "k-sync:k=6: 480 applied, 150 cancelled, 0 discarded, 0 given up" in labels


def test_it_is_the_same_every_time(tmp_path: Path, html: str) -> None:
    runs = four_runs(delay="exponential:mean=1")
    path = write_page(runs, tmp_path / "deep" / "report.html", TARGET)
    assert path == tmp_path / "deep" / "report.html"
    assert path.read_bytes() == html.encode()
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_configuration_versions_hashes_and_folders() -> None:
    page = Page(render_page(eight_runs()))
    assert "Settings in which the runs differ: protocol, modulation." in page.text
    assert "optimizer sgd:lr=0.1,momentum=0.9" in page.text
    for key, value in VERSIONS.items():
        assert f"{key} {value}" in page.text
    for number in range(8):
        assert f"runs/{number:03d} " in page.text
        assert f"{number:02d}ab" * 16 in page.text


def test_a_run_that_was_killed_says_so() -> None:
    text = Page(render_page([make_run(), make_run("async", make_trace(ends=False))])).text
    assert "async did not end; its numbers are those of its last rows." in text
    assert text.count("did not end") == 2
    alone = summary([make_run("async", make_trace(ends=False))])
    assert "It did not end; the numbers are those of its last rows." in alone


def test_a_run_without_evaluations() -> None:
    page = Page(render_page([make_run(trace=make_trace(evaluations=0))], TARGET))
    assert "No evaluation was recorded" in page.text
    assert "was not evaluated" in page.text
    assert page.count("figure") == 4


def test_a_run_without_accuracy_shows_its_loss() -> None:
    trace = make_trace(metrics=("loss",), final_error=1e-5)
    run = make_run(trace=trace, task="least-squares")
    page = Page(render_page([run], ("loss", 0.01)))
    loss = trace.evaluations[-1].metrics["loss"]
    assert f"It ended at test loss {loss:.4g} after 60 updates" in page.text
    assert "Test loss against time" in page.text
    assert "It reached test loss 0.01 after" in page.text
    assert "accuracy" not in page.text
    assert "error (%)" not in page.text


def test_an_empty_trace_makes_a_page() -> None:
    page = Page(render_page([make_run(trace=Trace())]))
    assert page.count("figure") == 0
    assert "It did not end" in page.text


def test_a_target_that_some_or_none_reached() -> None:
    runs = [make_run(), make_run("async", make_trace(final_error=0.5, seed=3))]
    text = words(summary(runs, TARGET))
    assert "hardsync reached test accuracy 90 % first" in text
    assert "async did not reach it." in text
    text = words(summary(runs, ("accuracy", 0.999)))
    assert text.startswith("No run reached test accuracy 99.9 %.")


def test_times_in_different_units_are_not_compared() -> None:
    text = words(summary([make_run(), make_run("async", engine="local")], TARGET))
    assert "first" not in text
    assert "(units differ)" in text


def test_text_is_escaped() -> None:
    trace = make_trace()
    trace.add(FailureRow(row=3, learner=0, mini_batch=7, traceback="File <string>, line 1 & more"))
    run = ReportedRun("<b>x</b>", "<i>", {"task": "<script>alert(1)</script>"}, {}, trace)
    html = render_page([run, make_run()])
    assert "<b>x" not in html
    assert "<script" not in html
    assert "<i>" not in html
    assert "File &lt;string&gt;, line 1 &amp; more" in html
    assert "mini-batch 7, learner 0" in Page(html).text


def test_no_runs_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="at least one run"):
        render_page([])


def test_a_place_that_cannot_be_written_keeps_the_old_file(tmp_path: Path) -> None:
    blocked = tmp_path / "report.html"
    (blocked / "inside").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="cannot write"):
        write_page([make_run()], blocked)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
