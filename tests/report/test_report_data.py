"""What the report derives from traces."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_runs import make_run, make_settings, make_trace

from gruppetto.report import distinct_labels
from gruppetto.report.data import (
    DID_NOT_END,
    is_lower_better,
    setting_text,
    shared_metric,
    shared_unit,
)
from gruppetto.trace import EvaluationRow, Trace, UpdateRow


def small_trace() -> Trace:
    """Two updates of two gradients and three evaluations, all numbers chosen."""
    trace = Trace()
    for version, staleness, losses in ((1, [0, 0], [2.0, 4.0]), (2, [1, 3], [1.0, 1.0])):
        trace.add(
            UpdateRow(
                version=version,
                time=10.0 * version,
                samples=40 * version,
                epoch=0.5 * version,
                learning_rate=0.1,
                staleness=staleness,
                num_samples=[30, 10],
                factors=[1.0, 1.0],
                learners=[0, 1],
                losses=losses,
                applied=2 * version,
                cancelled=version,
                discarded=0,
                given_up=0,
            )
        )
    for version, accuracy in ((0, 0.1), (1, 0.9), (2, 0.8)):
        trace.add(
            EvaluationRow(
                version=version,
                time=10.0 * version,
                samples=40 * version,
                epoch=0.5 * version,
                train_loss=None,
                metrics={"loss": 1.0 - accuracy, "accuracy": accuracy},
            )
        )
    return trace


def test_a_killed_run_is_summed_up_from_its_last_rows() -> None:
    outcome = make_run(trace=small_trace()).outcome
    assert not outcome.has_ended
    assert outcome.stopped_by == DID_NOT_END
    assert (outcome.updates, outcome.samples, outcome.epochs) == (2, 80, 1.0)
    assert (outcome.time, outcome.applied, outcome.cancelled) == (20.0, 4, 2)
    assert (outcome.mean_staleness, outcome.max_staleness) == (1.0, 3)


def test_a_killed_run_lasted_until_its_last_event() -> None:
    trace = make_trace(ends=False)
    assert make_run(trace=trace).outcome.time == trace.events[-1].time > trace.updates[-1].time


def test_an_ended_run_is_summed_up_by_its_end_row() -> None:
    trace = make_trace(updates=50, size=2, cancelled=9, discarded=4, given_up=1)
    assert trace.end is not None
    trace.end.result["mini_batches_cancelled"] = 11  # leases cancelled after the last update
    outcome = make_run(trace=trace).outcome
    assert outcome.has_ended
    assert outcome.stopped_by == "epochs"
    assert (outcome.applied, outcome.cancelled, outcome.discarded) == (100, 11, 4)
    assert outcome.given_up == 1
    assert outcome.time == trace.end.result["time"]


def test_an_empty_trace_has_zeros() -> None:
    run = make_run(trace=Trace())
    assert (run.outcome.updates, run.outcome.time, run.outcome.mean_staleness) == (0, 0.0, 0.0)
    assert len(run.staleness) == len(run.training_loss()) == 0
    assert run.metrics == []
    assert run.final("accuracy") is None
    assert run.time_to(("accuracy", 0.5)) is None


def test_staleness_is_counted_per_gradient() -> None:
    assert make_run(trace=small_trace()).staleness.tolist() == [2, 1, 0, 1]


def test_error_is_what_accuracy_lacks_in_per_cent() -> None:
    run = make_run(trace=small_trace())
    np.testing.assert_allclose(run.error("accuracy").values, [90.0, 10.0, 20.0])
    np.testing.assert_allclose(run.error("loss").values, [0.9, 0.1, 0.2])
    assert run.error("accuracy").updates.tolist() == [0, 1, 2]
    assert run.error("accuracy").times.tolist() == [0.0, 10.0, 20.0]


def test_training_loss_weighs_samples_and_bins_updates() -> None:
    run = make_run(trace=small_trace())
    np.testing.assert_allclose(run.training_loss().values, [2.5, 1.0])
    one = run.training_loss(max_points=1)
    np.testing.assert_allclose(one.values, [1.75])
    assert (one.times.tolist(), one.updates.tolist()) == ([20.0], [2])


@pytest.mark.parametrize(
    ("target", "time"),
    [
        (("accuracy", 0.85), 10.0),  # the first time counts, even if it is lost again
        (("accuracy", 0.9), 10.0),
        (("accuracy", 0.95), None),
        (("loss", 0.5), 10.0),
        (("loss", 0.01), None),
        (("f1", 0.5), None),
    ],
)
def test_time_to_target(target: tuple[str, float], time: float | None) -> None:
    assert make_run(trace=small_trace()).time_to(target) == time


def test_final_values_skip_what_is_not_finite_and_fall_back_to_the_end_row() -> None:
    trace = small_trace()
    trace.add(EvaluationRow(3, 30.0, 120, 1.5, None, {"loss": float("nan"), "accuracy": 0.1}))
    assert make_run(trace=trace).final("loss") == pytest.approx(0.2)
    trace = make_trace(evaluations=0)
    assert make_run(trace=trace).final("accuracy") is None
    assert trace.end is not None
    trace.end.result["test_accuracy"] = 0.7
    assert make_run(trace=trace).final("accuracy") == 0.7


def test_runs_are_judged_by_accuracy_only_where_all_have_it() -> None:
    with_accuracy = make_run()
    without = make_run(trace=make_trace(metrics=("loss",)))
    unevaluated = make_run(trace=make_trace(evaluations=0))
    assert shared_metric([with_accuracy, unevaluated]) == "accuracy"
    assert shared_metric([with_accuracy, without]) == "loss"
    assert shared_metric([unevaluated]) is None
    trace = Trace()
    trace.add(EvaluationRow(1, 1.0, 32, 0.1, None, {"f1": 0.5}))
    assert shared_metric([make_run(trace=trace)]) == "f1"


def test_time_units() -> None:
    virtual, delayed = make_run(), make_run(delay="exponential:mean=1")
    local = make_run(engine="local", delay="exponential:mean=1")
    assert [run.time_unit for run in (virtual, delayed, local)] == [
        "virtual units", "virtual s", "s",
    ]  # fmt: skip
    assert shared_unit([virtual, virtual]) == "virtual units"
    assert shared_unit([virtual, local]) is None


def test_labels_name_what_differs_protocol_first() -> None:
    settings = [
        make_settings("hardsync", batch_size=16, out="a"),
        make_settings("async", batch_size=32, out="b"),
    ]
    shuffled = [dict(reversed(each.items())) for each in settings]
    for given in (settings, shuffled):
        assert distinct_labels(given) == ["hardsync, batch size 16", "async, batch size 32"]


def test_labels_without_a_difference() -> None:
    assert distinct_labels([make_settings("async")]) == ["async"]
    assert distinct_labels([make_settings("async")] * 3) == ["async #1", "async #2", "async #3"]
    assert distinct_labels([]) == []


def test_labels_of_missing_settings() -> None:
    labels = distinct_labels([{"protocol": "async"}, {"protocol": "async", "clip": 1.0}])
    assert labels == ["clip none", "clip 1"]


def test_setting_text() -> None:
    values: tuple[object, ...] = (None, True, 0.10, 3, [], ["a", 1], {"0": "constant:value=1"}, "x")
    assert [setting_text(value) for value in values] == [
        "none", "true", "0.1", "3", "none", "a 1", "0=constant:value=1", "x",
    ]  # fmt: skip


def test_direction_of_metrics() -> None:
    assert [is_lower_better(m) for m in ("loss", "test_error", "accuracy", "f1")] == [
        True, True, False, False,
    ]  # fmt: skip
