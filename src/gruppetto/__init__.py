"""Gruppetto trains PyTorch models with gradients that arrive late.

>>> import gruppetto as gp
>>> run = gp.train("digits", protocol=gp.KBatchAsync(k=2), epochs=1, out=getfixture("tmp_path"),
...                progress=False)
>>> run.result["mini_batches_applied"]
90
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gruppetto.decoupled.methods import Decoupled
    from gruppetto.errors import (
        Diverged,
        GruppettoError,
        ImpossibleEvent,
        InvalidSetting,
        LearnersLost,
        ReplayMismatch,
        RunFailed,
        RunFolderError,
        TaskError,
        TooManyGivenUp,
        TraceError,
        UsageError,
    )
    from gruppetto.protocols import (
        AdaSync,
        Async,
        Backup,
        Hardsync,
        HardsyncWarmup,
        KAsync,
        KBatchAsync,
        KBatchSync,
        KSync,
        Rennala,
        Softsync,
    )
    from gruppetto.report.page import write_report
    from gruppetto.runs.compare import compare
    from gruppetto.runs.execute import Run
    from gruppetto.runs.export import export
    from gruppetto.runs.plan import plan
    from gruppetto.runs.replay import replay
    from gruppetto.runs.start import resume
    from gruppetto.runs.train import train
    from gruppetto.staleness import (
        AdaptiveDelayCompensation,
        AnnealedPower,
        DelayAdaptive,
        DelayCompensation,
        Distance,
        Exponential,
        GapAware,
        Inverse,
        InverseMean,
        InverseSqrt,
        NoCompensation,
        NoModulation,
        Polynomial,
        ProductBatch,
        SqrtBatch,
        Threshold,
    )
    from gruppetto.training.optimizers import optimizer, schedule
    from gruppetto.training.task import Task

#: Where each public name lives. Loaded at first use: reading a trace must not wait for torch.
_HOMES = {
    "AdaSync": "gruppetto.protocols",
    "AdaptiveDelayCompensation": "gruppetto.staleness",
    "AnnealedPower": "gruppetto.staleness",
    "Async": "gruppetto.protocols",
    "Backup": "gruppetto.protocols",
    "Decoupled": "gruppetto.decoupled.methods",
    "DelayAdaptive": "gruppetto.staleness",
    "DelayCompensation": "gruppetto.staleness",
    "Distance": "gruppetto.staleness",
    "Diverged": "gruppetto.errors",
    "Exponential": "gruppetto.staleness",
    "GapAware": "gruppetto.staleness",
    "GruppettoError": "gruppetto.errors",
    "Hardsync": "gruppetto.protocols",
    "HardsyncWarmup": "gruppetto.protocols",
    "ImpossibleEvent": "gruppetto.errors",
    "InvalidSetting": "gruppetto.errors",
    "Inverse": "gruppetto.staleness",
    "InverseMean": "gruppetto.staleness",
    "InverseSqrt": "gruppetto.staleness",
    "KAsync": "gruppetto.protocols",
    "KBatchAsync": "gruppetto.protocols",
    "KBatchSync": "gruppetto.protocols",
    "KSync": "gruppetto.protocols",
    "LearnersLost": "gruppetto.errors",
    "NoCompensation": "gruppetto.staleness",
    "NoModulation": "gruppetto.staleness",
    "Polynomial": "gruppetto.staleness",
    "ProductBatch": "gruppetto.staleness",
    "Rennala": "gruppetto.protocols",
    "ReplayMismatch": "gruppetto.errors",
    "Run": "gruppetto.runs.execute",
    "RunFailed": "gruppetto.errors",
    "RunFolderError": "gruppetto.errors",
    "Softsync": "gruppetto.protocols",
    "SqrtBatch": "gruppetto.staleness",
    "Task": "gruppetto.training.task",
    "TaskError": "gruppetto.errors",
    "Threshold": "gruppetto.staleness",
    "TooManyGivenUp": "gruppetto.errors",
    "TraceError": "gruppetto.errors",
    "UsageError": "gruppetto.errors",
    "compare": "gruppetto.runs.compare",
    "export": "gruppetto.runs.export",
    "optimizer": "gruppetto.training.optimizers",
    "plan": "gruppetto.runs.plan",
    "replay": "gruppetto.runs.replay",
    "resume": "gruppetto.runs.start",
    "schedule": "gruppetto.training.optimizers",
    "train": "gruppetto.runs.train",
    "write_report": "gruppetto.report.page",
}

__all__ = [
    "AdaSync",
    "AdaptiveDelayCompensation",
    "AnnealedPower",
    "Async",
    "Backup",
    "Decoupled",
    "DelayAdaptive",
    "DelayCompensation",
    "Distance",
    "Diverged",
    "Exponential",
    "GapAware",
    "GruppettoError",
    "Hardsync",
    "HardsyncWarmup",
    "ImpossibleEvent",
    "InvalidSetting",
    "Inverse",
    "InverseMean",
    "InverseSqrt",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "LearnersLost",
    "NoCompensation",
    "NoModulation",
    "Polynomial",
    "ProductBatch",
    "Rennala",
    "ReplayMismatch",
    "Run",
    "RunFailed",
    "RunFolderError",
    "Softsync",
    "SqrtBatch",
    "Task",
    "TaskError",
    "Threshold",
    "TooManyGivenUp",
    "TraceError",
    "UsageError",
    "compare",
    "export",
    "optimizer",
    "plan",
    "replay",
    "resume",
    "schedule",
    "train",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gruppetto")
    if name not in _HOMES:
        raise AttributeError(f"module 'gruppetto' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
