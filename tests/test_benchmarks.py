"""What benchmarks print and draw; what they measure is for a quiet machine."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
CELLS = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of the folder, which finds its neighbours as a script does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def rows(slower: float = 1.0) -> list[dict[str, Any]]:
    """Of both tables of costs, and of another one."""
    start = {"table": "start", "cache": "empty", "seconds": 3.0}
    learners = [
        {"table": "learners", "cell": cell, "learners": learners, "k": 8, "updates": 256,
         "us_per_update": slower * number * learners}
        for number, cell in enumerate(CELLS, start=1) for learners in (64, 640)
    ]  # fmt: skip
    updates = [
        {"table": "updates", "cell": cell, "learners": 64, "k": 8, "updates": updates,
         "us_per_update": 2.0 * number}
        for number, cell in enumerate(CELLS, start=1) for updates in (1_000, 10_000)
    ]  # fmt: skip
    return [start, *learners, *updates]


def test_costs_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = load("simulation_plot", monkeypatch)
    one, again, other = (
        plot.draw(given, tmp_path / f"{name}.png").read_bytes()
        for name, given in (("one", rows()), ("again", rows()), ("other", rows(slower=3.0)))
    )
    assert one.startswith(b"\x89PNG")
    assert one == again != other


def test_rows_of_a_kind_are_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = load("common", monkeypatch)
    common.report([*rows()[:2], {**rows()[1], "learners": 10_000}, {"name": "x"}], [0.1], False)
    head, *lines = capsys.readouterr().out.splitlines()
    assert "load [0.1]" in head
    assert lines == [
        "", "start",
        "  cache  seconds",
        "  empty        3",
        "", "learners",
        "    cell  learners  k  updates  us_per_update",
        "  k-sync        64  8      256             64",
        "  k-sync     10000  8      256             64",
        "  name",
        "     x",
    ]  # fmt: skip
