"""A progress bar on standard error, and what is worth saying beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from gruppetto.runs.settings import Settings

__all__ = ["Progress", "announce", "standard_error"]

_MAX_WARNINGS: Final = 3


def standard_error() -> Console:
    """The console that everything but results goes to."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def announce(settings: Settings) -> None:
    """Say what is about to run; nothing that changes the learning is hidden."""
    why = ""
    if settings.modulation_is_default and settings.modulation != "none":
        why = " (the default of asynchronous protocols; modulation none turns it off)"
    after, shared, scaled, changed = "", "", "", ""
    if settings.warmup is not None:
        after = f" after warm-up {settings.warmup}"
    if settings.scale_batch is not None:
        shared = f" ({settings.scale_batch})"
    if settings.scale_lr is not None:
        scaled = f" with its rate times {settings.rate_scale:.4g} ({settings.scale_lr})"
    if settings.compensation != "none":
        changed = f", compensation {settings.compensation}"
    standard_error().print(
        f"{settings.task}: {settings.protocol}{after}, {settings.learners} learners, "
        f"mini-batches of {settings.batch_size}{shared}, "
        f"optimizer {settings.optimizer or 'as given'}{scaled}, "
        f"modulation {settings.modulation}{why}{changed}",
        markup=False,
    )


class Progress:
    """One bar for one run; silent where nobody looks.

    Args:
        label: what is running.
        total_samples: of the whole run; None when it has no known end.
        is_shown: None shows it when standard error is a terminal.
    """

    def __init__(
        self, label: str, total_samples: float | None, is_shown: bool | None = None
    ) -> None:
        self.console = standard_error()
        shown = sys.stderr.isatty() if is_shown is None else is_shown
        self._is_silent = is_shown is False
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %" if total_samples else "{task.completed:.0f}"),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not shown,
            refresh_per_second=5,
        )
        self._task = self._bar.add_task(label, total=total_samples, news="")
        self._metrics = ""
        self._num_warnings = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, samples: int, version: int, time: float) -> None:
        """So many samples applied, so many updates, so much run time."""
        if not self._bar.disable:
            news = f"{version} updates, {time:.4g} s {self._metrics}"
            self._bar.update(self._task, completed=samples, news=news)

    def show(self, metrics: Mapping[str, float | None]) -> None:
        """The newest evaluation."""
        self._metrics = " ".join(
            f"{name} {'not finite' if value is None else format(value, '.4g')}"
            for name, value in metrics.items()
        )

    def warn(self, text: str) -> None:
        """Say something that must not be missed; the trace has what is said too often."""
        self._num_warnings += 1
        if self._is_silent or self._num_warnings > _MAX_WARNINGS:
            return
        if self._num_warnings == _MAX_WARNINGS:
            text += " (more of these are in the trace only)"
        self.console.print(f"gruppetto: {text}", markup=False)
