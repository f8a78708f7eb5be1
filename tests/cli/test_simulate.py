"""``gruppetto simulate``: its keys, its table, its mistakes, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gruppetto.cli import _run
from gruppetto.delays import DELAYS, KeyedDelays
from gruppetto.protocols import PROTOCOLS
from gruppetto.runs.simulate import simulate_all
from gruppetto.theory.timing import simulate, simulate_counting, update_blocks

#: Keys that scripts rely on.
KEYS = {"protocol", "learners", "updates", "mean_update_time", "total_time", "mean_staleness",
        "p95_staleness", "max_staleness", "fresh_fraction", "mini_batches_applied",
        "mini_batches_cancelled", "idle_fraction", "expected_update_time", "expected_is",
        "report", "png", "cell", "k", "expected_why", "staleness_histogram",
        "cancelled_time_fraction"}  # fmt: skip
BASIC = ("simulate", "--updates", "200")


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert _run([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_one_pair_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--protocol", "k-async:k=4", "--learners", "8", "--delay", "exponential:mean=1",
             "--delay", "3=constant:value=2", "--seed", "5")  # fmt: skip
    found = as_json(capsys, *BASIC, *words)
    assert found.keys() >= KEYS
    own = {3: DELAYS.parse("constant:value=2")}
    delays = KeyedDelays(5, DELAYS.parse("exponential:mean=1"), own, 8)
    timing = simulate(PROTOCOLS.parse("k-async:k=4"), delays, 8, 200)
    for key, value in vars(timing).items():
        assert found[key] == value
    assert (found["protocol"], found["learners"], found["report"]) == ("k-async:k=4", 8, None)
    assert found["delays"] == {"3": "constant:value=2.0"}


@pytest.mark.parametrize(
    ("protocol", "delay", "seconds", "kind"),
    [
        ("k-batch-async:k=4", "exponential:mean=1", 0.5, "exact"),
        ("k-async:k=2", "gamma:shape=2,scale=1", None, "upper-bound"),
        ("k-async:k=2", "pareto:shape=2,scale=1", None, "unknown"),
    ],
)
def test_what_theory_expects_stands_beside(
    capsys: pytest.CaptureFixture[str], protocol: str, delay: str, seconds: float, kind: str
) -> None:
    words = ("--protocol", protocol, "--delay", delay, "--learners", "8")
    found = as_json(capsys, "simulate", "--updates", "5000", *words)
    assert found["expected_is"] == kind
    if kind == "exact":
        assert found["expected_update_time"] == pytest.approx(seconds)
        assert found["mean_update_time"] == pytest.approx(seconds, rel=0.02)
    elif kind == "upper-bound":
        assert found["mean_update_time"] < found["expected_update_time"]
    else:
        assert found["expected_update_time"] is None


def test_several_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*BASIC, "--protocol", "hardsync", "--protocol", "async", "--learners", "2",
             "--learners", "3", "--delay", "pareto:shape=2,scale=1")  # fmt: skip
    runs = as_json(capsys, *words)["runs"]
    assert [(run["protocol"], run["learners"]) for run in runs] == [
        ("hardsync", 2), ("hardsync", 3), ("async", 2), ("async", 3),
    ]  # fmt: skip
    assert _run([*words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "s per update" in lines[0] and "…" not in "".join(lines)


def test_repeats_take_the_next_seeds_and_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*BASIC, "--delay", "exponential:mean=1", "--protocol", "async")
    times = [as_json(capsys, *words, "--seed", str(s))["mean_update_time"] for s in (7, 8, 9)]
    found = as_json(capsys, *words, "--seed", "7", "--repeats", "3")
    assert found["mean_update_time"] == sorted(times)[1]
    assert found["update_time_range"] == [min(times), max(times)]
    assert type(found["max_staleness"]) is int


CASES = [
    (("--protocol", "k-asink:k=1"), "unknown protocol 'k-asink'"),
    (("--protocol", "k-async:k=5"), "waits for 5 distinct learners of 4"),
    (("--learners", "0"), "learners: expected at least 1, got 0"),
    (("--updates", "0"), "updates: expected at least 1, got 0"),
    (("--updates", "many"), "'many' is not a valid integer"),
    (("--sweep", "p"), "'p' is not 'k'"),
    (("--report", "."), "report: expected a file, got the folder ."),
    (("--png", "."), "png: expected a file, got the folder ."),
    (("--repeats", "0"), "repeats: expected at least 1, got 0"),
    (("--delay", "gauss:mean=1"), "unknown delay 'gauss'"),
    (("--delay", "4=constant:value=1"), "learner 4; expected a learner from 0 to 3"),
    (("--delay", "constant:value=1", "--delay", "constant:value=2"), "one law for all"),
    (("--learners", "8", "--learners", "2", "--protocol", "backup:b=3"), "no learner to wait for"),
]


@pytest.mark.parametrize(("words", "message"), CASES, ids=lambda x: str(x)[:40])
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert _run(["simulate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("protocol", ["async", "k-async:k=3", "k-batch-sync:k=2"])
def test_every_contribution_is_in_the_histogram(protocol: str, compiled: bool) -> None:
    pair = PROTOCOLS.parse(protocol), KeyedDelays(3, DELAYS.parse("pareto:shape=2,scale=1"), {}, 6)
    timing, counts = simulate_counting(*pair, 6, 3000, compiled=compiled)
    assert timing == simulate(*pair, 6, 3000, compiled=not compiled)
    blocks = list(update_blocks(*pair, 6, 3000))
    ages = [block.staleness for block in blocks if block.staleness is not None]
    if not ages:
        assert counts.tolist() == [timing.mini_batches_applied]
        return
    bound = 20 * 6 // pair[0].num_to_wait(6) + 1
    every = np.minimum(np.concatenate(ages).reshape(-1), bound)
    assert counts.tolist() == np.bincount(every).tolist()
    assert len(counts) == min(timing.max_staleness, bound) + 1


def test_the_histogram_of_repeats_is_of_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--protocol", "async", "--delay", "exponential:mean=1", "--repeats", "3")
    found = as_json(capsys, *BASIC, *words)
    assert sum(found["staleness_histogram"]) == 3 * found["mini_batches_applied"]


def test_a_sweep_has_the_four_cells_and_what_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    runs = as_json(capsys, *BASIC, "--sweep", "k", "--learners", "3")["runs"]
    cells = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")
    assert [run["protocol"] for run in runs] == [f"{c}:k={k}" for c in cells for k in (1, 2, 3)]
    assert [(run["cell"], run["k"]) for run in runs] == [(c, k) for c in cells for k in (1, 2, 3)]
    words = (
        "--sweep",
        "k",
        "--learners",
        "1",
        "--protocol",
        "hardsync",
        "--protocol",
        "k-sync:k=1",
    )
    runs = as_json(capsys, *BASIC, *words)["runs"]
    assert [run["protocol"] for run in runs] == ["hardsync", *(f"{c}:k=1" for c in cells)]


@pytest.mark.parametrize(
    ("protocol", "delay", "share"),
    [
        ("k-sync:k=3", "exponential:mean=1", 0.25),
        ("async", "exponential:mean=1", 0.0),
        # Who is not first has computed as long as who is.
        ("k-batch-sync:k=1", "pareto:shape=2,scale=1", 0.75),
        # All end at once and two of four are used; then six of eight.
        ("k-batch-sync:k=2", "constant:value=1", 0.5),
        ("k-batch-sync:k=6", "constant:value=1", 0.25),
        ("k-batch-sync:k=64", "constant:value=0", 0.0),
    ],
)
def test_time_that_is_cancelled(
    capsys: pytest.CaptureFixture[str], protocol: str, delay: str, share: float
) -> None:
    words = ("--protocol", protocol, "--delay", delay)
    assert as_json(capsys, *BASIC, *words)["cancelled_time_fraction"] == pytest.approx(share)


def test_page_and_picture_are_the_same_every_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--protocol", "hardsync", "--delay", "exponential:mean=1", "--repeats", "2")
    files = ("--report", "new/page.html", "--png", "new/picture.png")
    found = as_json(capsys, *BASIC, *words, *files)
    assert (found["report"], found["png"]) == ("new/page.html", "new/picture.png")
    page, picture = (tmp_path / name for name in (found["report"], found["png"]))
    first = page.read_bytes(), picture.read_bytes()
    assert b"\x89PNG" in first[1][:8]
    command = (
        "gruppetto simulate --protocol hardsync --learners 4 --delay exponential:mean=1 "
        "--updates 200 --seed 0 --repeats 2 --report page.html"
    )
    assert f"<code>{command}</code>" in first[0].decode()
    assert _run([*BASIC, *words, *files]) == 0
    out = capsys.readouterr().out
    assert out.endswith("report: new/page.html\npicture: new/picture.png\n")
    assert (page.read_bytes(), picture.read_bytes()) == first
    several = as_json(capsys, *BASIC, "--protocol", "async", "--protocol", "hardsync", *files[:2])
    assert (several["report"], several["png"]) == ("new/page.html", None)


def test_long_ones_show_how_far_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_all(["hardsync"], [4], updates=300_000, progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "100 %" in captured.err and "300000 updates" in captured.err


#: Says when the simulation has begun, and whether torch was needed.
CODE = """
import sys
from gruppetto.cli import _run
from gruppetto.runs.progress import Progress

def advance(self, *news):
    if not hasattr(self, "told"):
        self.told = print("going", file=sys.stderr, flush=True)

Progress.advance = advance
code = _run(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_does_not_wait_for_torch() -> None:
    out, err = start(*BASIC, "--json").communicate(timeout=60)
    assert json.loads(out)["updates"] == 200 and err == "going\nFalse\n"


@pytest.mark.parametrize("protocol", ["k-sync:k=32", "k-batch-sync:k=32"])
def test_ctrl_c_ends_it_with_one_line(protocol: str) -> None:
    words = ("--learners", "64", "--updates", "1000000000", "--json", "--protocol", protocol)
    process = start("simulate", *words)
    assert process.stderr is not None and process.stderr.readline() == "going\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out) == {"run": None, "interrupted": True}
    assert err.split("\n") == ["", "gruppetto: interrupted", "False", ""]
