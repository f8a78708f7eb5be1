"""Runs as TensorBoard event files, written while a run goes on or from its trace.

Every point stands at the number of samples applied so far: an update of one protocol is many
mini-batches and of another is one, but a sample is a sample. Its wall time is when the run started
plus the run time, so that TensorBoard's *relative* axis is the run time, virtual or not.
"""

from __future__ import annotations

import time as clock
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gruppetto.errors import InvalidSetting, RunFolderError
from gruppetto.trace import EvaluationRow, Row, UpdateRow

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLog", "has_event_files", "require_tensorboard"]


def require_tensorboard() -> None:
    """Make sure that the optional package is there; call it before a run writes anything.

    Raises:
        InvalidSetting: it is not.
    """
    _writer_class()


def has_event_files(folder: Path) -> bool:
    """Whether TensorBoard would find a run in a folder already."""
    return any(folder.glob("events.out.tfevents.*"))


class TensorBoardLog:
    """Writes rows of a trace as they come.

    ``train/loss`` (mean over an update's samples), ``train/learning_rate``, ``train/staleness``
    (mean over an update's gradients), ``test/METRIC``, and at the end ``staleness``, a histogram of
    all applied gradients.

    Args:
        folder: where the event files go; made if missing.
        start: when the run started, in seconds since 1970. Default: now.
        replaces: make points void that earlier event files in the folder hold. A resumed run
            sets this and gives all rows of its trace again before it goes on.

    Raises:
        InvalidSetting: the package tensorboard is missing.
        RunFolderError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, start: float | None = None, replaces: bool = False) -> None:
        self._start = clock.time() if start is None else start
        #: (samples, run time) of the newest point.
        self._last = (0, 0.0)
        self._staleness: Counter[int] = Counter()
        self._writer: SummaryWriter | None = None
        make: Callable[..., SummaryWriter] = _writer_class()
        try:
            # An evaluation can be watched soon after it was made.
            self._writer = make(str(folder), purge_step=0 if replaces else None, flush_secs=10)
        except OSError as error:
            raise RunFolderError(
                f"tensorboard: {folder} cannot be written ({error.strerror})"
            ) from None

    def row(self, row: Row) -> None:
        """Take one row of a trace in; rows of which nothing is shown pass by."""
        if isinstance(row, UpdateRow):
            num_samples = sum(row.num_samples)
            if num_samples:
                total = sum(n * x for n, x in zip(row.num_samples, row.losses, strict=True))
                self._scalar(row, "train/loss", total / num_samples)
            self._scalar(row, "train/learning_rate", row.learning_rate)
            if row.staleness:
                self._scalar(row, "train/staleness", sum(row.staleness) / len(row.staleness))
            self._staleness.update(row.staleness)
        elif isinstance(row, EvaluationRow):
            for name, value in row.metrics.items():
                if value is not None:
                    self._scalar(row, f"test/{name}", value)

    def close(self) -> None:
        """Write the histogram and close the files; closing twice is fine."""
        if self._writer is None:
            return
        if self._staleness:
            samples, time = self._last
            highest = max(self._staleness)
            self._writer.add_histogram(
                "staleness",
                np.repeat(list(self._staleness), list(self._staleness.values())),
                samples,
                bins=np.arange(highest + 2) - 0.5,  # one bar per staleness
                walltime=self._start + time,
            )
        self._writer.close()
        self._writer = None

    def _scalar(self, row: UpdateRow | EvaluationRow, tag: str, value: float) -> None:
        assert self._writer is not None, "not closed"
        # Evaluations made after the clock has stopped are of versions of before.
        self._last = max(self._last, (row.samples, row.time))
        self._writer.add_scalar(tag, value, row.samples, walltime=self._start + row.time)


def _writer_class() -> Any:
    with warnings.catch_warnings():
        # Importing tensorboard warns of what it uses of protobuf, numpy and pkg_resources, which
        # versions do so changes from month to month, and nobody here could do anything about it.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="pkg_resources is deprecated")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InvalidSetting(
                "tensorboard: expected the package tensorboard, which is not installed or too old; "
                "install it with `pip install gruppetto[tensorboard]`"
            ) from None
    return SummaryWriter
