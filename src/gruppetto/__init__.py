"""Gruppetto trains PyTorch models with gradients that arrive late.

>>> import gruppetto as gp
>>> run = gp.train("digits", protocol=gp.KBatchAsync(k=2), epochs=1, out=getfixture("tmp_path"),
...                progress=False)
>>> run.result["mini_batches_applied"]
90
"""

from importlib.metadata import version as _version

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
    Async,
    Backup,
    Hardsync,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Rennala,
    Softsync,
)
from gruppetto.runs.compare import compare
from gruppetto.runs.execute import Run
from gruppetto.runs.export import export
from gruppetto.runs.replay import replay
from gruppetto.runs.train import resume, train
from gruppetto.staleness import Inverse, InverseMean, NoModulation
from gruppetto.training.optimizers import optimizer, schedule
from gruppetto.training.task import Task

__version__ = _version("gruppetto")

__all__ = [
    "Async",
    "Backup",
    "Diverged",
    "GruppettoError",
    "Hardsync",
    "ImpossibleEvent",
    "InvalidSetting",
    "Inverse",
    "InverseMean",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "LearnersLost",
    "NoModulation",
    "Rennala",
    "ReplayMismatch",
    "Run",
    "RunFailed",
    "RunFolderError",
    "Softsync",
    "Task",
    "TaskError",
    "TooManyGivenUp",
    "TraceError",
    "UsageError",
    "compare",
    "export",
    "optimizer",
    "replay",
    "resume",
    "schedule",
    "train",
]
