"""What a learner process says of an order: by the clock, without processes and without sleeping."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gruppetto.engines.local.learner import _answer
from gruppetto.engines.local.wire import Answer, Kind, Order, Spent, pack_cancel, pair

#: Seconds; nothing here takes so long.
LONG = 300.0


class Nothing:
    """Memory, a reader and a learner that do nothing."""

    waited = 0.0

    def version(self, block: int) -> None: ...

    def gradient(self, block: int) -> None: ...

    def expect(self, mini_batch: int, following: int) -> None: ...

    def compute(self, mini_batch: int, weights: None, space: None) -> Any:
        return SimpleNamespace(loss=0.5, num_samples=4)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The server's, the learner's."""
    server, learner = pair()
    with server, learner:
        yield server, learner


def answer(channel: socket.socket, delay: float, since: float, free: float) -> tuple[Answer, float]:
    nothing: Any = Nothing()
    order = Order(7, 3, -1, 2, 0, 0, delay, since)
    return _answer(channel, nothing, nothing, nothing, order, free)


def test_a_delay_runs_from_when_the_order_was_given(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """This order was under way for longer than its delay: nothing is left to sleep."""
    now = time.perf_counter()
    since, free = now - 2 * LONG, now - 3 * LONG
    said, free_again = answer(ends[1], LONG, since, free)
    assert said.kind is Kind.PUSHED
    assert said.spent.waiting == LONG
    assert 2 * LONG <= said.spent.delay < 3 * LONG
    assert said.spent.loading == 0.0
    # The spans follow one another without a gap.
    assert free + sum(said.spent) == pytest.approx(free_again, abs=1e-6)
    assert now <= free_again <= time.perf_counter()


def test_a_delay_does_not_run_while_the_learner_computes(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The order was given while a cancelled mini-batch was being computed."""
    free = time.perf_counter() - 2 * LONG
    said, _ = answer(ends[1], LONG, free - LONG, free)
    assert said.spent.waiting == 0.0
    assert 2 * LONG <= said.spent.delay < 3 * LONG


def test_without_a_delay_the_way_of_the_order_is_waiting(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    now = time.perf_counter()
    said, _ = answer(ends[1], 0.0, now - LONG, now - 2 * LONG)
    assert 2 * LONG <= said.spent.waiting < 3 * LONG
    assert 0.0 <= said.spent.delay < LONG


def test_a_sleeper_is_free_from_the_cancel_on(ends: tuple[socket.socket, socket.socket]) -> None:
    """However late it hears of it."""
    now = time.perf_counter()
    ends[0].send(pack_cancel(7, now - 1.0))
    said, free = answer(ends[1], LONG, now - 3.0, now - 4.0)
    assert said.kind is Kind.CANCELLED
    assert said.spent == Spent(1.0, 2.0, 0.0, 0.0)
    assert free == now - 1.0


def test_a_cancel_from_before_the_order_began_leaves_nothing_of_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The order was given, and cancelled, while the learner computed another."""
    now = time.perf_counter()
    ends[0].send(pack_cancel(7, now - 2.0))
    said, free = answer(ends[1], LONG, now - 3.0, now - 1.0)
    assert said.kind is Kind.CANCELLED
    assert said.spent == Spent(0.0, 0.0, 0.0, 0.0)
    assert free == now - 1.0
