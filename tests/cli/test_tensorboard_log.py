"""Event files for TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from gruppetto.cli import _run
from gruppetto.errors import InvalidSetting, RunFolderError, UsageError
from gruppetto.runs.export import export_tensorboard
from gruppetto.runs.tensorboard import TensorBoardLog, has_event_files, require_tensorboard
from gruppetto.trace import EvaluationRow, ModuleRow, SegmentRow, UpdateRow, read_trace

pytest.importorskip("tensorboard")


def read(folder: Path) -> Any:
    with warnings.catch_warnings():
        # The reader's imports warn of protobuf and numpy, which versions do so changes.
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
    return events


def update(version: int, losses: list[float], staleness: list[int]) -> UpdateRow:
    return UpdateRow(
        version=version,
        time=1.5 * version,
        samples=40 * version,
        epoch=0.1 * version,
        learning_rate=0.1 / version,
        staleness=staleness,
        num_samples=[30, 10],
        factors=[1.0, 1.0],
        learners=[0, 1],
        losses=losses,
        applied=2 * version,
        cancelled=0,
        discarded=0,
        given_up=0,
    )


def evaluation(version: int, **metrics: float | None) -> EvaluationRow:
    return EvaluationRow(version, 1.5 * version, 40 * version, 0.1 * version, None, metrics)


def points(events: Any, tag: str) -> list[tuple[float, int, float]]:
    """(wall time, step, value) of each."""
    return [(e.wall_time, e.step, pytest.approx(e.value)) for e in events.Scalars(tag)]


def write(folder: Path, **options: Any) -> None:
    log = TensorBoardLog(folder, start=1000.0, **options)
    log.row(SegmentRow("x", 0))
    log.row(update(1, [2.0, 4.0], [0, 0]))
    log.row(update(2, [1.0, 1.0], [1, 2]))
    log.row(evaluation(1, accuracy=0.5, loss=None))  # late, as a deferred evaluation is
    log.close()
    log.close()


def test_rows_become_scalars_at_samples_and_run_time(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "log")
    events = read(tmp_path / "deep" / "log")
    assert sorted(events.Tags()["scalars"]) == [
        "test/accuracy", "train/learning_rate", "train/loss", "train/staleness",
    ]  # fmt: skip
    assert points(events, "train/loss") == [(1001.5, 40, 2.5), (1003.0, 80, 1.0)]
    assert points(events, "train/learning_rate") == [(1001.5, 40, 0.1), (1003.0, 80, 0.05)]
    assert points(events, "train/staleness") == [(1001.5, 40, 0.0), (1003.0, 80, 1.5)]
    assert points(events, "test/accuracy") == [(1001.5, 40, 0.5)]


def test_the_end_has_a_histogram_of_staleness(tmp_path: Path) -> None:
    write(tmp_path)
    (histogram,) = read(tmp_path).Histograms("staleness")
    assert (histogram.wall_time, histogram.step) == (1003.0, 80)
    value = histogram.histogram_value
    assert (value.min, value.max, value.num, value.sum) == (0.0, 2.0, 4.0, 3.0)
    counts = {limit: n for limit, n in zip(value.bucket_limit, value.bucket, strict=True) if n}
    assert counts == {0.5: 2.0, 1.5: 1.0, 2.5: 1.0}


def test_a_resumed_run_makes_earlier_points_void(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, replaces=True)
    events = read(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert points(events, "train/loss") == [(1001.5, 40, 2.5), (1003.0, 80, 1.0)]
    assert len(events.Histograms("staleness")) == 1


def test_modules_have_points_of_their_own(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, start=1000.0)
    for version in (1, 2):
        for module, rate in ((1, 0.1), (2, 0.0)):  # module 2 has no parameters
            log.row(
                ModuleRow(
                    module=module, mini_batch=version - 1, time=1.5 * version - 0.5 * (module - 1),
                    staleness=(version - 1) * (2 - module), loading=0.0, forward=0.25, backward=0.4,
                    step=0.1, waiting_for_inputs=0.0, waiting_for_gradients=0.5,
                    waiting_for_others=0.0, in_flight=2 - module, learning_rate=rate,
                )
            )  # fmt: skip
        log.row(update(version, [1.0, 1.0], [version - 1, 0]))
    log.close()
    events = read(tmp_path)
    names = ("in_flight", "learning_rate", "staleness", "used")
    tags = [f"module {k}/{n}" for k in (1, 2) for n in names if (k, n) != (2, "learning_rate")]
    assert [tag for tag in sorted(events.Tags()["scalars"]) if "module" in tag] == tags
    assert points(events, "module 1/used") == [(1001.5, 40, 0.5), (1003.0, 80, 0.5)]
    assert points(events, "module 2/used") == [(1001.0, 40, 0.75), (1002.5, 80, 0.5)]
    assert points(events, "module 1/staleness") == [(1001.5, 40, 0.0), (1003.0, 80, 1.0)]
    assert points(events, "module 1/in_flight") == [(1001.5, 40, 1.0), (1003.0, 80, 1.0)]
    assert points(events, "module 1/learning_rate") == [(1001.5, 40, 0.1), (1003.0, 80, 0.1)]


def test_a_run_without_rows_is_closed_in_peace(tmp_path: Path) -> None:
    TensorBoardLog(tmp_path).close()
    assert has_event_files(tmp_path)
    assert read(tmp_path).Tags()["scalars"] == []


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="cannot be written"):
        TensorBoardLog(tmp_path / "file" / "log")


def test_a_missing_package_is_one_sentence_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_tensorboard()
    for name in [n for n in sys.modules if n.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for attempt in (require_tensorboard, lambda: TensorBoardLog(tmp_path / "log")):
        with pytest.raises(InvalidSetting, match=r"pip install gruppetto\[tensorboard\]"):
            attempt()
    assert not (tmp_path / "log").exists()


def test_export_writes_an_ended_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--protocol", "async", "--updates", "12", "--out", "run"]
    assert _run([*words, "--evaluate-every", "0.05", "--quiet"]) == 0
    capsys.readouterr()
    assert _run(["export", "run", "--tensorboard", "log", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "run", "tensorboard": "log"}
    events, trace = read(Path("log")), read_trace(Path("run/trace"))
    start = Path("run/config.json").stat().st_mtime
    losses = events.Scalars("train/loss")
    assert [e.step for e in losses] == [row.samples for row in trace.updates]
    assert [e.wall_time for e in losses] == pytest.approx([start + u.time for u in trace.updates])
    assert [e.value for e in events.Scalars("test/accuracy")] == pytest.approx(
        [row.metrics["accuracy"] for row in trace.evaluations]
    )
    assert not Path("run/model.pt").exists()
    assert _run(["export", "run", "--tensorboard", "log"]) == 2
    assert "holds TensorBoard event files already" in capsys.readouterr().err
    assert _run(["export", "run", "--tensorboard", "b", "--out", "m.pt"]) == 2
    assert "--out or --tensorboard, got both" in capsys.readouterr().err
    assert not Path("b").exists()


def test_export_of_no_run_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        export_tensorboard(tmp_path / "nothing", tmp_path / "log")
    assert not (tmp_path / "log").exists()
