"""What a module takes: counted from its shapes, and seen from outside in its process."""

from __future__ import annotations

import os
from pathlib import Path

import decoupled_tasks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gruppetto as gp
from gruppetto.decoupled.memory import ForwardCount, StageBytes, gaps, process_bytes

MIB = 1 << 20
SAMPLES, WIDTH = 128, 4096
#: Of one tensor between two layers.
TENSOR = SAMPLES * WIDTH * 4


def count(stage: nn.Module, x: Tensor) -> ForwardCount:
    found = ForwardCount(stage.parameters(), [x])
    with found:
        y = stage(x)
    found.keep(y)
    return found


@pytest.mark.parametrize("inplace", [False, True])
def test_a_pass_keeps_what_is_saved_and_what_goes_in_and_out(inplace: bool) -> None:
    last = nn.Linear(WIDTH, WIDTH // 8, bias=False)
    stage = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(inplace), nn.Flatten(), last)
    found = count(stage, torch.ones(SAMPLES, 8, requires_grad=True))
    assert found.graph == SAMPLES * 8 * 4 + TENSOR + TENSOR // 8
    assert found.largest == TENSOR
    # What the first layer gives is free once it has been rectified, and the last one's fits there.
    assert found.gaps == (0 if inplace else TENSOR - TENSOR // 8)


def test_outputs_that_are_saved_too_count_once() -> None:
    x = torch.ones(SAMPLES, WIDTH)
    assert count(nn.Tanh(), x).graph == 2 * TENSOR
    assert count(nn.Identity(), x).graph == TENSOR


sizes = st.integers(0, 1 << 26)


@given(st.lists(st.tuples(sizes, st.booleans())))
def test_gaps_are_parts_of_what_was_freed(made: list[tuple[int, bool]]) -> None:
    freed = sum(size for size, is_kept in made if not is_kept)
    assert 0 <= gaps(made) <= freed
    kept = sum(size for size, is_kept in made if is_kept)
    # Whatever is kept was placed somewhere: beside the gaps, or in them.
    assert gaps([*made, (1 << 17, True)]) in (gaps(made), gaps(made) - (1 << 17))
    assert gaps((size, True) for size, _ in made) == 0 <= kept


@pytest.mark.parametrize("keeps", ["graph-on-copy", "graph-on-live", "input"])
def test_a_delay_takes_what_the_method_keeps_for_it(keeps: str) -> None:
    taken = StageBytes(graph=1000, gaps=100, largest=10, inputs=50, outputs=20, weights=3)

    def more(delay: int) -> int:
        """Than one less."""
        both = (process_bytes(taken, keeps, d, 1, leaves_gaps=True) for d in (delay, delay - 1))
        return next(both) - next(both)

    each = 50 if keeps == "input" else 1000 + 100 + 3
    assert {more(delay) for delay in (2, 3, 4)} == {each}


def test_processes_take_two_graphs_and_no_more_however_long_they_run(tmp_path: Path) -> None:
    """Of 14 MiB each; if one outlived its backward pass every time, there were 20 in the end."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not let a process reset its peak")
    first, last = gp.train(
        decoupled_tasks.name("wide"),
        decouple="ddg:modules=2",
        cuts=["8"],
        engine="local",
        evaluate="off",
        out=tmp_path,
        progress=False,
    ).result["per_module"]
    for each, graphs in ((first, 2), (last, 1)):
        in_flight = graphs * 7 * TENSOR
        assert in_flight < each["predicted_bytes"] < in_flight + 30 * MIB
        assert in_flight < each["peak_bytes"] < in_flight + 60 * MIB
