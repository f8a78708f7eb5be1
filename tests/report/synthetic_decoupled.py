"""Made-up decoupled runs: passes laid out by the schedule, with scatter; rows in groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import numpy as np
from synthetic_runs import VERSIONS

from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.schedule import Action, Schedule
from gruppetto.protocols.messages import (
    BackwardFinished,
    Event,
    ForwardFinished,
    ModuleUpdated,
)
from gruppetto.report import ReportedRun
from gruppetto.trace import (
    EndRow,
    EvaluationRow,
    EventRow,
    ModuleRow,
    Trace,
    UpdateRow,
    encode_message,
)

MIB = 2**20


@dataclass
class Laid:
    """One pass: when it began and ended, and what its module waited for before."""

    action: Action
    loading: float
    inputs: float
    gradients: float
    others: float
    start: float
    end: float
    step: float = 0.0


@dataclass
class Column:
    """What one module has done so far."""

    passes: list[Laid] = field(default_factory=list)
    free_at: float = 0.0
    num_forwards: int = 0
    version: int = 0


def lay_out(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    loading: float = 0.0,
    step: float = 0.0,
    scatter: float = 0.0,
    seed: int = 0,
) -> dict[int, list[Laid]]:
    """Run a schedule that ends: module -> its passes, each as soon as it can be."""
    random = np.random.default_rng([seed, 2])
    columns = {k: Column() for k in range(1, schedule.num_modules + 1)}
    begun: dict[Action, float] = {}
    over: dict[Action, float] = {}

    def advance(module: int) -> bool:
        column = columns[module]
        action = schedule.next_action(module, column.num_forwards, column.version)
        if action is None or not all(needed in over for needed in schedule.needs(action)):
            return False
        ready = [column.free_at, column.free_at, column.free_at]  # inputs, gradients, others
        for needed in schedule.needs(action):
            if needed.module == module - 1 and action.kind == "F":
                kind = 0
            else:
                kind = 1 if needed.module == module + 1 and action.kind == "B" else 2
            ready[kind] = max(ready[kind], over[needed])
        if action.kind == "F" and module < schedule.num_modules:
            room = Action(module + 1, "F", action.mini_batch - schedule.capacity)
            if room.mini_batch >= 0:
                if room not in begun:
                    return False
                ready[2] = max(ready[2], begun[room])
        scale = random.gamma(1 / scatter**2, scatter**2) if scatter else 1.0
        length = scale * (forward if action.kind == "F" else backward)[module - 1]
        loads = loading if module == 1 and action.kind == "F" else 0.0
        waits = [at - column.free_at for at in ready]
        longest = int(np.argmax(waits))
        spans = [wait if kind == longest else 0.0 for kind, wait in enumerate(waits)]
        start = max(ready) + loads
        laid = Laid(action, loads, *spans, start, start + length)
        begun[action] = start
        column.free_at = laid.end
        if action.kind == "F":
            column.num_forwards += 1
        else:
            column.version += 1
            laid.step = step
            column.free_at += step
        over[action] = column.free_at
        column.passes.append(laid)
        return True

    while any(advance(module) for module in columns):
        pass
    return {module: column.passes for module, column in columns.items()}


def groups_of(passes: Sequence[Laid]) -> list[list[Laid]]:
    """A module's passes by the update they belong to."""
    groups: list[list[Laid]] = [[]]
    for laid in passes:
        groups[-1].append(laid)
        if laid.action.kind == "B":
            groups.append([])
    return groups[:-1]


def module_row(group: Sequence[Laid], in_flight: int, delay: int) -> ModuleRow:
    """The row that a module writes for one update."""
    *forwards, last = group
    batch = last.action.mini_batch
    return ModuleRow(
        module=last.action.module,
        mini_batch=batch,
        time=last.end + last.step,
        staleness=min(delay, batch),
        loading=sum(each.loading for each in group),
        forward=sum(each.end - each.start for each in forwards),
        backward=last.end - last.start,
        step=last.step,
        waiting_for_inputs=sum(each.inputs for each in group),
        waiting_for_gradients=sum(each.gradients for each in group),
        waiting_for_others=sum(each.others for each in group),
        in_flight=in_flight,
        learning_rate=0.1,
    )


def decoupled_trace(
    delays: Sequence[int],
    *,
    mini_batches: int = 60,
    forward: Sequence[float],
    backward: Sequence[float],
    barrier: bool = False,
    evaluations: int = 6,
    final_error: float = 0.05,
    groups: int | None = None,
    ends: bool = True,
    seed: int = 0,
    **times: float,
) -> Trace:
    """The trace of a run over so many mini-batches; of ``groups`` whole groups where killed."""
    schedule = Schedule(tuple(delays), mini_batches, barrier=barrier)
    laid = lay_out(schedule, forward, backward, seed=seed, **times)
    by_module = {module: groups_of(passes) for module, passes in laid.items()}
    trace, random = Trace(), np.random.default_rng(seed)

    def event(at: float, of: Event) -> None:
        body = msgspec.Raw(encode_message(of))
        trace.add(EventRow(len(trace.events), at, at, type(of).__name__, body, "0" * 16))

    def evaluate(version: int, at: float) -> None:
        error = final_error + (0.9 - final_error) * np.exp(-6.0 * version / mini_batches)
        error = float(min(1.0, error * (1.0 + 0.05 * random.standard_normal())))
        metrics: dict[str, float | None] = {"loss": 2.5 * error, "accuracy": 1.0 - error}
        samples, epoch = 32 * version, 5.0 * version / mini_batches
        trace.add(EvaluationRow(version, at, samples, epoch, None, metrics))

    for module in laid:
        event(0.0, ModuleUpdated(module, 0))
    if evaluations:
        evaluate(0, 0.0)
    in_flight: dict[int, int] = defaultdict(int)
    for version in range(mini_batches if groups is None else groups):
        loss = float(0.05 + 2.2 * np.exp(-6.0 * version / mini_batches) * random.gamma(9.0, 1 / 9))
        rows = []
        for module, each in by_module.items():
            group = each[version]
            for one in group[:-1]:
                told = loss if module == len(delays) else None
                event(one.end, ForwardFinished(module, one.action.mini_batch, version, told))
            event(group[-1].end, BackwardFinished(module, version, version))
            in_flight[module] += len(group) - 2
            rows.append(module_row(group, in_flight[module], delays[module - 1]))
            event(rows[-1].time, ModuleUpdated(module, version + 1))
            trace.add(rows[-1])
        now = max(row.time for row in rows)
        num = len(rows)
        trace.add(
            UpdateRow(
                version=version + 1, time=now, samples=32 * (version + 1),
                epoch=5.0 * (version + 1) / mini_batches, learning_rate=0.1,
                staleness=[row.staleness for row in rows], num_samples=[32] * num,
                factors=[1.0] * num, learners=list(by_module), losses=[loss] * num,
                applied=version + 1, cancelled=0, discarded=0, given_up=0,
            )
        )  # fmt: skip
        if evaluations and (version + 1) % max(1, mini_batches // evaluations) == 0:
            evaluate(version + 1, now)
    if ends:
        trace.add(EndRow(len(trace.events), _result(trace, delays, seed), "0" * 64))
    return trace


def _result(trace: Trace, delays: Sequence[int], seed: int) -> dict[str, Any]:
    last = trace.updates[-1]
    metrics = trace.evaluations[-1].metrics if trace.evaluations else {}
    staleness = [s for row in trace.updates for s in row.staleness]
    return {
        "stopped_by": "epochs",
        "modules": len(delays),
        "updates": last.version,
        "samples": last.samples,
        "epochs": 5.0,
        "time": max(row.time for row in trace.modules),
        "test_loss": metrics.get("loss"),
        "test_accuracy": metrics.get("accuracy"),
        "mean_staleness": sum(staleness) / len(staleness),
        "max_staleness": max(staleness),
        "mini_batches_applied": last.version,
        "per_module": [
            {
                "module": module,
                "blocks": [f"layer{module}.0", f"layer{module}.1"],
                "parameters": 125_000 * module,
                "peak_bytes": int((12.5 + 9 * delay) * MIB),
                "predicted_bytes": int((12 + 9 * delay) * MIB),
            }
            for module, delay in enumerate(delays, start=1)
        ],
        "weights_sha256": f"{seed:02d}ab" * 16,
        "state_sha256": f"{seed:02d}cd" * 16,
        "events_sha256": f"{seed:02d}ef" * 16,
    }


def decoupled_settings(decouple: str, **more: Any) -> dict[str, object]:
    """Settings as a decoupled run's folder holds them: neither protocol nor learners."""
    settings: dict[str, object] = {
        "task": "digits",
        "engine": "local",
        "decouple": decouple,
        "tail": "drain",
        "begins": [f"layer{k}.0" for k in range(2, METHODS.parse(decouple).modules + 1)],
        "modulation": "none",
        "batch_size": 32,
        "epochs": 5,
        "seed": 0,
        "optimizer": "sgd:lr=0.1,momentum=0.9",
    }
    return settings | more


def decoupled_run(
    decouple: str = "ddg:modules=2",
    trace: Trace | None = None,
    name: str | None = None,
    **settings: Any,
) -> ReportedRun:
    """One run; without a trace, a short one that ended."""
    if trace is None:
        trace = decoupled_trace((1, 0), forward=(0.01, 0.01), backward=(0.02, 0.02))
    return ReportedRun(
        name or decouple,
        f"runs/{decouple.split(':')[0]}",
        decoupled_settings(decouple, **settings),
        VERSIONS,
        trace,
    )


@cache
def decoupled_runs() -> tuple[ReportedRun, ...]:
    """The methods side by side on a network whose first module is the costlier one."""
    shapes: dict[str, tuple[tuple[int, ...], bool]] = {
        "bp:modules=2": ((0, 0), False),
        "ddg:modules=2": ((1, 0), False),
        "ddg:modules=2,schedule=barrier": ((1, 0), True),
        "ddg:modules=4": ((3, 2, 1, 0), False),
        "fdg:modules=2": ((2, 0), False),
    }
    runs = []
    for seed, (decouple, (delays, barrier)) in enumerate(shapes.items()):
        size = len(delays)
        trace = decoupled_trace(
            delays,
            mini_batches=180,
            forward=[0.040 / size * (1.15 if k == 0 else 1.0) for k in range(size)],
            backward=[0.080 / size * (1.15 if k == 0 else 1.0) for k in range(size)],
            barrier=barrier,
            loading=0.001,
            step=0.003 / size,
            scatter=0.08,
            seed=seed,
            final_error=0.05 + 0.004 * seed,
        )
        runs.append(decoupled_run(decouple, trace))
    return tuple(runs)
