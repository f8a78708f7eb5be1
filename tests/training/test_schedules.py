"""Learning-rate schedules live at the server and follow applied samples."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from training_tools import apply, hand_made, make_server, named

import gruppetto as gp
from gruppetto.errors import InvalidSetting
from gruppetto.training.server import Server

SGD = gp.optimizer(torch.optim.SGD, lr=1.0)


def halving(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def server_with(schedule: Any, **given: Any) -> Server:
    return make_server(
        optimizer=given.pop("optimizer", SGD), schedule=schedule, samples_per_epoch=50, **given
    )


def rate_of_next(server: Server, *num_samples: int, factor: float = 1.0) -> float:
    """The rate that an update of these contributions is taken with."""
    zero = {n: torch.zeros_like(p) for n, p in named(server.model).items()}
    gradients = [hand_made(server.layout, zero, n) for n in num_samples]
    apply(server, gradients, [factor] * len(gradients))
    return server.last_update.learning_rate


def test_every_epoch_steps_when_samples_cross_the_mark() -> None:
    server = server_with(gp.schedule(halving))
    # After 20, 40, 60 (crosses 50), 99, 100 (reaches 100 exactly), 101 samples.
    rates = [rate_of_next(server, n) for n in (20, 20, 20, 39, 1, 1)]
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_one_update_may_cross_several_marks() -> None:
    server = server_with(gp.schedule(halving))
    assert rate_of_next(server, 40, 40, 45) == 1.0  # 125 samples: two marks
    assert rate_of_next(server, 25) == 0.25  # 150: one more
    assert rate_of_next(server, 1) == 0.125


def test_every_update_steps_once_however_many_contributions() -> None:
    server = server_with(gp.schedule(halving, every="update"))
    assert [rate_of_next(server, *n) for n in ((1,), (30, 30), (200,))] == [1.0, 0.5, 0.25]


def test_modulation_multiplies_the_scheduled_rate_and_does_not_stay() -> None:
    server = server_with(gp.schedule(halving, every="update"))
    rates = [rate_of_next(server, 5, factor=s) for s in (1.0, 0.25, 1.0, 0.1)]
    assert rates == pytest.approx([1.0, 0.125, 0.25, 0.0125])


def test_weights_follow_the_schedule() -> None:
    server = server_with(gp.schedule(halving, every="update"))
    before = named(server.model)
    ones = {n: torch.ones_like(p) for n, p in before.items()}
    for _ in range(3):
        apply(server, [hand_made(server.layout, ones)])
    for name, value in named(server.model).items():
        torch.testing.assert_close(value, before[name] - (1.0 + 0.5 + 0.25))


@pytest.mark.parametrize(
    "factory",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=8),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)],
            milestones=[2],
        ),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    ],
    ids=["cosine", "lambda", "one-cycle", "sequential", "restarts"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_torchs_own_sequence_also_after_a_restart(factory: Any) -> None:
    """The rates of a plain loop; saved after three updates and taken up by another server."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    plain = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    scheduler = factory(plain)
    expected = []
    for _ in range(7):
        expected.append(plain.param_groups[0]["lr"])
        parameter.grad = torch.zeros(3)
        plain.step()
        scheduler.step()
    optimizer = gp.optimizer(torch.optim.SGD, lr=1.0, momentum=0.9)
    schedule = gp.schedule(factory, every="update")
    server = server_with(schedule, optimizer=optimizer)
    rates = [rate_of_next(server, 1) for _ in range(3)]
    tensors, saved = server.state()
    saved = json.loads(json.dumps(saved))
    tensors = {n: t.clone() for n, t in tensors.items()}
    second = server_with(schedule, optimizer=optimizer)
    second.load(tensors, saved)
    rates += [rate_of_next(second, 1) for _ in range(4)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_reduce_on_plateau_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="ReduceLROnPlateau needs a metric at every step"):
        server_with(gp.schedule(lr_scheduler.ReduceLROnPlateau))


@pytest.mark.parametrize(
    ("given", "every", "sentence"),
    [
        (halving, "step", "expected every='epoch' or 'update', got 'step'"),
        ("cosine", "epoch", "expected a function of the optimizer"),
    ],
)
def test_bad_schedules_refused(given: Any, every: Any, sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        gp.schedule(given, every=every)
