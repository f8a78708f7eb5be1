"""Measured seconds: out of virtual traces, out of work rows, and out of files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gruppetto as gp
from gruppetto.delays import DELAYS, Empirical, Exponential, KeyedDelays, fit
from gruppetto.errors import InvalidSetting, RunFolderError, TraceError
from gruppetto.runs.measured import measured_delays
from gruppetto.runs.seconds import load_delay, read_seconds
from gruppetto.trace import TraceWriter, WorkRow
from gruppetto.trace.files import segment_files

LAW = "exponential:mean=2.0"


def train(out: Path, **options: object) -> Path:
    given: dict[str, object] = {"engine": "virtual", "learners": 4, "delay": LAW, "updates": 60}
    given |= {"evaluate": "off", "progress": False, "out": out, **options}
    gp.train("digits", **given)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def k_sync_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "k-sync", protocol="k-sync:k=2", updates=150)


def drawn(learner: int, count: int) -> list[float]:
    delays = KeyedDelays(0, DELAYS.parse(LAW), {}, 4)
    return [delays.draw(learner, n) for n in range(count)]


# ------------------------------------------------------------------ virtual traces


def test_a_virtual_run_gives_back_the_delays_that_were_drawn(tmp_path: Path) -> None:
    """Nobody is cancelled: learner by learner, in order, up to rounding. The run's end cuts off."""
    found = measured_delays(train(tmp_path / "run", protocol="async"))
    assert list(found.samples) == [0, 1, 2, 3]
    assert sum(x.size for x in found.samples.values()) == 60
    for learner, seconds in found.samples.items():
        assert seconds == pytest.approx(drawn(learner, seconds.size), rel=1e-9)
    for learner, cut in found.censored.items():
        assert cut.size == 1
        assert cut[0] < drawn(learner, found.samples[learner].size + 1)[-1]
    assert found.notes == ()


def test_an_epoch_that_ends_is_followed_to_its_end(tmp_path: Path) -> None:
    """The tail of a run, where learners run out of work, needs the number of mini-batches."""
    run = train(tmp_path / "run", protocol="k-batch-async:k=3", updates=None, epochs=0.7)
    found = measured_delays(run)
    assert sum(x.size for x in found.samples.values()) == math.ceil(0.7 * math.ceil(1437 / 16))


def test_cancelled_jobs_come_as_far_as_they_came(k_sync_run: Path) -> None:
    """Each is shorter than the delay that was drawn for it; together they give the law again."""
    found = measured_delays(k_sync_run)
    assert sum(x.size for x in found.samples.values()) == 300
    assert sum(x.size for x in found.censored.values()) == pytest.approx(300, abs=4)
    for learner in range(4):
        whole, cut = found.samples[learner], found.censored[learner]
        every = drawn(learner, whole.size + cut.size)
        left = [d for d in every if not np.isclose(whole, d, rtol=1e-9, atol=0.0).any()]
        assert len(left) == cut.size
        assert (cut < left).all()
    fitted = fit(found.samples, found.censored)
    assert isinstance(fitted.law, Exponential)
    assert fitted.law.mean == pytest.approx(2.0, rel=0.15)
    naive = fit(found.samples).law
    assert naive.expectation() < 1.4


def test_lost_and_failed_ones_are_left_out_and_counted(tmp_path: Path) -> None:
    """What they would have taken, nobody knows."""
    run = train(tmp_path / "run", protocol="async", faults="random:die=0.04,fail=0.1", seed=3)
    found = measured_delays(run)
    assert [note.split(" mini")[0].split(":")[0] for note in found.notes] == ["left out"] * 2
    assert any(note.endswith("whose gradient failed") for note in found.notes)
    assert any(note.endswith("whose learner was lost") for note in found.notes)


def test_a_push_counts_once_and_a_late_one_whole(tmp_path: Path) -> None:
    """Delivered twice it is one job; not cancelled in time, it took as long as it took."""
    twice = train(tmp_path / "twice", protocol="async", faults="random:duplicate=0.5")
    for learner, seconds in measured_delays(twice).samples.items():
        assert seconds == pytest.approx(drawn(learner, seconds.size), rel=1e-9)
    late = measured_delays(train(tmp_path / "late", protocol="k-sync:k=2", faults="random:late=1"))
    assert sum(x.size for x in late.samples.values()) > 160  # 120 were applied
    for learner, seconds in late.samples.items():
        cut = late.censored.get(learner, np.empty(0))
        every = np.array(drawn(learner, seconds.size + cut.size))
        assert np.isclose(every[:, None], seconds, rtol=1e-9, atol=0.0).any(axis=0).all()


def test_an_interrupted_run_will_do(k_sync_run: Path, tmp_path: Path) -> None:
    """The trace breaks off in the middle of a row; it is said, and what is there counts."""
    run = tmp_path / "run"
    shutil.copytree(k_sync_run, run)
    (path,) = segment_files(run / "trace")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    found, whole = measured_delays(run), measured_delays(k_sync_run)
    assert found.notes == (
        "the run did not end (killed, or still running): what it did until then counts",
    )
    for learner, seconds in found.samples.items():
        assert seconds.tolist() == whole.samples[learner][: seconds.size].tolist()
    assert 0 < sum(x.size for x in found.samples.values()) < 300


def test_an_edited_trace_is_refused(k_sync_run: Path, tmp_path: Path) -> None:
    """Its events lead elsewhere than its commands."""
    run = tmp_path / "run"
    shutil.copytree(k_sync_run, run)
    path = run / "config.json"
    path.write_text(path.read_text().replace("k-sync:k=2", "k-sync:k=3"))
    with pytest.raises(TraceError) as caught:
        measured_delays(run)
    assert "on its events do not lead to the commands it recorded" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_without_a_gradient_is_refused(k_sync_run: Path, tmp_path: Path) -> None:
    """And so is a folder without a run, or without a trace."""
    run = tmp_path / "run"
    shutil.copytree(k_sync_run, run)
    (path,) = segment_files(run / "trace")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(TraceError, match="tells of no finished mini-batch; expected a run that"):
        measured_delays(run)
    path.unlink()
    with pytest.raises(TraceError, match="holds no trace"):
        measured_delays(run)
    with pytest.raises(RunFolderError):
        measured_delays(tmp_path / "nothing")


def test_work_rows_tell_it_with_real_processes(k_sync_run: Path, tmp_path: Path) -> None:
    """Delay, loading and computing; not waiting. One cancelled before it began tells nothing."""
    run = tmp_path / "run"
    run.mkdir()
    settings = json.loads((k_sync_run / "config.json").read_text())
    settings["settings"]["engine"] = "local"
    (run / "config.json").write_text(json.dumps(settings))
    writer = TraceWriter(run / "trace")
    rows = [
        (0, 1, "pushed", (9.0, 1.0, 0.25, 0.5)),
        (1, 0, "pushed", (9.0, 0.0, 0.0, 0.5)),
        (2, 1, "cancelled", (9.0, 0.125, 0.0, 0.0)),
        (3, 1, "cancelled", (9.0, 0.0, 0.0, 0.0)),
        (4, 1, "failed", (9.0, 1.0, 1.0, 1.0)),
        (5, 1, "pushed", (9.0, 0.0, 0.0, 0.75)),
    ]
    for lease, learner, outcome, spent in rows:
        writer.write(WorkRow(lease, learner, lease, outcome, float(lease), *spent))
    writer.close()
    found = measured_delays(run)
    assert {n: x.tolist() for n, x in found.samples.items()} == {0: [0.5], 1: [1.75, 0.75]}
    assert {n: x.tolist() for n, x in found.censored.items()} == {1: [0.125]}
    assert found.notes == (
        "the run did not end (killed, or still running): what it did until then counts",
        "left out: 1 mini-batches whose gradient failed",
    )


# ------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "text",
    [
        "1.5\n0.25\n3\n",
        "\n1.5\r\n0.25\r\n\r\n3",
        "seconds\n1.5\n0.25\n3\n",
        "\ufefftook\n1.5\n0.25\n3\n",
        "learner,seconds\n0,1.5\n1,0.25\n0,3\n",
        '"a name", seconds ,b\nx,1.5,y\nz, 0.25,\n,3e0,u\n',
    ],
)
def test_a_file_of_seconds(text: str, tmp_path: Path) -> None:
    """With and without names, in the file's order."""
    path = tmp_path / "times.csv"
    path.write_bytes(text.encode())
    assert read_seconds(path).tolist() == [1.5, 0.25, 3.0]


def parquet(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_a_parquet_file_of_seconds(tmp_path: Path) -> None:
    """One column, or the one of that name; whole numbers too."""
    one = parquet(tmp_path / "one.parquet", took=[1.5, 0.25])
    assert read_seconds(one).tolist() == [1.5, 0.25]
    two = parquet(tmp_path / "two.parquet", learner=["a", "b"], seconds=[1, 2])
    assert read_seconds(two).tolist() == [1.0, 2.0]


BAD: list[tuple[bytes, str]] = [
    (b"", "holds no seconds; expected at least one number"),
    (b"seconds\n", "holds no seconds; expected at least one number"),
    (b"1.0\n-2.0\n", "expected seconds >= 0 and finite, got -2.0"),
    (b"1.0\nnan\n", "expected seconds >= 0 and finite, got nan"),
    (b"1.0\ninf\n", "expected seconds >= 0 and finite, got inf"),
    (b"1.0\n\nsoon\n", "line 3: expected seconds, got 'soon'"),
    (b"a,seconds\n1\n", "line 2: expected seconds, got ''"),
    (b"a,b\n1,2\n", "expected one column, or one called seconds, got the columns a, b"),
    (b"1,2\n3,4\n", "or a first line that names the columns, got 2 columns without names"),
    (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", "a CSV or a .parquet file, got something else"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_file_of_something_else_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    """In one sentence that names the file."""
    path = tmp_path / "times.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidSetting) as caught:
        read_seconds(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    """Not Parquet, no numbers, missing values, no file."""
    foreign = tmp_path / "foreign.parquet"
    foreign.write_bytes(b"1.0\n2.0\n")
    with pytest.raises(InvalidSetting, match="expected a Parquet file, got something else"):
        read_seconds(foreign)
    texts = parquet(tmp_path / "texts.parquet", seconds=["a"])
    with pytest.raises(InvalidSetting, match="expected a column of numbers, got one of string"):
        read_seconds(texts)
    missing = parquet(tmp_path / "missing.parquet", seconds=[1.0, None])
    with pytest.raises(InvalidSetting, match="expected seconds >= 0 and finite, got nan"):
        read_seconds(missing)
    for nowhere in (tmp_path / "none.parquet", tmp_path / "none.csv"):
        with pytest.raises(InvalidSetting, match="cannot be read: No such file"):
            read_seconds(nowhere)
    with pytest.raises(InvalidSetting, match="cannot be read: Is a directory"):
        read_seconds(tmp_path)


def test_a_law_is_loaded_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative names become absolute, so that the spec means the same elsewhere."""
    values: npt.NDArray[np.float64] = np.array([3.0, 1.0])
    (tmp_path / "times.txt").write_text("3.0\n1.0\n")
    monkeypatch.chdir(tmp_path)
    law = load_delay("empirical:file=times.txt")
    assert law == Empirical(str(tmp_path / "times.txt")).with_values(values)
    assert DELAYS.format(law) == f"empirical:file={tmp_path}/times.txt"
    assert load_delay(DELAYS.format(law)) == law
    assert load_delay(law) is law
    assert load_delay(LAW) == Exponential(2.0)
    with pytest.raises(InvalidSetting, match=r"none\.txt cannot be read"):
        load_delay("empirical:file=none.txt")
