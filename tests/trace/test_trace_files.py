"""Traces on disk: readable after any crash, honest about damage, void rows left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import TraceError
from gruppetto.protocols.messages import (
    EVENTS,
    ApplyUpdate,
    BackwardFinished,
    Cancel,
    Compute,
    Contribution,
    Discard,
    Event,
    Finish,
    ForwardFinished,
    GradientFailed,
    GradientPushed,
    LearnerJoined,
    LearnerLost,
    ModuleUpdated,
    PassFailed,
    ProgressMeasured,
    StopRequested,
)
from gruppetto.trace import (
    EndRow,
    EvaluationRow,
    EventRow,
    FailureRow,
    MessageDigest,
    ModuleRow,
    Row,
    SegmentRow,
    TraceWriter,
    UpdateRow,
    encode_message,
    follow_rows,
    read_trace,
)
from gruppetto.trace.rows import FORMAT, decode_row, encode_row


def event_row(row: int, event: Event | None = None, time: float = 0.0, wall: float = 0.0) -> Row:
    """An event row; of a learner's arrival unless told otherwise."""
    event = LearnerJoined(row) if event is None else event
    raw = msgspec.Raw(encode_message(event))
    return EventRow(row, time, wall, type(event).__name__, raw, "0" * 16)


def update_row(version: int) -> UpdateRow:
    """An update of one gradient."""
    return UpdateRow(version, 1.5, 8, 0.5, 0.1, [0], [8], [1.0], [2], [0.7], version, 0, 0, 0)


def write(folder: Path, rows: list[Row], after: int | None = None) -> Path:
    """One more segment; its file."""
    writer = TraceWriter(folder, continues_after=after)
    for row in rows:
        writer.write(row)
    writer.close()
    return writer.path


def numbers(folder: Path) -> list[int]:
    """The numbers of the event rows that hold."""
    return [row.row for row in read_trace(folder).events]


WHOLE: list[Row] = [
    *(event_row(n) for n in range(3)),
    ModuleRow(2, 0, 1.5, 0, 0.0, 0.25, 0.5, 0.125, 0.1, 0.0, 0.3, 1, 0.1, 0.5),
    update_row(1),
    EvaluationRow(1, 1.5, 8, 0.5, None, {"loss": 0.25, "accuracy": 1.0}),
    FailureRow(2, 1, 5, "Traceback\n  in line 3\nValueError: é\n"),
    EndRow(3, {"updates": 1, "stopped_by": "epochs", "test_loss": None}, "f" * 64),
]


# ------------------------------------------------------------- round trips


def test_every_kind_of_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    """One line each, in order, sorted by kind."""
    path = write(tmp_path, WHOLE)
    assert list(follow_rows(tmp_path)) == [SegmentRow(FORMAT, 0, None), *WHOLE]
    assert len(path.read_bytes().splitlines()) == 1 + len(WHOLE)
    trace = read_trace(tmp_path)
    others = [*trace.evaluations, *trace.failures, trace.end]
    assert [*trace.events, *trace.modules, *trace.updates, *others] == WHOLE


def test_a_trace_is_found_by_the_folder_of_its_run_as_well(tmp_path: Path) -> None:
    """Which is what ``--out`` named, as a string or a path."""
    (tmp_path / "trace").mkdir()
    write(tmp_path / "trace", WHOLE)
    for folder in (tmp_path, tmp_path / "trace", str(tmp_path)):
        assert read_trace(folder).end == WHOLE[-1]
    with pytest.raises(TraceError, match="holds no trace; expected"):
        read_trace(tmp_path / "elsewhere")


finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(0, 2**53)
text = st.text(max_size=30)
events = st.one_of(
    st.builds(LearnerJoined, whole),
    st.builds(LearnerLost, whole, text),
    st.builds(GradientPushed, whole, whole, finite, st.integers(1, 2**31)),
    st.builds(GradientFailed, whole, text),
    st.builds(ProgressMeasured, finite),
    st.builds(StopRequested, text),
    st.builds(ForwardFinished, whole, whole, whole, st.none() | finite),
    st.builds(BackwardFinished, whole, whole, whole),
    st.builds(ModuleUpdated, whole, whole),
    st.builds(PassFailed, whole, whole, text),
)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(event=events, time=finite, wall=finite)
def test_every_event_survives_its_row(event: Event, time: float, wall: float) -> None:
    """Every type with any numbers and words, floats to the last bit."""
    line = encode_row(event_row(7, event, time, wall))
    assert line.count(b"\n") == 1
    row = decode_row(line[:-1])
    assert isinstance(row, EventRow)
    assert row.decode() == event
    assert (row.row, row.time, row.wall_time) == (7, time, wall)
    assert encode_message(row.decode()) == bytes(row.event) == encode_message(event)


def test_no_type_of_event_is_left_out() -> None:
    """The strategy above makes every event there is."""
    assert len(EVENTS) == 10


def test_a_row_of_an_unknown_event_is_read_and_not_decoded() -> None:
    """A reader of times does not need to know the type; whoever decodes it is told."""
    row = decode_row(encode_row(event_row(0)).replace(b"LearnerJoined", b"LearnerSlept")[:-1])
    assert isinstance(row, EventRow)
    with pytest.raises(KeyError):
        row.decode()


@pytest.mark.parametrize(
    "body",
    [
        '{"lease":1}',
        '{"lease":1,"version":0,"loss":"x","num_samples":8}',
        '{"lease":1.5,"version":0,"loss":0.5,"num_samples":8}',
        "[1,2]",
    ],
)
def test_a_row_whose_event_has_other_fields_is_not_decoded(body: str) -> None:
    """Missing fields and fields of another type are an error, never a default."""
    row = EventRow(0, 0.0, 0.0, "GradientPushed", msgspec.Raw(body.encode()), "")
    with pytest.raises(msgspec.ValidationError):
        row.decode()


# ------------------------------------------------------------------- damage


def test_a_last_row_cut_short_anywhere_is_ignored(tmp_path: Path) -> None:
    """At every byte of the last line, of each kind of row."""
    for kind, last in enumerate(WHOLE[3:]):
        folder = tmp_path / str(kind)
        path = write(folder, [*WHOLE[:3], last])
        content = path.read_bytes()
        length = len(content.splitlines(keepends=True)[-1])
        for cut in range(1, length + 1):
            path.write_bytes(content[:-cut])
            assert list(follow_rows(folder)) == [SegmentRow(FORMAT, 0, None), *WHOLE[:3]], cut


def test_a_last_line_of_rubbish_is_ignored(tmp_path: Path) -> None:
    """A crash of the machine may leave zeros or half a row, newline included."""
    path = write(tmp_path, WHOLE[:3])
    content = path.read_bytes()
    for rubbish in (b"\0" * 40, b"\0" * 40 + b"\n", b'{"kind":"event","row":3\n', b"\xff\xfe\n"):
        path.write_bytes(content + rubbish)
        assert numbers(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("line", [2, 3, 4])
@pytest.mark.parametrize(
    "rubbish",
    [b"", b"{}", b"{", b'{"kind":"event","row', b"\0\0", b'{"kind":"pushed"}', b"[]", b"7"],
)
def test_damage_before_the_last_row_is_refused_with_its_place(
    tmp_path: Path, line: int, rubbish: bytes
) -> None:
    """The file and the line; it is not skipped over."""
    path = write(tmp_path, WHOLE)
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = rubbish
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path)
    assert f"{path}, line {line}: expected a row of {FORMAT}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_event_row_missing_in_the_middle_is_refused(tmp_path: Path) -> None:
    """Event rows count from 0 without a gap, and none comes twice."""
    write(tmp_path / "gap", [event_row(0), event_row(2)])
    with pytest.raises(TraceError, match="expected event row 1, got 2"):
        read_trace(tmp_path / "gap")
    write(tmp_path / "twice", [event_row(0), event_row(0)])
    with pytest.raises(TraceError, match="expected event row 1, got 0"):
        read_trace(tmp_path / "twice")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"step,loss\n1,0.5\n2,0.25\n", "line 1: expected a row of gruppetto-trace-1"),
        (b'{"loss": 0.5}\n{"loss": 0.25}\n', "line 1: expected a row of gruppetto-trace-1"),
        (b'{"kind":"segment","format":"gruppetto-trace-9","segment":0}\n', "expected format"),
        (encode_row(event_row(0)), "line 1: expected one segment row, and that first"),
        (
            encode_row(SegmentRow(FORMAT, 0)) * 2 + encode_row(event_row(0)),
            "line 2: expected one segment row, and that first",
        ),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """In a sentence that names the file and what was expected."""
    (tmp_path / "000.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(tmp_path)
    assert str(tmp_path / "000.jsonl") in str(caught.value)


def test_no_trace_there_is_refused(tmp_path: Path) -> None:
    """An empty folder, one of other files, and one that does not exist."""
    (tmp_path / "notes.jsonl").write_text("{}")
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(TraceError, match="holds no trace"):
            read_trace(folder)


def test_an_empty_file_holds_no_rows(tmp_path: Path) -> None:
    """Killed between making the file and its first row, a run has an empty trace."""
    (tmp_path / "000.jsonl").write_bytes(b"")
    assert list(follow_rows(tmp_path)) == []
    (tmp_path / "000.jsonl").write_bytes(encode_row(SegmentRow(FORMAT, 0))[:12])
    assert list(follow_rows(tmp_path)) == []


# ----------------------------------------------------------------- segments


def test_a_continuation_makes_later_rows_void(tmp_path: Path) -> None:
    """Events after the row it continues from, and everything derived from them."""
    write(tmp_path, [event_row(0), event_row(1), update_row(1), event_row(2), update_row(2)])
    write(tmp_path, [event_row(2, LearnerJoined(99)), update_row(22)], after=1)
    trace = read_trace(tmp_path)
    assert [row.decode() for row in trace.events] == [
        LearnerJoined(0),
        LearnerJoined(1),
        LearnerJoined(99),
    ]
    assert [row.version for row in trace.updates] == [1, 22]


def test_an_end_row_is_void_when_the_run_goes_on(tmp_path: Path) -> None:
    """A stopped run has one; resumed and killed, the run has none."""
    write(tmp_path, [event_row(0), event_row(1, StopRequested("updates")), EndRow(2, {}, "")])
    assert read_trace(tmp_path).end is not None
    write(tmp_path, [event_row(1)], after=0)
    assert read_trace(tmp_path).end is None


def test_continuations_from_before_an_earlier_segments_start(tmp_path: Path) -> None:
    """A third segment may make the whole second void, and part of the first."""
    write(tmp_path, [event_row(n, LearnerJoined(n)) for n in range(6)])
    write(tmp_path, [event_row(n, LearnerJoined(10 + n)) for n in range(4, 8)], after=3)
    write(tmp_path, [event_row(n, LearnerJoined(20 + n)) for n in range(2, 5)], after=1)
    joined = [row.decode() for row in read_trace(tmp_path).events]
    assert joined == [LearnerJoined(n) for n in (0, 1, 22, 23, 24)]


def test_nested_continuations(tmp_path: Path) -> None:
    """Each from within the one before: the last word on every row is kept."""
    write(tmp_path, [event_row(n, LearnerJoined(n)) for n in range(5)])
    write(tmp_path, [event_row(n, LearnerJoined(10 + n)) for n in range(3, 8)], after=2)
    write(tmp_path, [event_row(n, LearnerJoined(20 + n)) for n in range(6, 9)], after=5)
    write(tmp_path, [event_row(n, LearnerJoined(30 + n)) for n in range(7, 9)], after=6)
    joined = [row.decode() for row in read_trace(tmp_path).events]
    assert joined == [LearnerJoined(n) for n in (0, 1, 2, 13, 14, 15, 26, 37, 38)]


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(data=st.data())
def test_segments_against_a_list(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Whatever is resumed from wherever: the trace is what a list cut and extended is."""
    folder = tmp_path_factory.mktemp("segments")
    rows: list[int] = []
    label = 0
    for segment in range(data.draw(st.integers(1, 5))):
        after = None
        if segment:
            after = data.draw(st.integers(-1, len(rows) - 1)) if rows else -1
            rows = rows[: after + 1]
        new = []
        for _ in range(data.draw(st.integers(0, 4))):
            new.append(event_row(len(rows), LearnerJoined(label)))
            rows.append(label)
            label += 1
        write(folder, new, after=after)
    assert [row.decode() for row in read_trace(folder).events] == [LearnerJoined(n) for n in rows]


def test_a_continuation_whose_file_is_empty_changes_nothing(tmp_path: Path) -> None:
    """Killed right when it was resumed: nothing of it holds, and nothing is void yet."""
    write(tmp_path, [event_row(n) for n in range(3)])
    (tmp_path / "001.jsonl").write_bytes(b"")
    assert numbers(tmp_path) == [0, 1, 2]


def test_a_cut_row_before_a_continuation_is_ignored_too(tmp_path: Path) -> None:
    """The first segment ended in a crash; its last row is void anyway."""
    path = write(tmp_path, [event_row(n) for n in range(4)])
    path.write_bytes(path.read_bytes()[:-7])
    write(tmp_path, [event_row(2), event_row(3)], after=1)
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_an_event_from_before_a_continuation_that_is_missing_is_refused(tmp_path: Path) -> None:
    """The second segment says the first has rows up to 5; it has up to 2."""
    write(tmp_path, [event_row(n) for n in range(3)])
    write(tmp_path, [event_row(6)], after=5)
    with pytest.raises(TraceError, match=r"001\.jsonl: expected event row 3, got 6"):
        read_trace(tmp_path)


def test_a_second_writer_never_touches_an_earlier_segment(tmp_path: Path) -> None:
    """Append-only: resuming makes a new file."""
    first = write(tmp_path, WHOLE)
    content = first.read_bytes()
    second = write(tmp_path, [event_row(1)], after=0)
    assert (first.name, second.name) == ("000.jsonl", "001.jsonl")
    assert first.read_bytes() == content


def test_a_row_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    """Nothing waits in this process that kill -9 could take, once an event row is written."""
    writer = TraceWriter(tmp_path)
    for n in range(3):
        writer.write(event_row(n))
        assert numbers(tmp_path) == list(range(n + 1))
    writer.close()
    writer.close()


# ------------------------------------------------------------------- hashes


def test_the_digest_is_of_types_and_fields_and_order() -> None:
    """Same messages, same digest; another field, type or order, another digest."""

    def digest(*messages: Any) -> str:
        made = MessageDigest()
        for message in messages:
            made.add(message)
        return made.hexdigest()

    messages: list[Any] = [
        LearnerJoined(1),
        GradientPushed(0, 0, 0.5, 8),
        Compute(0, 1, 2, 3, None),
        ApplyUpdate(1, (Contribution(0, 0, 0, 8, 1.0),)),
        Cancel(3),
        Discard(4, "late"),
        Finish("epochs"),
    ]
    assert digest(*messages) == digest(*messages)
    assert len(digest()) == 64
    others: list[list[Any]] = [
        messages[::-1],
        messages[1:],
        [*messages, Finish("epochs")],
        [LearnerJoined(2), *messages[1:]],
        [messages[0], GradientPushed(0, 0, math.nextafter(0.5, 1.0), 8), *messages[2:]],
        [StopRequested("epochs")],
        [Finish("epochs")],
    ]
    made = [digest(*other) for other in (messages, *others)]
    assert len(set(made)) == len(made)


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(logged=st.lists(events, max_size=8), times=st.lists(finite, min_size=16, max_size=16))
def test_the_digest_knows_no_times(logged: list[Event], times: list[float]) -> None:
    """Two engines whose events are the same have the same digest, whenever they happened."""
    digests = []
    for shift in (0, 8):
        made = MessageDigest()
        for n, event in enumerate(logged):
            row = decode_row(encode_row(event_row(n, event, times[n + shift], times[n]))[:-1])
            assert isinstance(row, EventRow)
            made.add(row.decode(), bytes(row.event))
        digests.append(made.hexdigest())
    plain = MessageDigest()
    for event in logged:
        plain.add(event)
    assert digests == [plain.hexdigest()] * 2
