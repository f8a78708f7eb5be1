"""What real processes compute is what the reference computes from the events alone, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import local_tasks
import pytest
import torch
from image_data import write_pictures
from torch import nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.runs.execute import Run
from gruppetto.testing import conformance_task, reference
from gruppetto.testing.checks import tell

PROTOCOLS = (
    "k-sync:k=2",
    "k-batch-sync:k=2",
    "k-async:k=2",
    "k-batch-async:k=2",
    "async",
    "hardsync",
)
HASHES = ("weights_sha256", "state_sha256", "events_sha256", "commands_sha256")


def train(out: Path, task: Any = None, **settings: Any) -> Run:
    """Three learners that sleep for very different times."""
    chosen = {
        "engine": "local",
        "learners": 3,
        "protocol": "k-batch-async:k=2",
        "delay": "exponential:mean=0.002",
        "progress": False,
        **settings,
    }
    return gp.train(reference() if task is None else task, out=out, **chosen)


def replayed(run: Run, **objects: Any) -> None:
    """All that a run recorded comes out again."""
    again = gp.replay(run.folder.path, progress=False, **objects)
    assert again["matches"], again["difference"]
    assert [again[h] for h in HASHES] == [run.result[h] for h in HASHES]
    assert run.result["stopped_by"] == "epochs"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_adam_clipping_and_a_modulation(tmp_path: Path, protocol: str) -> None:
    """State of two vectors, a norm over all of the sum, factors by staleness."""
    run = train(
        tmp_path / "out",
        protocol=protocol,
        optimizer="adamw:lr=0.01",
        clip="norm:max=0.5",
        modulation="inverse",
    )
    replayed(run)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd:lr=0.05,momentum=0.9,nesterov=true"},
        {"warmup": "hardsync:epochs=1", "protocol": "async"},
        {"warmup": "hardsync:epochs=1", "protocol": "k-batch-sync:k=5"},
        {"threads": 2, "learners": 2, "epochs": 1},
        {"on_late": "drop", "protocol": "k-batch-sync:k=2"},
        {"recalibrate_bn": 2, "evaluate_every": 0.5},
        {"scale_lr": "sqrt-batch:batch=4"},
        {"seed": 11, "learners": 7, "protocol": "k-async:k=3"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    replayed(train(tmp_path / "out", **settings))


@pytest.mark.parametrize("every", ["epoch", "update"])
def test_a_schedule(tmp_path: Path, every: Any) -> None:
    schedule = gp.schedule(
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), every=every
    )
    run = train(tmp_path / "out", schedule=schedule)
    replayed(run, schedule=schedule)


def test_an_optimizer_from_a_function_and_initial_weights(tmp_path: Path) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.RMSprop([{"params": trained[:1], "lr": 0.002}, {"params": trained[1:]}])

    initial = conformance_task().model().state_dict()
    run = train(tmp_path / "out", optimizer=optimizer, initial=initial)
    replayed(run, optimizer=optimizer)


# -------------------------------------------------------------------------- data


def test_plain_tensors_in_an_object_with_a_lambda(tmp_path: Path) -> None:
    """Read on the spot; the task travels as a pickle."""
    features = torch.randn(44, 6, generator=torch.Generator().manual_seed(1))
    task = gp.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(), nn.ReLU()),
        train=TensorDataset(features, torch.arange(44) % 3),
        test=TensorDataset(features, torch.arange(44) % 3),
        optimizer="sgd:lr=0.1,momentum=0.9",
        batch_size=8,
        epochs=2,
    )
    replayed(train(tmp_path / "out", task), task=task)


@pytest.mark.parametrize("threads", [1, 2])
def test_pictures_read_by_a_thread_and_augmented(tmp_path: Path, threads: int) -> None:
    data = write_pictures(tmp_path / "data")
    run = train(
        tmp_path / "out",
        f"cifar10:model=resnet8,augment=true,data={data}",
        batch_size=8,
        epochs=1,
        optimizer="sgd:lr=0.1,momentum=0.9",
        threads=threads,
        learners=3 - threads,
    )
    replayed(run)


def test_batches_of_everything_that_grow(tmp_path: Path) -> None:
    """Dicts, texts, empty tensors, odd dtypes, from a few bytes to many more than the first."""
    replayed(train(tmp_path / "out", local_tasks.name("texts")))


def test_pictures_with_colours_last_in_memory(tmp_path: Path) -> None:
    """A convolution goes another way for them, and rounds differently."""
    replayed(train(tmp_path / "out", local_tasks.name("pictures")))


def test_a_batch_of_a_class_that_travelled_by_value(tmp_path: Path) -> None:
    task = local_tasks.in_an_object()
    replayed(train(tmp_path / "out", task), task=task)


# --------------------------------------------------- the same as in virtual time


@pytest.mark.parametrize("norm", [False, True])
def test_hardsync_is_what_it_is_in_virtual_time(tmp_path: Path, norm: bool) -> None:
    """Of two gradients of the same size the order does not matter: the bits are the same."""
    task = local_tasks.name("even", norm=norm)
    settings = {"protocol": "hardsync", "learners": 2, "epochs": 3}
    local = train(tmp_path / "local", task, **settings)
    virtual = train(tmp_path / "virtual", task, **settings, engine="virtual")
    for key in ("weights_sha256", "state_sha256", "metrics", "train_loss", "updates"):
        assert local.result[key] == virtual.result[key], key


def test_hardsync_of_many_takes_the_same_mini_batches(tmp_path: Path) -> None:
    """In the order in which they arrive, which moves the last bits alone."""
    task = local_tasks.name("even")
    settings = {"protocol": "hardsync", "learners": 4, "epochs": 4}
    local = train(tmp_path / "local", task, **settings)
    virtual = train(tmp_path / "virtual", task, **settings, engine="virtual")
    story = tell(local.folder.path, 4 * local_tasks.BATCHES_PER_EPOCH)
    for i, update in enumerate(story.updates):
        taken = {story.given[c.lease].mini_batch for c in update.contributions}
        assert taken == set(range(4 * i, 4 * i + 4))
    for name, value in virtual.model.state_dict().items():
        torch.testing.assert_close(local.model.state_dict()[name], value)


@pytest.mark.parametrize("protocol", ["async", "hardsync", "k-batch-async:k=3"])
def test_one_learner_is_what_it_is_in_virtual_time(tmp_path: Path, protocol: str) -> None:
    """Also in events and commands: nothing can arrive in another order."""
    settings = {"protocol": protocol, "learners": 1}
    local = train(tmp_path / "local", **settings)
    virtual = train(tmp_path / "virtual", **settings, engine="virtual")
    assert [local.result[h] for h in HASHES] == [virtual.result[h] for h in HASHES]
    assert local.result["metrics"] == virtual.result["metrics"]
