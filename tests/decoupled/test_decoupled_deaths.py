"""Processes of a decoupled run die, in every way: nobody hangs, one sentence says why, what was
saved can be gone on from, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import decoupled_tasks
import pytest
from local_processes import children_named, descendants, is_alive, wait_until

import gruppetto as gp
from gruppetto.engines.local.forkserver import ForkServer
from gruppetto.errors import Diverged, RunFailed
from gruppetto.protocols.messages import PassFailed
from gruppetto.runs.execute import Run
from gruppetto.trace import EventRow, Row, UpdateRow, read_trace


def train(out: Path, task: str, decouple: str = "ddg:modules=3", **settings: Any) -> Run:
    """Three modules with processes of their own, no evaluation."""
    chosen: dict[str, Any] = {
        "engine": "local",
        "decouple": decouple,
        "cuts": decoupled_tasks.CUTS,
        "evaluate": "off",
        "progress": False,
        **settings,
    }
    return gp.train(task, out=out, **chosen)


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def open_files() -> Counter[str]:
    """What this process has open, by kind."""
    kinds: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing itself
            kinds[os.readlink(path).split(":")[0].split("[")[0]] += 1
    return kinds


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The fork server alone is, to be used by the next run; no file, no memory with a name."""
    ForkServer.shared("gruppetto.runs.local.roles:get_ready")
    before, shared = open_files(), set(os.listdir("/dev/shm"))
    # Another test may have left Python's own resource tracker.
    others = descendants(os.getpid())
    yield
    server = ForkServer._current
    assert server is not None
    wait_until(lambda: descendants(os.getpid()) <= others | {server._process.pid})
    assert set(os.listdir("/dev/shm")) <= shared
    after = open_files()
    for kind in ("/memfd", "socket", "pipe", "anon_inode"):
        assert after[kind] <= before[kind], kind


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sigkill", "was killed by SIGKILL"),
        ("exit", "ended with exit code 0"),
        ("sys-exit", "ended with exit code 3"),
    ],
)
def test_a_module_that_dies_ends_the_run(tmp_path: Path, how: str, said: str, capfd: Any) -> None:
    out = tmp_path / "out"
    with pytest.raises(RunFailed) as caught:
        train(out, decoupled_tasks.name("fails", how=how, at=40))
    text = one_sentence(caught.value)
    assert text.startswith("module 2 of 3 (process ")
    assert f"{said}; the run in {out} can be resumed from its last checkpoint" in text
    assert caught.value.result == {"run": str(out), "stopped_by": "failed"}
    assert "Traceback" not in capfd.readouterr().err
    assert read_trace(out / "trace").end is None


LONG = decoupled_tasks.name("blocks", epochs=30)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a run comes to that nothing happens to, in virtual time."""
    results: dict[str, dict[str, Any]] = {}

    def result_of(decouple: str) -> dict[str, Any]:
        if decouple not in results:
            out = tmp_path_factory.mktemp("whole") / "out"
            results[decouple] = train(out, LONG, decouple, engine="virtual").result
        return results[decouple]

    return result_of


def check_goes_on(out: Path, expected: dict[str, Any]) -> None:
    """Resumed, it is the run that nothing happened to."""
    rest = gp.resume(out, progress=False)
    for key in ("weights_sha256", "state_sha256", "updates", "stopped_by"):
        assert rest.result[key] == expected[key], key


class Kill:
    """Kills a process by its name at the first row after something is true."""

    def __init__(self, name: str, when: Callable[[], bool] = lambda: True) -> None:
        self.name = name
        self.when = when
        self.is_done = False

    def __call__(self, row: Row) -> None:
        if not self.is_done and isinstance(row, EventRow) and self.when():
            self.is_done = True
            (pid,) = children_named(os.getpid(), self.name)
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("module", [1, 2, 3])
def test_whichever_dies_the_run_goes_on_as_if_it_had_not(
    tmp_path: Path, module: int, whole: Callable[[str], dict[str, Any]]
) -> None:
    out = tmp_path / "out"
    kill = Kill(f"gp module {module}", lambda: bool(list(out.glob("checkpoint-*.safetensors"))))
    with pytest.raises(RunFailed) as caught:
        train(out, LONG, on_event=kill)
    assert f"module {module} of 3" in one_sentence(caught.value)
    check_goes_on(out, whole("ddg:modules=3"))


def test_the_template_dies_and_all_with_it(tmp_path: Path) -> None:
    task = decoupled_tasks.name("blocks", epochs=60)
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "out", task, on_event=Kill("gp template"))
    one_sentence(caught.value)
    assert caught.value.result["run"] == str(tmp_path / "out")


def test_numbers_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(Diverged) as caught:
        train(tmp_path / "out", decoupled_tasks.name("fails", how="nan", at=9))
    text = one_sentence(caught.value)
    assert "mini-batch 8 in module 3 was not finite" in text
    assert caught.value.result["stopped_by"] == "diverged"
    trace = read_trace(tmp_path / "out" / "trace")
    assert trace.end is not None
    assert trace.events[-1].decode() == PassFailed(3, 8, "not finite")
    assert not trace.failures


def test_an_exception_is_told_with_its_traceback(tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "out", decoupled_tasks.name("fails", how="raise", at=9))
    text = one_sentence(caught.value)
    assert "mini-batch 8 in module 2 failed" in text
    assert "ValueError: this is damaged" in text
    (failure,) = read_trace(tmp_path / "out" / "trace").failures
    assert "in spring" in failure.traceback
    assert failure.traceback.rstrip().endswith("ValueError: this is damaged")
    assert (failure.learner, failure.mini_batch) == (2, 8)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "decouple", ["ddg:modules=3", "fdg:modules=3,schedule=barrier", "fr:modules=3", "bp:modules=3"]
)
def test_ctrl_c_stops_at_a_version_and_the_rest_is_as_if_it_had_not(
    tmp_path: Path, decouple: str, whole: Callable[[str], dict[str, Any]]
) -> None:
    def interrupt(row: Row) -> None:
        if isinstance(row, UpdateRow) and row.version == 5:
            os.kill(os.getpid(), signal.SIGINT)

    part = train(tmp_path / "out", LONG, decouple, on_event=interrupt)
    assert part.result["stopped_by"] == "interrupted"
    assert 5 <= part.result["updates"] < whole(decouple)["updates"]
    check_goes_on(tmp_path / "out", whole(decouple))


def test_a_limit_of_time_stops_it(tmp_path: Path) -> None:
    task = decoupled_tasks.name("blocks", epochs=3000)
    run = train(tmp_path / "out", task, max_time=0.3)
    assert run.result["stopped_by"] == "max-time"
    assert run.result["time"] >= 0.3
    assert 0 < run.result["updates"] < 3000 * decoupled_tasks.PER_EPOCH


def test_when_the_caller_is_killed_all_end(tmp_path: Path) -> None:
    task = decoupled_tasks.name("blocks", epochs=100_000)
    words = ["train", task, "--decouple", "ddg:modules=3", "--evaluate", "off"]
    out = tmp_path / "out"
    caller = subprocess.Popen(
        [sys.executable, "-m", "gruppetto", *words, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: list(out.glob("checkpoint-*.safetensors")) or caller.poll() is not None)
        below = descendants(caller.pid)
        assert len([p for p in below if is_alive(p)]) == 5, "fork server, template, modules"
    finally:
        caller.kill()
        caller.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in below))
