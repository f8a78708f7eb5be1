"""The benchmark of decoupled backpropagation: turns, rows and verdicts, not anybody's speed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time

import decoupled_peers
import psutil
import pytest
from decoupled_contenders import Block, Contender, Lane, Workers, cores, rounds
from decoupled_ours import Run, predicted_period
from hypothesis import given
from hypothesis import strategies as st

from counting_worker import counting
from gruppetto.trace import ModuleRow
from test_benchmarks import load

PLACE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


class Scripted(Contender):
    """Takes as long per mini-batch as it is told, and writes down what is done to it."""

    def __init__(self, name: str, seconds: list[float], diary: list[str]) -> None:
        super().__init__(name)
        self._seconds, self._diary = iter(seconds), diary

    def start(self) -> None:
        self._diary.append(f"{self.name} starts")

    def run_block(self, num_mini_batches: int) -> Block:
        self._diary.append(f"{self.name} runs {num_mini_batches}")
        return Block(next(self._seconds), 0.0)

    def stop(self) -> None:
        self._diary.append(f"{self.name} stops")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_the_cut_is_the_best_there_is(times: list[int], num_modules: int) -> None:
    if num_modules > len(times):
        return
    seconds = [float(time) for time in times]

    def slowest(cuts: tuple[int, ...] | list[int]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise([0, *cuts, len(seconds)]))

    found = decoupled_peers.cut(seconds, num_modules)
    possible = list(itertools.combinations(range(1, len(seconds)), num_modules - 1))
    assert tuple(found) in possible
    assert slowest(found) == min(map(slowest, possible))


def test_contenders_take_turns_and_each_begins_a_round_once() -> None:
    diary: list[str] = []
    pair = [Scripted(name, [9.0, 1.0, 2.0], diary) for name in ("a", "b")]
    told: list[str] = []
    found = rounds(pair, 2, 4, told.append)
    assert diary == [
        "a starts", "a runs 2", "b starts", "b runs 2",
        "a runs 4", "b runs 4", "b runs 4", "a runs 4", "a stops", "b stops",
    ]  # fmt: skip
    assert {name: [b.seconds for b in blocks] for name, blocks in found.items()} == {
        "a": [1.0, 2.0], "b": [1.0, 2.0],
    }  # fmt: skip
    assert len(told) == 2


def test_everybody_is_stopped_when_one_fails() -> None:
    diary: list[str] = []
    with pytest.raises(StopIteration):
        rounds([Scripted("a", [1.0], diary), Scripted("b", [], diary)], 2, 4, print)
    assert diary[-2:] == ["a stops", "b stops"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_workers_have_their_cores_and_rest_in_between() -> None:
    workers = Workers(counting, (5,), [{PLACE}, {PLACE}])
    lane = Lane("count", workers)
    try:
        lane.start()
        block = lane.run_block(4)
        assert block.seconds == (21.0 - 10.0) / 4
        assert [passes[0] for passes in block.passes] == [
            ("count", 5, 4, {PLACE}), ("count", 6, 4, {PLACE}),
        ]  # fmt: skip
        processes = [psutil.Process(process.pid) for process in workers._processes]
        assert {process.status() for process in processes} == {psutil.STATUS_STOPPED}
        with pytest.raises(RuntimeError, match=r"process \d has ended"):  # whichever is seen first
            workers.run("end", 1)
    finally:
        lane.stop()
    assert not any(process.is_running() for process in processes)
    with pytest.raises(RuntimeError, match=r"(?s)process \d failed.*no such start"):
        Workers(counting, (-1,), [{PLACE}]).start()


def test_a_turn_of_a_run_counts_no_mini_batch_that_a_stop_fell_into() -> None:
    now = time.perf_counter()
    run = Run("ddg", "ddg:modules=2", 8, 16, [2], [{0}, {1}], "")
    run._pipe, told = multiprocessing.Pipe(duplex=False)
    run._process = multiprocessing.current_process()
    # It began 100 s ago, and was stopped from 10 s ago until now.
    run._offset, run._stopped = now - 100.0, now - 10.0
    for version, ended in enumerate((89.5, 89.9, 100.1, 100.4, 100.6, 100.9)):
        for module in (1, 2):
            row = ModuleRow(module, version, ended, 0, 0.0, module, 2.0, version, 0.0, 0.0, 0.0, 1)
            told.send((now + 0.5, row))
    block = run.run_block(2)
    assert block.seconds == pytest.approx((100.6 - 100.1) / 2)
    assert block.passes == [[(1, 2.0, 3), (1, 2.0, 4)], [(2, 2.0, 3)]]
    told.close()
    run._pipe.recv(), run._pipe.recv(), run._pipe.recv()
    with pytest.raises(RuntimeError, match="'ddg' has ended"):
        run._hear()
    run._pipe.close()


def test_too_few_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert cores(1) == [3]
    with pytest.raises(SystemExit, match="each of 2 modules, got 1"):
        cores(2)


@pytest.mark.parametrize(
    ("method", "speedup"),
    [("bp:modules=3", 1.0), ("ddg:modules=3", 3.0), ("ddg:modules=3,schedule=barrier", 1.8)],
)
def test_predictions_of_equal_modules(method: str, speedup: float) -> None:
    assert 9.0 / predicted_period(method, [(1.0, 2.0)] * 3) == pytest.approx(speedup)


def test_rows_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("decoupled", monkeypatch)
    passes = [[(1.0, 1.9, 0.1)] * 4, [(2.0, 3.0, 1.0)] * 4]
    seconds = {
        "bp": [9.0, 9.2, 9.4], "ddg": [6.0, 4.6, 5.0], "ddg barrier": [6.0, 6.3, 6.6],
        "1F1B/2": [7.0, 7.0, 7.0], "1F1B/4": [6.5, 6.9, 7.5], "GPipe/2": [8.0, 8.0, 8.0],
    }  # fmt: skip
    found = {name: [Block(s, 2 * s, passes) for s in of] for name, of in seconds.items()}
    speed = {row["contender"]: row for row in bench.speed("t", found)}
    assert speed["ddg"]["ratio"] == pytest.approx(1.88)
    assert (speed["ddg"]["best"], speed["ddg"]["worst"]) == pytest.approx((2.0, 1.5))
    assert speed["bp"]["s_per_mini_batch"] == 9.2
    over = {row["ddg_over"]: row["median"] for row in bench.verdicts("t", found)}
    assert over == pytest.approx({"bp": 1.88, "1F1B/4": 1.5, "GPipe/2": 1.6})
    barrier, free = bench.model("t", found)
    names = ("T_F", "T_B", "formula_s", "schedule_s", "measured_s", "measured_over_formula")
    assert [barrier[n] for n in names] == pytest.approx([3.0, 6.0, 6.0, 7.0, 6.3, 1.05])
    assert [free[n] for n in names] == pytest.approx([3.0, 6.0, 4.5, 6.0, 5.0, 5.0 / 4.5])
    rows = bench.predictions("t", [(1.0, 2.0)] * 12)
    assert [(row["K"], row["cuts"]) for row in rows] == [(2, [6]), (3, [4, 8]), (4, [3, 6, 9])]
    assert [row["barrier"] for row in rows] == pytest.approx([1.5, 1.8, 2.0])
