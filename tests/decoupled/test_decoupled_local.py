"""A process for each module: the bits are those of virtual time, whatever the processes do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import decoupled_tasks
import device_roles
import pytest
import torch

import gruppetto as gp
from gruppetto.runs.execute import Run
from gruppetto.trace import read_trace

HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")
TOTAL = 3 * decoupled_tasks.PER_EPOCH
ADAM = "adam:lr=0.01"
NESTEROV = "sgd:lr=0.05,momentum=0.9,nesterov=true,weight_decay=0.01"


def train(out: Path, engine: str, decouple: str, task: str = "blocks", **settings: Any) -> Run:
    """A few mini-batches in three modules, unless told otherwise."""
    modules = int(decouple.rpartition("modules=")[2].partition(",")[0])
    chosen: dict[str, Any] = {
        "evaluate": "off",
        "progress": False,
        "cuts": decoupled_tasks.CUTS[: modules - 1],
        **settings,
    }
    if ":" not in task:
        task = decoupled_tasks.name(task)
    return gp.train(task, engine=engine, decouple=decouple, out=out / engine, **chosen)


def both(out: Path, decouple: str, **settings: Any) -> Run:
    """The run with processes, which is the one in virtual time to the last bit."""
    virtual = train(out, "virtual", decouple, **settings)
    local = train(out, "local", decouple, **settings)
    for key in HASHES:
        assert local.result[key] == virtual.result[key], key
    assert local.result["updates"] == virtual.result["updates"] > 0
    return local


@pytest.mark.parametrize(
    ("decouple", "settings"),
    [
        ("bp:modules=3", {}),
        ("bp:modules=1", {"optimizer": ADAM}),
        ("ddg:modules=3", {"optimizer": NESTEROV}),
        ("ddg:modules=2", {"optimizer": ADAM, "clip": "norm:max=0.5"}),
        ("ddg:modules=3,schedule=barrier", {}),
        ("ddg:modules=3,stash=none", {}),
        ("ddg:modules=3,lookahead=0.5", {}),
        ("fr:modules=3", {"optimizer": ADAM}),
        ("fdg:modules=3", {}),
        ("ddg:modules=3", {"tail": "drop"}),
        ("fdg:modules=3", {"tail": "drop", "updates": 7}),
        ("ddg:modules=3", {"modulation": "inverse", "compensation": "dc-asgd"}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_the_same_bits_as_in_virtual_time(
    tmp_path: Path, decouple: str, settings: dict[str, Any]
) -> None:
    """BatchNorm and dropout are in the model, and the last mini-batch of an epoch is smaller."""
    both(tmp_path, decouple, **settings)


@pytest.mark.parametrize("decouple", ["ddg:modules=3", "fr:modules=3,schedule=barrier"])
def test_rings_through_slots_that_receivers_make_as_on_gpus(
    tmp_path: Path, decouple: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gruppetto.runs.decoupled.local.TRAIN", device_roles.TRAIN)
    both(tmp_path, decouple, optimizer=ADAM)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_modules_on_gpus_learn_what_they_learn_in_virtual_time(tmp_path: Path, device: str) -> None:
    """To the bit it is not promised there."""
    runs = [
        train(tmp_path, engine, "ddg:modules=3", device=where, evaluate="live")
        for engine, where in (("virtual", "cpu"), ("local", device))
    ]
    losses = [run.history[-1]["train_loss"] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("data", ["samples", "made"])
@pytest.mark.parametrize("decouple", ["ddg:modules=3", "fr:modules=2"])
def test_batches_that_are_read_elsewhere(tmp_path: Path, data: str, decouple: str) -> None:
    """Whoever reads them uses their memory again, long before a delayed gradient is due."""
    both(tmp_path, decouple, task=decoupled_tasks.name("blocks", data=data), epochs=2)


def test_a_batch_that_cannot_travel_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(gp.errors.TaskError) as caught:
        train(tmp_path, "local", "ddg:modules=3", task="things")
    assert "a mini-batch holds a Thing, which cannot go from one module's" in str(caught.value)
    assert not (tmp_path / "local").exists()
    # One process has all it needs.
    both(tmp_path, "bp:modules=1", task="things")


def test_rows_tell_where_the_time_of_each_module_went(tmp_path: Path) -> None:
    run = train(tmp_path, "local", "ddg:modules=3,schedule=barrier")
    trace = read_trace(run.folder.trace)
    rows = trace.modules
    assert [(row.mini_batch, row.module) for row in rows] == [
        (b, k) for b in range(TOTAL) for k in (1, 2, 3)
    ]
    for row in rows:
        assert row.staleness == min(3 - row.module, row.mini_batch)
        assert min(row.backward, row.step) > 0.0
        assert row.learning_rate == pytest.approx(0.05)
        assert (row.loading > 0.0) <= (row.module == 1)
        assert (row.waiting_for_gradients == 0.0) >= (row.module == 3)
        parts = (
            row.loading,
            row.forward,
            row.backward,
            row.step,
            row.waiting_for_inputs,
            row.waiting_for_gradients,
            row.waiting_for_others,
        )
        assert all(part >= 0.0 for part in parts)
    for module in (1, 2, 3):
        mine = [row for row in rows if row.module == module]
        assert [row.time for row in mine] == sorted(row.time for row in mine)
        told = sum(
            row.loading
            + row.forward
            + row.backward
            + row.step
            + row.waiting_for_inputs
            + row.waiting_for_gradients
            + row.waiting_for_others
            for row in mine
        )
        assert told <= mine[-1].time
    for each in run.result["per_module"]:
        assert each["predicted_bytes"] > 0
        assert each["peak_bytes"] >= 0


@pytest.mark.parametrize("version", [3, 7])
def test_an_interrupted_run_that_goes_on_is_the_whole_run(tmp_path: Path, version: int) -> None:
    """In flight at the stop: inputs, stashed weights, and outputs that nobody has taken."""
    whole = train(tmp_path / "whole", "virtual", "fdg:modules=3")
    part = train(tmp_path, "local", "fdg:modules=3", epochs=3, updates=version)
    assert part.result["updates"] == version
    rest = gp.resume(part.folder.path, updates=TOTAL, progress=False)
    assert rest.result["weights_sha256"] == whole.result["weights_sha256"]
    assert rest.result["state_sha256"] == whole.result["state_sha256"]


def test_evaluations_and_the_model_are_those_of_virtual_time(tmp_path: Path) -> None:
    runs = [
        train(tmp_path, engine, "ddg:modules=3", evaluate="deferred", evaluate_every=0.5)
        for engine in ("virtual", "local")
    ]
    seen = [[{k: v for k, v in row.items() if k != "time"} for row in run.history] for run in runs]
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 5
    virtual, local = (dict(run.model.state_dict()) for run in runs)
    assert all(tensor.equal(local[name]) for name, tensor in virtual.items())
