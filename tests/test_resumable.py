"""What experiments of many runs share."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from test_experiments import load


def test_every_job_is_done_once() -> None:
    """By two processes, in whatever order they end."""
    jobs = [(float(n),) for n in range(5)]
    assert sorted(load("resumable").as_they_end(math.exp, jobs, 2)) == [
        math.exp(n) for (n,) in jobs
    ]


def test_nothing_is_begun_after_a_job_that_failed(tmp_path: Path) -> None:
    """As with one that was interrupted: hours of jobs must not follow it."""
    folders = [tmp_path / "a", tmp_path / "nowhere" / "b", *(tmp_path / name for name in "cdef")]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(load("resumable").as_they_end(os.mkdir, [(folder,) for folder in folders], 1))
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
