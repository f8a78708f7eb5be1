"""A module's line to the caller: nobody who computes waits for whoever listens."""

from __future__ import annotations

import os
import select
from pathlib import Path

import msgspec
import pytest
import torch

from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.engines.decoupled.line import (
    Ended,
    Handed,
    Happened,
    Line,
    Ready,
    read_snapshot,
    receive_told,
)
from gruppetto.engines.decoupled.peak import PeakMemory
from gruppetto.engines.local.wire import is_readable, pair, send_json
from gruppetto.protocols.messages import ModuleUpdated
from gruppetto.trace.rows import encode_message


def happened(version: int, traceback: str = "") -> Happened:
    event = msgspec.Raw(encode_message(ModuleUpdated(2, version)))
    return Happened([("ModuleUpdated", event, version / 8)], None, traceback)


def test_what_nobody_reads_waits_and_comes_in_order() -> None:
    """More than a socket holds, a snapshot amid it; nothing is lost and telling never waits."""
    ours, theirs = pair()
    total = 2000
    with ours, theirs:
        line = Line(theirs)
        snapshot = Snapshot(2, 7, {"parameter/w": torch.arange(5.0)}, {"flights": {}})
        for version in range(total):
            line.tell(happened(version))
            if version == total // 2:
                line.hand_in(snapshot)
        assert line._waiting, "the socket is full"
        got = []
        while len(got) < total:
            if not is_readable(ours, 0.0):
                line.wait(())  # there is room now
            told, descriptor = receive_told(ours)
            if isinstance(told, Handed):
                assert len(got) == total // 2 + 1
                read = read_snapshot(descriptor)
                assert (read.module, read.version, read.plain) == (2, 7, snapshot.plain)
                assert read.tensors["parameter/w"].equal(torch.arange(5.0))
                continue
            assert isinstance(told, Happened)
            got.append(told)
        times = [told.events[0][2] for told in got]
        assert times == [version / 8 for version in range(total)]
        assert got[-1] == happened(total - 1)
        line.empty()


def test_every_message_survives() -> None:
    ours, theirs = pair()
    with ours, theirs:
        line = Line(theirs)
        for told in (Ready(), happened(3), Ended("epochs", 4, 100, None)):
            line.tell(told)
            assert receive_told(ours) == (told, -1)
        line.tell(happened(3, traceback="x" * 100_000 + "end"))
        told, _ = receive_told(ours)
        assert isinstance(told, Happened)
        assert told.traceback.endswith("xend"), "its end says most"


def test_what_the_caller_says_is_heard_while_waiting_for_something_else() -> None:
    ours, theirs = pair()
    event = os.eventfd(0, os.EFD_NONBLOCK)
    with ours, theirs:
        line = Line(theirs)
        line.wait((event,), 0.0)
        assert line.start is line.stop_reason is None
        send_json(ours, {"start": 12.5, "time": 3.0}, [])
        line.wait((event,))
        assert line.start == (12.5, 3.0)
        for reason in ("target", "interrupted"):
            send_json(ours, {"stop": reason}, [])
            line.wait((event,))
        assert line.stop_reason == "target", "the first one holds"
        os.eventfd_write(event, 1)
        line.wait((event,))  # returns, though nothing is said
    os.close(event)


@pytest.mark.parametrize("is_telling", [False, True])
def test_without_a_caller_a_module_ends(is_telling: bool) -> None:
    ours, theirs = pair()
    with theirs:
        line = Line(theirs)
        ours.close()
        with pytest.raises(SystemExit):
            line.tell(Ready()) if is_telling else line.wait(())
        assert not select.select([theirs], [], [], 0.0)[1]


def test_peak_memory_is_what_was_taken_meanwhile() -> None:
    """Above what there was at the start, though it is given back before the end."""
    path = Path("/proc/self/clear_refs")
    if not os.access(path, os.W_OK):
        pytest.skip("this system does not let a process reset its peak")
    before = torch.zeros(4_000_000)
    peak = PeakMemory(torch.device("cpu"))
    taken = torch.ones(16_000_000)
    del taken
    seen = peak.read()
    assert seen is not None
    assert 60_000_000 < seen < 90_000_000
    assert before.sum() == 0.0
