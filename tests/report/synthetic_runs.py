"""Made-up runs with the shapes real ones have: errors fall with noise, staleness scatters."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from gruppetto.report import ReportedRun, distinct_labels
from gruppetto.trace import EndRow, EvaluationRow, EventRow, Trace, UpdateRow, WorkRow

VERSIONS = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "numpy": "2.4.6",
    "gruppetto": "0.1.0",
    "platform": "Linux x86_64",
}


def make_trace(
    *,
    updates: int = 60,
    step: float = 1.0,
    size: int = 1,
    mean_staleness: float = 0.0,
    evaluations: int = 12,
    final_error: float = 0.04,
    cancelled: int = 0,
    discarded: int = 0,
    given_up: int = 0,
    metrics: tuple[str, ...] = ("loss", "accuracy"),
    ends: bool = True,
    seed: int = 0,
) -> Trace:
    """A trace of ``updates`` updates of ``size`` contributions each, ``step`` time apart."""
    random = np.random.default_rng(seed)
    trace = Trace()
    time = 0.0
    every = max(1, updates // evaluations) if evaluations else 0
    staleness: list[int] = []

    def evaluate(version: int) -> None:
        share = version / updates
        error = final_error + (0.9 - final_error) * np.exp(-7.0 * share)
        error *= 1.0 + 0.06 * random.standard_normal()
        values = {"loss": 2.5 * error, "accuracy": 1.0 - min(error, 1.0)}
        trace.add(
            EvaluationRow(
                version=version,
                time=time,
                samples=32 * size * version,
                epoch=5.0 * share,
                train_loss=None,
                metrics={name: float(values[name]) for name in metrics},
            )
        )

    if evaluations:
        evaluate(0)
    for version in range(1, updates + 1):
        time += step * random.gamma(4.0, 0.25)
        now = [int(s) for s in np.minimum(random.poisson(mean_staleness, size), version - 1)]
        staleness += now
        losses = 0.05 + 2.2 * np.exp(-6.0 * version / updates) * random.gamma(9.0, 1 / 9, size)
        share = version / updates
        trace.add(
            UpdateRow(
                version=version,
                time=time,
                samples=32 * size * version,
                epoch=5.0 * share,
                learning_rate=0.1,
                staleness=now,
                num_samples=[32] * size,
                factors=[1.0] * size,
                learners=list(range(size)),
                losses=[float(x) for x in losses],
                applied=size * version,
                cancelled=int(cancelled * share),
                discarded=int(discarded * share),
                given_up=int(given_up * share),
            )
        )
        if every and version % every == 0:
            evaluate(version)
    if ends:
        last = trace.evaluations[-1].metrics if trace.evaluations else {}
        result: dict[str, Any] = {
            "stopped_by": "epochs",
            "updates": updates,
            "samples": 32 * size * updates,
            "epochs": 5.0,
            "time": time,
            "test_loss": last.get("loss"),
            "test_accuracy": last.get("accuracy"),
            "mean_staleness": sum(staleness) / len(staleness) if staleness else 0.0,
            "max_staleness": max(staleness, default=0),
            "mini_batches_applied": size * updates,
            "mini_batches_cancelled": cancelled,
            "mini_batches_discarded": discarded,
            "mini_batches_given_up": given_up,
            "weights_sha256": f"{seed:02d}ab" * 16,
            "state_sha256": f"{seed:02d}cd" * 16,
            "events_sha256": f"{seed:02d}ef" * 16,
        }
        trace.add(EndRow(rows=3 * updates, result=result, commands_sha256="0" * 64))
    else:
        trace.add(
            EventRow(
                row=3 * updates,
                time=time + 0.5,
                wall_time=time + 1.0,
                type="StopRequested",
                event=msgspec.Raw(b'{"reason":"test"}'),
                commands="0" * 16,
            )
        )
    return trace


def make_settings(protocol: str = "hardsync", **more: Any) -> dict[str, object]:
    """Settings as a run folder holds them."""
    settings: dict[str, object] = {
        "task": "digits",
        "engine": "virtual",
        "protocol": protocol,
        "modulation": "inverse-mean:cap=true",
        "learners": 4,
        "batch_size": 32,
        "epochs": 5,
        "delay": None,
        "seed": 0,
        "optimizer": "sgd:lr=0.1,momentum=0.9",
    }
    return settings | more


def make_run(
    protocol: str = "hardsync",
    trace: Trace | None = None,
    name: str | None = None,
    **settings: Any,
) -> ReportedRun:
    """One run; without a trace, a short one that ended."""
    return ReportedRun(
        name=name or protocol,
        folder=f"runs/{protocol.split(':')[0]}",
        settings=make_settings(protocol, **settings),
        versions=VERSIONS,
        trace=trace if trace is not None else make_trace(),
    )


def four_runs(**settings: Any) -> list[ReportedRun]:
    """Four protocols on 8 learners, the way a comparison looks."""
    made: dict[str, dict[str, Any]] = {
        "hardsync": {"updates": 60, "step": 2.7, "size": 8},
        "k-sync:k=6": {"updates": 80, "step": 1.2, "size": 6, "cancelled": 150},
        "k-batch-async:k=4": {"updates": 120, "step": 0.5, "size": 4, "mean_staleness": 1.75},
        "async": {
            "updates": 480, "step": 0.125, "mean_staleness": 7.0, "final_error": 0.06,
            "evaluations": 24, "discarded": 12, "given_up": 3,
        },
    }  # fmt: skip
    return [
        make_run(protocol, make_trace(seed=seed, **shape), **settings)
        for seed, (protocol, shape) in enumerate(made.items())
    ]


def eight_runs() -> list[ReportedRun]:
    """The grid of four protocols and two modulations."""
    settings = [
        make_settings(protocol, modulation=modulation, engine="local", learners=16)
        for protocol in ("hardsync", "k-sync:k=12", "k-batch-async:k=8", "async")
        for modulation in ("none", "inverse-mean:cap=true")
    ]
    traces = [
        make_trace(
            seed=i,
            updates=40 + 60 * i,
            step=2.0 / (1 + i),
            mean_staleness=1.5 * i,
            cancelled=40 * (i in (2, 3)),
            final_error=0.03 + 0.005 * i,
        )
        for i in range(8)
    ]
    return [
        ReportedRun(name, f"runs/{index:03d}", each, VERSIONS, trace)
        for index, (name, each, trace) in enumerate(
            zip(distinct_labels(settings), settings, traces, strict=True)
        )
    ]


def add_work(
    trace: Trace,
    learners: int,
    *,
    computing: float = 0.03,
    delay: float = 0.02,
    waiting: float = 0.01,
    loading: float = 0.002,
    cancelled: float = 0.0,
    replaced: int | None = None,
    seed: int = 0,
) -> Trace:
    """Fill learners' time until shortly before the run's end, with scatter.

    Args:
        trace: ended; it is changed and returned.
        learners: how many work.
        computing: mean seconds of a lease, and so on.
        cancelled: share of leases that are cancelled halfway.
        replaced: this learner dies at half the run, a new one takes its place a little later.
        seed: of the scatter.
    """
    assert trace.end is not None
    random = np.random.default_rng([seed, 1])
    end = float(trace.end.result["time"])
    lives = [(learner, 0.0, end) for learner in range(learners)]
    events = [("LearnerJoined", learner, 0.0) for learner in range(learners)]
    if replaced is not None:
        lives[replaced] = (replaced, 0.0, 0.5 * end)
        lives.append((learners, 0.6 * end, end))
        events += [("LearnerLost", replaced, 0.5 * end), ("LearnerJoined", learners, 0.6 * end)]
    for kind, learner, at in events:
        reason = b',"reason":"killed"' if kind == "LearnerLost" else b""
        body = msgspec.Raw(b'{"learner":%d%b}' % (learner, reason))
        trace.add(EventRow(len(trace.events), at, at, kind, body, "0" * 16))
    rows = []
    for learner, start, stop in lives:
        slowness = 1.0 + 0.5 * (learner % 4 == 3)
        time = start
        while True:
            parts = random.gamma(4.0, 0.25, 4) * [waiting, delay * slowness, loading, computing]
            is_cancelled = random.random() < cancelled
            if is_cancelled:
                parts[1:] *= 0.5
            time += float(parts.sum())
            if time >= stop:
                break
            outcome = "cancelled" if is_cancelled else "pushed"
            rows.append(WorkRow(0, learner, 0, outcome, time, *(float(x) for x in parts)))
    for number, row in enumerate(sorted(rows, key=lambda row: row.time)):
        trace.add(msgspec.structs.replace(row, lease=number, mini_batch=number))
    return trace


def local_run(
    protocol: str = "hardsync",
    *,
    learners: int = 4,
    updates: int = 120,
    step: float = 0.063,
    expected: float | None = 0.061,
    result: dict[str, Any] | None = None,
    work: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **shape: Any,
) -> ReportedRun:
    """A run of real processes: work rows, and the times that its end row tells."""
    trace = make_trace(updates=updates, step=step, **shape)
    assert trace.end is not None
    time = trace.end.result["time"]
    trace.end.result.update(
        mean_update_time=time / updates,
        expected_update_time=expected,
        evaluation_time=0.05 * time,
        learners_lost=0,
        learners_restarted=0,
    )
    trace.end.result.update(result or {})
    add_work(trace, learners, seed=shape.get("seed", 0), **(work or {}))
    return make_run(
        protocol,
        trace,
        engine="local",
        learners=learners,
        delay="exponential:mean=0.02",
        **{"evaluate": "live", **(settings or {})},
    )


def four_local_runs(**settings: Any) -> list[ReportedRun]:
    """Four protocols on 8 real learners."""
    kinds: dict[str, dict[str, Any]] = {
        "hardsync": {
            "updates": 60, "size": 8, "step": 0.16, "expected": 0.131,
            "work": {"waiting": 0.05},
        },
        "k-sync:k=6": {
            "updates": 80, "size": 6, "step": 0.085, "expected": 0.071, "cancelled": 150,
            "work": {"waiting": 0.02, "cancelled": 0.25},
        },
        "k-batch-async:k=4": {
            "updates": 120, "size": 4, "step": 0.045, "expected": 0.0400, "mean_staleness": 1.75,
            "work": {"waiting": 0.004},
        },
        "async": {
            "updates": 480, "step": 0.011, "expected": 0.0101, "mean_staleness": 7.0,
            "evaluations": 24, "final_error": 0.06,
            "work": {"waiting": 0.006},
        },
    }  # fmt: skip
    return [
        local_run(protocol, learners=8, seed=seed, settings=settings, **kind)
        for seed, (protocol, kind) in enumerate(kinds.items())
    ]


def two_large_local_runs() -> list[ReportedRun]:
    """Two protocols on 40 learners; one lost learners, and both were evaluated differently."""
    return [
        local_run(
            "k-sync:k=32", learners=40, updates=60, size=32, step=0.14, expected=0.09,
            work={"waiting": 0.04, "cancelled": 0.2, "replaced": 7}, cancelled=400,
            result={"learners_lost": 1, "learners_restarted": 1},
        ),
        local_run(
            "async", learners=40, updates=600, step=0.006, expected=None, mean_staleness=39.0,
            settings={"evaluate": "deferred"}, seed=1,
        ),
    ]  # fmt: skip
