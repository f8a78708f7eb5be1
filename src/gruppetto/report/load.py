"""Run folders -> what the report shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gruppetto.report.data import ReportedRun, distinct_labels
from gruppetto.trace import read_trace
from gruppetto.trace.folder import read_config

__all__ = ["load_runs"]


def load_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read runs, ended or not, and name them by what differs between them.

    Raises:
        RunFolderError: a folder without a run.
        TraceError: a trace that cannot be read.
    """
    configs = [read_config(folder) for folder in folders]
    labels = distinct_labels([config.settings for config in configs])
    return [
        ReportedRun(
            name=label,
            folder=str(folder),
            settings=config.settings,
            versions=config.versions,
            trace=read_trace(folder / "trace"),
        )
        for label, folder, config in zip(labels, folders, configs, strict=True)
    ]
