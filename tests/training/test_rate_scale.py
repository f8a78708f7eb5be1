"""Rules for many learners: what they compute, and what a scaled rate does at the server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from training_tools import apply, hand_made, make_server, make_task, named, same_bits, train

import gruppetto as gp
from gruppetto.errors import InvalidSetting
from gruppetto.staleness import BATCH_SCALINGS, RATE_SCALINGS, ProductBatch, SqrtBatch
from gruppetto.trace import UpdateRow
from gruppetto.training.server import Server

# ------------------------------------------------------------------------- the rules


@pytest.mark.parametrize(
    ("batch_size", "learners", "batch", "factor"),
    [(128, 1, 128, 1.0), (128, 4, 128, 2.0), (4, 32, 128, 1.0), (16, 1, 64, 0.5)],
)
def test_sqrt_batch(batch_size: int, learners: int, batch: int, factor: float) -> None:
    """sqrt(μP/B); one learner with the mini-batch the rate was tuned for keeps it."""
    assert SqrtBatch(batch).factor(batch_size, learners) == factor


@pytest.mark.parametrize(("total", "learners", "size"), [(128, 1, 128), (128, 30, None), (8, 8, 1)])
def test_product(total: int, learners: int, size: int | None) -> None:
    if size is not None:
        assert ProductBatch(total).batch_size(learners) == size
        return
    with pytest.raises(InvalidSetting, match="expected a multiple of 30, nearest 120 and 150"):
        ProductBatch(total).batch_size(learners)


def test_a_total_below_the_learners_has_one_nearest() -> None:
    with pytest.raises(InvalidSetting, match=r"a multiple of 8, nearest 8$"):
        ProductBatch(5).batch_size(8)


@pytest.mark.parametrize(
    ("registry", "text", "sentence"),
    [
        (RATE_SCALINGS, "sqrt-batch", "'sqrt-batch' needs batch="),
        (RATE_SCALINGS, "sqrt-batch:batch=0", "expected batch >= 1, got batch=0"),
        (RATE_SCALINGS, "linear:batch=1", "unknown learning-rate scaling 'linear'"),
        (BATCH_SCALINGS, "product:total=0", "expected total >= 1, got total=0"),
        (BATCH_SCALINGS, "product:total=1.5", "expected a whole number"),
    ],
)
def test_refused_rules(registry: Any, text: str, sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        registry.parse(text)


# ------------------------------------------------------------------------- the server


def ones_applied(server: Server) -> dict[str, torch.Tensor]:
    """The parameters after one update by a gradient of ones."""
    ones = {n: torch.ones_like(p) for n, p in named(server.model).items()}
    apply(server, [hand_made(server.layout, ones)])
    return named(server.model)


def halving(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {}),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_a_scaled_rate_is_that_rate(cls: type[torch.optim.Optimizer], options: Any) -> None:
    """The bits of a server whose optimizer was given 4 times the rate, update after update."""
    scaled = make_server(optimizer=gp.optimizer(cls, lr=0.03, **options), rate_scale=4.0)
    plain = make_server(optimizer=gp.optimizer(cls, lr=0.03 * 4.0, **options))
    for _ in range(3):
        left, right = ones_applied(scaled), ones_applied(plain)
        assert all(same_bits(left[name], right[name]) for name in left)
        assert scaled.last_update.learning_rate == 0.03 * 4.0
    assert scaled.state_sha256() == plain.state_sha256()


def test_the_first_step_of_sgd_is_scaled_exactly() -> None:
    server = make_server(optimizer=gp.optimizer(torch.optim.SGD, lr=0.25), rate_scale=2.0)
    before = named(server.model)
    after = ones_applied(server)
    assert all(same_bits(after[name], before[name] - 0.5) for name in before)


def test_groups_keep_their_ratio() -> None:
    """`lr_scale` of the task's groups, a rate of a group's own, and the scale multiply."""

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        first, *others, last = model.parameters()
        return [
            {"params": [first], "lr_scale": 0.5},
            {"params": [last], "lr": 0.125},
            {"params": others},
        ]

    server = make_server(
        optimizer=gp.optimizer(torch.optim.SGD, lr=0.25), param_groups=groups, rate_scale=2.0
    )
    before = named(server.model)
    after = ones_applied(server)
    steps = {name: float((before[name] - after[name]).mean()) for name in before}
    assert steps["0.weight"] == pytest.approx(0.25)
    assert steps["2.bias"] == pytest.approx(0.25)
    assert steps["0.bias"] == steps["2.weight"] == pytest.approx(0.5)


def test_a_schedule_starts_from_the_scaled_rate() -> None:
    server = make_server(
        optimizer=gp.optimizer(torch.optim.SGD, lr=0.25),
        schedule=gp.schedule(halving, every="update"),
        rate_scale=2.0,
    )
    rates = []
    for _ in range(3):
        ones_applied(server)
        rates.append(server.last_update.learning_rate)
    assert rates == [0.5, 0.25, 0.125]


def test_an_initial_rate_set_before_is_scaled_too() -> None:
    """A scheduler that goes on from an earlier step takes its base rates from there."""

    def begun(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        optimizer.param_groups[0]["initial_lr"] = 1.0
        return optimizer

    server = make_server(
        optimizer=begun,
        schedule=gp.schedule(lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.25)),
        rate_scale=2.0,
    )
    ones_applied(server)
    assert server.last_update.learning_rate == 0.5


def test_loading_does_not_scale_again() -> None:
    optimizer = gp.optimizer(torch.optim.SGD, lr=0.25, momentum=0.9)
    server = make_server(optimizer=optimizer, rate_scale=2.0)
    ones_applied(server)
    tensors, plain = server.state()
    second = make_server(optimizer=optimizer, rate_scale=2.0)
    second.load({n: t.clone() for n, t in tensors.items()}, plain)
    left, right = ones_applied(server), ones_applied(second)
    assert all(same_bits(left[name], right[name]) for name in left)
    assert second.last_update.learning_rate == 0.5


@pytest.mark.parametrize(
    "factory",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=8),
        lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=1.0, cycle_momentum=False),
    ],
    ids=["one-cycle", "cyclic"],
)
def test_schedules_with_rates_of_their_own_are_refused(factory: Any) -> None:
    """They would undo the scaling without a word; unscaled they may do as they like."""
    schedule = gp.schedule(factory, every="update")
    make_server(optimizer=gp.optimizer(torch.optim.SGD, lr=0.3, momentum=0.9), schedule=schedule)
    with pytest.raises(InvalidSetting, match="sets rates of its own"):
        make_server(
            optimizer=gp.optimizer(torch.optim.SGD, lr=0.3, momentum=0.9),
            schedule=schedule,
            rate_scale=2.0,
        )


# --------------------------------------------------------------------------- the runs


def test_a_run_records_the_scaled_rate(tmp_path: Path) -> None:
    """0.1 · sqrt(5 · 4 / 10), in every update row; the weights are those of that rate."""
    rate = 0.1 * math.sqrt(2.0)
    common: dict[str, Any] = {
        "learners": 4,
        "batch_size": 5,
        "epochs": 2,
    }
    rows: list[UpdateRow] = []
    scaled = train(
        make_task(),
        tmp_path / "scaled",
        rows,
        optimizer="sgd:lr=0.1",
        scale_lr="sqrt-batch:batch=10",
        **common,
    )
    plain = train(make_task(), tmp_path / "plain", optimizer=f"sgd:lr={rate!r}", **common)
    assert {row.learning_rate for row in rows} == {rate}
    assert scaled.result["weights_sha256"] == plain.result["weights_sha256"]


@pytest.mark.parametrize(("learners", "batch_size"), [(1, 20), (2, 10), (5, 4)])
def test_the_batch_size_follows_the_learners(
    tmp_path: Path, learners: int, batch_size: int
) -> None:
    """μP = 20, so hardsync takes the same number of updates whatever P is."""
    run = train(
        make_task(),
        tmp_path / "out",
        optimizer="sgd:lr=0.1",
        learners=learners,
        epochs=2,
        scale_batch=gp.ProductBatch(total=20),
    )
    settings = run.folder.settings()
    assert (settings.batch_size, settings.scale_batch) == (batch_size, "product:total=20")
    assert run.result["mini_batches_applied"] == 2 * math.ceil(50 / batch_size)
