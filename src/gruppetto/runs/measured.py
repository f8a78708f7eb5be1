"""How long mini-batches took, out of a run's trace: what laws of delays are fitted to."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from gruppetto.errors import ImpossibleEvent, TraceError
from gruppetto.protocols.messages import (
    Cancel,
    Compute,
    GradientFailed,
    GradientPushed,
    LearnerLost,
)
from gruppetto.runs.parts import build_coordinator, count_mini_batches
from gruppetto.runs.settings import Settings, read_settings
from gruppetto.trace import MessageDigest, Trace, read_trace
from gruppetto.trace.folder import read_config

__all__ = ["MeasuredDelays", "measured_delays"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredDelays:
    """Seconds of a run's leases, waiting for weights and for work left out."""

    #: learner -> of those that brought a gradient, in order.
    samples: dict[int, Floats]
    #: learner -> of those that were cancelled: they would have taken longer. Only above 0.
    censored: dict[int, Floats]
    #: What to know about them, each in a sentence.
    notes: tuple[str, ...]


def measured_delays(run: str | Path) -> MeasuredDelays:
    """Read how long each mini-batch of a run took.

    With real processes that is the injected delay, loading and computing, by the learner's clock;
    in virtual time the time from its ``Compute`` to its push. A run that was interrupted will do.

    Args:
        run: its folder.

    Raises:
        RunFolderError: no run there.
        TraceError: a trace that cannot be read, that tells of no finished mini-batch, or whose
            events do not lead to what it recorded.
    """
    folder = Path(run)
    settings = read_settings(Settings, read_config(folder).settings)
    trace = read_trace(folder / "trace")
    spans = _Spans()
    if trace.work:
        _read_work(trace, spans)
    else:
        _fold(trace, settings, spans, folder)
    samples = {n: np.array(spans.whole[n]) for n in sorted(spans.whole)}
    censored = {n: np.array(cut) for n, cut in sorted(spans.cut.items())}
    if not samples:
        raise TraceError(
            f"{run} tells of no finished mini-batch; expected a run that has brought gradients"
        )
    notes = []
    if trace.end is None:
        notes.append(
            "the run did not end (killed, or still running): what it did until then counts"
        )
    notes += [
        f"left out: {count} mini-batches whose {what}" for what, count in spans.left_out.items()
    ]
    return MeasuredDelays(samples, censored, tuple(notes))


class _Spans:
    """Seconds by learner, as they are found."""

    def __init__(self) -> None:
        self.whole: dict[int, list[float]] = defaultdict(list)
        self.cut: dict[int, list[float]] = defaultdict(list)
        self.left_out: Counter[str] = Counter()

    def add_cut(self, learner: int, seconds: float) -> None:
        """A cancelled lease; one that had not begun tells nothing."""
        if seconds > 0.0:
            self.cut[learner].append(seconds)


_FAILED: Final = "gradient failed"
_LOST: Final = "learner was lost"


def _read_work(trace: Trace, spans: _Spans) -> None:
    for row in trace.work:
        seconds = row.delay + row.loading + row.computing
        if row.outcome == "pushed":
            spans.whole[row.learner].append(seconds)
        elif row.outcome == "cancelled":
            spans.add_cut(row.learner, seconds)
        else:
            spans.left_out[_FAILED] += 1


def _fold(trace: Trace, settings: Settings, spans: _Spans, folder: Path) -> None:
    """Feed the events again: commands, and who computes what since when, follow from them."""
    per_epoch = _batches_per_epoch(trace, settings.batch_size)
    total = None
    if settings.epochs is not None and per_epoch is not None:
        total = count_mini_batches(settings.epochs, per_epoch)
    coordinator = build_coordinator(settings, total, per_epoch or 1)
    digest = MessageDigest()
    started: dict[int, tuple[int, float]] = {}
    #: Cancelled, and perhaps still to come: lease -> learner, start, end.
    cut: dict[int, tuple[int, float, float]] = {}
    time = 0.0
    for row in trace.events:
        time = row.time
        try:
            event = row.decode()
            commands = coordinator.handle(event)
        except (msgspec.DecodeError, KeyError, ImpossibleEvent) as error:
            raise _does_not_follow(folder, row.row) from error
        match event:
            case GradientPushed(lease=lease):
                learner, start, *_ = started.pop(lease, None) or cut.pop(lease, None) or (-1, 0.0)
                if learner >= 0:  # or it came a second time
                    spans.whole[learner].append(time - start)
            case GradientFailed(lease=lease) if started.pop(lease, None):
                spans.left_out[_FAILED] += 1
            case LearnerLost(learner=lost):
                for lease in [lease for lease, (n, _) in started.items() if n == lost]:
                    del started[lease]
                    spans.left_out[_LOST] += 1
        for command in commands:
            digest.add(command)
            if isinstance(command, Compute):
                started[command.lease] = command.learner, time
            elif isinstance(command, Cancel) and command.lease in started:
                cut[command.lease] = (*started.pop(command.lease), time)
        if digest.hexdigest()[:16] != row.commands:
            raise _does_not_follow(folder, row.row)
    # Whoever was at work when the trace breaks off would have taken longer, too.
    cut.update({lease: (*known, time) for lease, known in started.items()})
    for learner, start, end in cut.values():
        spans.add_cut(learner, end - start)


def _batches_per_epoch(trace: Trace, batch_size: int) -> int | None:
    """From the counts at the last update; None without one."""
    if not trace.updates:
        return None
    last = trace.updates[-1]
    return -(-round(last.samples / last.epoch) // batch_size)


def _does_not_follow(folder: Path, row: int) -> TraceError:
    return TraceError(
        f"{folder}: from event row {row} on its events do not lead to the commands it recorded; "
        "expected the trace of a run made by this version, and not edited"
    )
