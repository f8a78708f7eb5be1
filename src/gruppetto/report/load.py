"""Run folders -> what the report shows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gruppetto.report.data import ReportedRun, distinct_labels, setting_text
from gruppetto.trace import read_trace
from gruppetto.trace.folder import read_config

__all__ = ["load_runs"]

#: What a run notes for itself, not what its user told it.
_NOTES = ("task_is_reference", "modulation_is_default", "has_schedule")

#: What is chosen by the number of modules and the engine, unless told otherwise.
_BY_MODULES = ("begins", "pass_times")


def _has_default_modulation(settings: Mapping[str, object]) -> bool:
    if settings.get("decouple") is not None:
        return settings.get("modulation", "none") == "none"
    return bool(settings.get("modulation_is_default"))


def _follows(key: str, settings: Sequence[Mapping[str, object]]) -> bool:
    """Whether it names nothing: decoupled runs on an engine, with as many modules, agree in it."""
    cuts = [(each.get("begins"), each) for each in settings]
    known = [((len(c), s.get("engine")), s) for c, s in cuts if isinstance(c, list)]
    texts = {(place, setting_text(each.get(key))) for place, each in known}
    return len(texts) == len({place for place, _ in known})


def load_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read runs, ended or not, and name them by what differs between them.

    Raises:
        RunFolderError: a folder without a run.
        TraceError: a trace that cannot be read.
    """
    configs = [read_config(folder) for folder in folders]
    told = [{k: v for k, v in c.settings.items() if k not in _NOTES} for c in configs]
    silent = set()
    # A modulation that follows from the protocol names nothing that the protocol does not.
    if all(_has_default_modulation(config.settings) for config in configs):
        silent.add("modulation")
    silent |= {key for key in _BY_MODULES if _follows(key, [c.settings for c in configs])}
    labels = distinct_labels([{k: v for k, v in s.items() if k not in silent} for s in told])
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
