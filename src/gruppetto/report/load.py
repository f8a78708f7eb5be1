"""Run folders -> what the report shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gruppetto.report.data import ReportedRun, distinct_labels
from gruppetto.trace import read_trace
from gruppetto.trace.folder import read_config

__all__ = ["load_runs"]

#: What a run notes for itself, not what its user told it.
_NOTES = ("task_is_reference", "modulation_is_default", "has_schedule")


def load_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read runs, ended or not, and name them by what differs between them.

    Raises:
        RunFolderError: a folder without a run.
        TraceError: a trace that cannot be read.
    """
    configs = [read_config(folder) for folder in folders]
    told = [{k: v for k, v in c.settings.items() if k not in _NOTES} for c in configs]
    # A modulation that follows from the protocol names nothing that the protocol does not.
    defaults = all(config.settings.get("modulation_is_default") for config in configs)
    labels = distinct_labels(
        [{k: v for k, v in s.items() if not (defaults and k == "modulation")} for s in told]
    )
    return [
        ReportedRun(
            name=label,
            folder=str(folder),
            settings=settings,
            versions=config.versions,
            trace=read_trace(folder / "trace"),
        )
        for label, folder, config, settings in zip(labels, folders, configs, told, strict=True)
    ]
