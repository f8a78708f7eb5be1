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
from gruppetto.trace import EvaluationRow, ModuleRow, Row, UpdateRow, follow_rows

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from gruppetto.runs.folder import RunFolder
    from gruppetto.runs.journal import Listener

__all__ = [
    "TensorBoardLog",
    "follow_log",
    "has_event_files",
    "require_tensorboard",
    "tell_both",
]


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
    all applied gradients. Of decoupled runs also, for each module K and each of its updates,
    ``module K/used`` (share of the time since its update before in passes and steps), ``module
    K/staleness``, ``module K/in_flight`` (mini-batches) and, for modules with parameters, ``module
    K/learning_rate``.

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
        #: Rows that wait for the update they are of, which tells how many samples it is at.
        self._modules: list[ModuleRow] = []
        #: Module -> when its newest update was over.
        self._over: dict[int, float] = {}
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
        if isinstance(row, ModuleRow):
            self._modules.append(row)
        elif isinstance(row, UpdateRow):
            num_samples = sum(row.num_samples)
            if num_samples:
                total = sum(n * x for n, x in zip(row.num_samples, row.losses, strict=True))
                self._scalar(row, "train/loss", total / num_samples)
            self._scalar(row, "train/learning_rate", row.learning_rate)
            if row.staleness:
                self._scalar(row, "train/staleness", sum(row.staleness) / len(row.staleness))
            self._staleness.update(row.staleness)
            self._take_modules(row)
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

    def _take_modules(self, update: UpdateRow) -> None:
        """Write the modules' rows of an update; a module's own came at times of its own."""
        for row in self._modules:
            name = f"module {row.module}"
            since = row.time - self._over.get(row.module, 0.0)
            used = row.forward + row.backward + row.step
            at = (update.samples, row.time)
            if since > 0.0:
                self._point(at, f"{name}/used", min(1.0, used / since))
            self._point(at, f"{name}/staleness", row.staleness)
            self._point(at, f"{name}/in_flight", row.in_flight)
            if row.learning_rate:
                self._point(at, f"{name}/learning_rate", row.learning_rate)
            self._over[row.module] = row.time
        self._modules.clear()

    def _scalar(self, row: UpdateRow | EvaluationRow, tag: str, value: float) -> None:
        self._point((row.samples, row.time), tag, value)

    def _point(self, at: tuple[int, float], tag: str, value: float) -> None:
        assert self._writer is not None, "not closed"
        # Evaluations made after the clock has stopped are of versions of before.
        self._last = max(self._last, at)
        samples, time = at
        self._writer.add_scalar(tag, value, samples, walltime=self._start + time)


def follow_log(folder: RunFolder, row: int | None) -> TensorBoardLog:
    """The log of a run that begins now, or goes on after an event row: it is written again then."""
    log = TensorBoardLog(
        folder.path / "tensorboard", start=folder.started_at(), replaces=row is not None
    )
    if row is not None:
        for each in follow_rows(folder.trace, up_to=row):
            log.row(each)
    return log


def tell_both(on_event: Listener | None, log: TensorBoardLog | None) -> Listener | None:
    """A listener that also writes rows to a log, where there is one."""
    if log is None:
        return on_event

    def tell(row: Row) -> object:
        log.row(row)
        return None if on_event is None else on_event(row)

    return tell


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
