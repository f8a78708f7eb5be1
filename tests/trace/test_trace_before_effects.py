"""A row is written before its effect: whatever fails while writing, the trace is not behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gruppetto as gp
from gruppetto.testing import reference
from gruppetto.trace import EventRow, Row, TraceWriter, UpdateRow, follow_rows, read_trace
from gruppetto.training.server import Server


class Full(Exception):
    """No space left on the device."""


@pytest.mark.parametrize("protocol", ["k-sync:k=2", "k-async:k=2", "async"])
def test_what_cannot_be_written_is_not_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """The writer fails on the n-th event row: no update of that row or a later one was taken."""
    original, apply = TraceWriter.write, Server.apply
    taken: list[int] = []

    def counted(server: Server, *args: Any) -> None:
        taken.append(1)
        apply(server, *args)

    monkeypatch.setattr(Server, "apply", counted)

    def train(out: Path) -> None:
        gp.train(
            reference(),
            protocol=protocol,
            learners=3,
            epochs=1,
            out=out,
            progress=False,
            engine="virtual",
        )

    train(tmp_path / "whole")
    events, fires = 0, []
    for row in follow_rows(tmp_path / "whole" / "trace"):
        if isinstance(row, EventRow):
            events += 1
        elif isinstance(row, UpdateRow):
            fires.append(events - 1)
    for number in range(events):
        taken.clear()

        def failing(writer: TraceWriter, row: Row, number: int = number, **how: Any) -> None:
            if isinstance(row, EventRow) and row.row == number:
                raise Full
            original(writer, row, **how)

        monkeypatch.setattr(TraceWriter, "write", failing)
        out = tmp_path / str(number)
        with pytest.raises(Full):
            train(out)
        assert len(taken) == sum(fire < number for fire in fires)
        assert len(read_trace(out / "trace").events) == number


class Gone(BaseException):
    """Kill -9 in the middle of a run."""


def test_a_killed_run_keeps_the_derived_rows_of_what_its_checkpoint_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any event row after an epoch and resumed, no update's row is missing."""

    def train(out: Path) -> None:
        settings: dict[str, Any] = {"evaluate": "off", "delay": "exponential:mean=1.0"}
        gp.train(
            reference(),
            learners=3,
            protocol="async",
            out=out,
            progress=False,
            **settings,
            engine="virtual",
        )

    train(tmp_path / "whole")
    expected = read_trace(tmp_path / "whole" / "trace")
    epoch = next(i for i, row in enumerate(expected.updates) if row.epoch >= 1.0)
    original = TraceWriter.write
    for number in range(3 + epoch + 1, len(expected.events)):

        def killed(writer: TraceWriter, row: Row, number: int = number, **how: Any) -> None:
            if isinstance(row, EventRow) and row.row == number:
                raise Gone
            original(writer, row, **how)

        out = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(TraceWriter, "write", killed)
            patch.setattr(TraceWriter, "close", lambda writer: None)
            with pytest.raises(Gone):
                train(out)
        gp.resume(out, progress=False)
        trace = read_trace(out / "trace")
        assert trace.updates == expected.updates, f"killed at event row {number}"
