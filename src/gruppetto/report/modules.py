"""Where each module's time went in a decoupled run, and how its passes lay at the beginning.

Times come from module rows and events, so also of a run that was killed or goes on; memory and what
a module consists of are in the end row. Runs of learners have none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from gruppetto.protocols.messages import BackwardFinished, ForwardFinished
from gruppetto.report.data import ReportedRun, number_or_none
from gruppetto.trace import ModuleRow

__all__ = [
    "ModuleReport",
    "ModuleSpent",
    "Pass",
    "first_passes",
    "module_reports",
    "num_modules",
    "speed",
    "utilisation",
]

PassKind = Literal["forward", "backward", "step"]
_FORWARD: Final = ForwardFinished.__name__
_BACKWARD: Final = BackwardFinished.__name__


@dataclass(frozen=True)
class ModuleSpent:
    """Run time of one module, in the run's own unit; together it is all its time."""

    forward: float = 0.0
    backward: float = 0.0
    #: Combining, clipping, optimizer.
    step: float = 0.0
    #: Fetching samples.
    loading: float = 0.0
    #: From the second pass on: activations of the module before.
    waiting_for_inputs: float = 0.0
    waiting_for_gradients: float = 0.0
    #: For room to send, and at barriers.
    waiting_for_others: float = 0.0
    #: Before its first pass: until what the modules before it send arrives for the first time.
    start: float = 0.0
    #: After its last update, until the run was over; 0 while a run goes on, or was killed.
    end: float = 0.0
    #: What no row accounts for: sending, handing in weights.
    rest: float = 0.0

    def parts(self) -> list[float]:
        """In the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts())

    @property
    def computing(self) -> float:
        """In passes and steps."""
        return self.forward + self.backward + self.step


@dataclass(frozen=True)
class ModuleReport:
    """One module's part in a run. Modules count from 1."""

    module: int
    updates: int
    mean_staleness: float
    max_staleness: int
    spent: ModuleSpent
    #: Mini-batches per unit of run time between its first and its last update; None for fewer.
    rate: float | None
    #: Memory taken at most, above what it had before its first pass; None where nothing tells.
    peak_bytes: int | None
    #: What was predicted of it.
    predicted_bytes: int | None
    #: Name of its first block; None without an end row.
    begins_at: str | None
    #: How many; None without an end row.
    parameters: int | None

    @property
    def utilisation(self) -> float:
        """Share of its time in passes and steps, in [0, 1]."""
        total = self.spent.total
        return self.spent.computing / total if total else 0.0


@dataclass(frozen=True)
class Pass:
    """When a module ran a mini-batch forward or backward, or applied its gradient; run time."""

    module: int
    kind: PassKind
    mini_batch: int
    start: float
    end: float


def module_reports(run: ReportedRun) -> list[ModuleReport]:
    """Every module that has made an update, by number; empty for runs that are not decoupled."""
    told = _told(run)
    begun = _first_starts(run)
    reports = []
    for module, rows in sorted(_rows_of(run).items()):
        span = rows[-1].time - rows[0].time
        known = told.get(module, {})
        blocks = known.get("blocks")
        reports.append(
            ModuleReport(
                module,
                len(rows),
                sum(row.staleness for row in rows) / len(rows),
                max(row.staleness for row in rows),
                _spent(rows, begun.get(module), run),
                (len(rows) - 1) / span if span > 0.0 else None,
                _count(known, "peak_bytes"),
                _count(known, "predicted_bytes"),
                str(blocks[0]) if isinstance(blocks, list) and blocks else None,
                _count(known, "parameters"),
            )
        )
    return reports


def utilisation(run: ReportedRun) -> float | None:
    """Mean over the modules, in [0, 1]; None where no module has made an update."""
    reports = module_reports(run)
    return sum(each.utilisation for each in reports) / len(reports) if reports else None


def speed(run: ReportedRun) -> float | None:
    """Mini-batches per unit of run time of the slowest module; None where no two were applied."""
    rates = [each.rate for each in module_reports(run)]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def num_modules(run: ReportedRun) -> int | None:
    """K by the cuts in the settings, else as many as have made an update; None if unknown."""
    begins = run.settings.get("begins") if run.is_decoupled else None
    return len(begins) + 1 if isinstance(begins, list) else max(_rows_of(run), default=None)


def _rows_of(run: ReportedRun) -> dict[int, list[ModuleRow]]:
    rows: dict[int, list[ModuleRow]] = {}
    for row in run.trace.modules:
        rows.setdefault(row.module, []).append(row)
    return rows


def _told(run: ReportedRun) -> dict[int, Mapping[str, object]]:
    told = run.result("per_module")
    if not isinstance(told, list):
        return {}
    return {_count(each, "module") or 0: each for each in told if isinstance(each, Mapping)}


def _count(of: Mapping[str, object], key: str) -> int | None:
    number = number_or_none(of.get(key))
    return None if number is None else int(number)


def _accounted(row: ModuleRow) -> float:
    waiting = row.waiting_for_inputs + row.waiting_for_gradients + row.waiting_for_others
    return row.loading + row.forward + row.backward + row.step + waiting


def _spent(rows: Sequence[ModuleRow], begun: float | None, run: ReportedRun) -> ModuleSpent:
    """Where a module's time went; ``begun`` is when its first pass did, None where unknown."""
    first, last = rows[0], rows[-1]
    inputs = sum(row.waiting_for_inputs for row in rows)
    # Negative where a process was there, and waited, before the run's clock went.
    before = first.time - _accounted(first)
    start = max(0.0, before)
    if before < 0.0:
        inputs -= min(-before, first.waiting_for_inputs)
    if begun is not None and first.module > 1:
        taken = max(0.0, min(begun - start, first.waiting_for_inputs + min(before, 0.0)))
        inputs -= taken
        start += taken
    end = max(0.0, run.outcome.time - last.time) if run.outcome.has_ended else 0.0
    known = ModuleSpent(
        forward=sum(row.forward for row in rows),
        backward=sum(row.backward for row in rows),
        step=sum(row.step for row in rows),
        loading=sum(row.loading for row in rows),
        waiting_for_inputs=max(0.0, inputs),
        waiting_for_gradients=sum(row.waiting_for_gradients for row in rows),
        waiting_for_others=sum(row.waiting_for_others for row in rows),
        start=start,
        end=end,
    )
    rest = last.time + end - known.total
    # What rounding leaves over is nothing.
    return replace(known, rest=rest if rest > 1e-9 * last.time else 0.0)


def first_passes(run: ReportedRun, updates: int) -> list[Pass]:
    """The passes of each module up to so many of its updates, in the order of its column.

    Events tell when a pass was over, and rows how long it took. A row counts several forward
    passes as one where a module runs ahead at its beginning; those are taken to be as long as each
    other, as far as that fits between their ends.
    """
    rows = {module: each[:updates] for module, each in _rows_of(run).items()}
    passes: list[Pass] = []
    for module, column in sorted(_columns(run, rows).items()):
        over = 0.0
        forwards: list[tuple[int, float]] = []
        waiting = iter(rows[module])
        for kind, mini_batch, time in column:
            if kind == _FORWARD:
                forwards.append((mini_batch, time))
                continue
            row = next(waiting)
            lengths = _lengths(row.forward, over, [end for _, end in forwards])
            for (number, end), length in zip(forwards, lengths, strict=True):
                passes.append(Pass(module, "forward", number, end - length, end))
            over = forwards[-1][1] if forwards else over
            start = max(over, time - row.backward)
            passes.append(Pass(module, "backward", mini_batch, start, time))
            begins = max(time, row.time - row.step)
            passes.append(Pass(module, "step", mini_batch, begins, max(begins, row.time)))
            over = max(begins, row.time)
            forwards = []
    return passes


def _columns(
    run: ReportedRun, rows: Mapping[int, Sequence[ModuleRow]]
) -> dict[int, list[tuple[str, int, float]]]:
    """Module -> (event, mini-batch, when) up to the backward pass of its last row given."""
    left = {module: len(each) for module, each in rows.items()}
    columns: dict[int, list[tuple[str, int, float]]] = {module: [] for module in rows}
    for time, event in _pass_ends(run):
        if left.get(event.module):
            is_backward = isinstance(event, BackwardFinished)
            name = _BACKWARD if is_backward else _FORWARD
            columns[event.module].append((name, event.mini_batch, time))
            left[event.module] -= is_backward
            if is_backward and not any(left.values()):
                break
    return columns


def _first_starts(run: ReportedRun) -> dict[int, float]:
    """When each module's first pass began."""
    starts: dict[int, float] = {}
    for each in first_passes(run, 1):
        starts.setdefault(each.module, each.start)
    return starts


def _pass_ends(run: ReportedRun) -> Iterator[tuple[float, ForwardFinished | BackwardFinished]]:
    for row in run.trace.events:
        if row.type in (_FORWARD, _BACKWARD):  # decoding the others would cost time
            event = row.decode()
            assert isinstance(event, ForwardFinished | BackwardFinished)
            yield row.time, event


def _lengths(total: float, begin: float, ends: Sequence[float]) -> list[float]:
    """Split a time over passes that end at given times: evenly, but none longer than its room."""
    rooms = [end - start for start, end in zip([begin, *ends], ends, strict=False)]
    lengths = [0.0] * len(rooms)
    left = total
    for place, index in enumerate(sorted(range(len(rooms)), key=rooms.__getitem__)):
        lengths[index] = max(0.0, min(rooms[index], left / (len(rooms) - place)))
        left -= lengths[index]
    return lengths
