"""What a run is to equal: plain PyTorch loops over the same stream, written out here.

The loops share nothing with the library but the seeds of its random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset
from training_tools import class_data, line_data, make_task, mlp, named, same_bits, train

import gruppetto as gp
from gruppetto.trace import UpdateRow
from gruppetto.training.randomness import Stream, stream_seed
from gruppetto.training.task import Task

Loss = Callable[[Tensor, Tensor], Tensor]


def stream(n: int, batch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """The mini-batches of a run; the last one of each epoch is ragged."""
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(stream_seed(seed, Stream.ORDER, epoch))
        order = torch.randperm(n, generator=generator).tolist()
        yield from (order[i : i + batch_size] for i in range(0, n, batch_size))


def joined(mini_batches: Iterable[list[int]], at_a_time: int) -> list[list[int]]:
    """So many mini-batches of the stream as one; the last may be of fewer."""
    left = list(mini_batches)
    cut = [left[i : i + at_a_time] for i in range(0, len(left), at_a_time)]
    return [[index for mini_batch in group for index in mini_batch] for group in cut]


def plain_sgd(
    model_of: Callable[[], nn.Module],
    data: TensorDataset,
    loss: Loss,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    mini_batches: Iterable[list[int]],
    seed: int = 0,
) -> nn.Module:
    """Sequential training on these mini-batches."""
    torch.manual_seed(stream_seed(seed, Stream.MODEL, 0))
    model = model_of()
    model.train()
    optimizer = optimizer_of(model)
    x, y = data.tensors
    for number, indices in enumerate(mini_batches):
        torch.manual_seed(stream_seed(seed, Stream.FORWARD, number))  # of dropout
        optimizer.zero_grad()
        loss(model(x[indices]), y[indices]).backward()
        optimizer.step()
    return model


class Recording:
    """A dataset that remembers which samples were fetched together, and in which order."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data
        self.fetched: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.data[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        self.fetched.append(indices)
        return [self.data[i] for i in indices]


@pytest.fixture(autouse=True)
def _own_randomness() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


# ----------------------------------------------- async, one learner: bit for bit


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x).tanh()))


class Gated(nn.Module):
    """One of two branches, by the batch: the other has no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.left if float(x.sum()) > 0 else self.right
        return branch(x) * self.scale


class Frozen(nn.Module):
    """A first layer that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.first.weight.requires_grad_(False)
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).tanh())


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, the rest does not, at another rate; listed out of order."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(
        [
            {"params": [p for p in parameters if p.dim() < 2][::-1], "lr": 0.05},
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.02},
        ],
        lr=0.2,
        momentum=0.8,
        nesterov=True,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "groups": two_groups,
}
MODELS = [mlp, dropping, normed, Tied, Gated, Frozen]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_async_with_one_learner_is_sequential_sgd(
    tmp_path: Path, model: Callable[[], nn.Module], optimizer: str
) -> None:
    """50 samples in mini-batches of 8: seven updates an epoch, the last of two samples."""
    data = class_data(50)
    run = train(
        make_task(model, train=data), tmp_path / "run", protocol="async", learners=1,
        batch_size=8, epochs=3, seed=11, delay="exponential:mean=1",
        optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip
    assert run.result["updates"] == 21
    expected = plain_sgd(
        model, data, cross_entropy, OPTIMIZERS[optimizer], stream(50, 8, 3, 11), seed=11
    )
    for name, parameter in expected.named_parameters():
        assert same_bits(run.model.get_parameter(name), parameter), name
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(run.model.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "other", [(50, 8, 3, 12), (50, 7, 3, 11), (50, 8, 2, 11)], ids=["seed", "batch-size", "epochs"]
)
def test_the_equality_notices_another_stream(
    tmp_path: Path, other: tuple[int, int, int, int]
) -> None:
    """The control of the test above."""
    data = class_data(50)
    run = train(
        make_task(train=data), tmp_path / "run", protocol="async", learners=1,
        optimizer=OPTIMIZERS["sgd"], batch_size=8, epochs=3, seed=11,
    )  # fmt: skip
    model = plain_sgd(mlp, data, cross_entropy, OPTIMIZERS["sgd"], stream(*other), seed=11)
    for name, parameter in model.named_parameters():
        assert not torch.allclose(run.model.get_parameter(name), parameter, atol=1e-4), name


def test_async_with_one_learner_and_a_schedule(tmp_path: Path) -> None:
    """A schedule by epoch steps where a plain loop would call it: after each epoch's last."""
    data = class_data(50)
    run = train(
        make_task(train=data), tmp_path / "run", protocol="async", learners=1, batch_size=8,
        epochs=3, optimizer=OPTIMIZERS["sgd"],
        schedule=gp.schedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.3)),
    )  # fmt: skip
    steps = []

    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS["sgd"](model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)

        def after(*_: Any) -> None:
            steps.append(0)
            if len(steps) % 7 == 0:
                scheduler.step()

        optimizer.register_step_post_hook(after)
        return optimizer

    expected = plain_sgd(mlp, data, cross_entropy, scheduled, stream(50, 8, 3, 0))
    for name, parameter in expected.named_parameters():
        assert same_bits(run.model.get_parameter(name), parameter), name


def test_async_with_many_learners_is_not_sequential(tmp_path: Path) -> None:
    """Late gradients, counted in full: the negative control of the whole file."""
    data = class_data(200)
    run = train(
        make_task(train=data), tmp_path / "run", protocol="async", learners=16,
        modulation="none", batch_size=8, epochs=3, optimizer=OPTIMIZERS["sgd"],
    )  # fmt: skip
    assert run.result["mean_staleness"] > 10
    other = plain_sgd(mlp, data, cross_entropy, OPTIMIZERS["sgd"], stream(200, 8, 3, 0))
    for name, parameter in other.named_parameters():
        assert not torch.allclose(run.model.get_parameter(name), parameter, atol=1e-2), name


def test_late_gradients_by_hand(tmp_path: Path) -> None:
    """Two learners in turn, always one update late: w += -lr * g(weights one update ago)."""
    data = line_data(24)
    recording = Recording(data)
    task = Task(
        model=lambda: nn.Linear(6, 1, dtype=torch.float64), train=recording,
        loss=lambda out, batch: mse_loss(out, batch[1]),
    )  # fmt: skip
    run = train(
        task, tmp_path / "run", protocol="async", learners=2, modulation="none", batch_size=4,
        epochs=2, optimizer=gp.optimizer(torch.optim.SGD, lr=0.05),
    )  # fmt: skip
    # Both start on version 0; from then on a gradient is one update old.
    assert run.staleness == {0: 1, 1: 11}
    torch.manual_seed(stream_seed(0, Stream.MODEL, 0))
    start = nn.Linear(6, 1, dtype=torch.float64)
    x, y = data.tensors
    versions = [(start.weight.detach()[0], start.bias.detach()[0])]
    for number, indices in enumerate(recording.fetched):
        w, b = versions[max(0, number - 1)]
        error = x[indices] @ w + b - y[indices, 0]
        newest_w, newest_b = versions[-1]
        versions.append(
            (
                newest_w - 0.05 * 2 * error @ x[indices] / len(indices),
                newest_b - 0.05 * 2 * error.mean(),
            )
        )
    torch.testing.assert_close(run.model.weight.detach()[0], versions[-1][0], rtol=1e-11, atol=0)  # type: ignore[union-attr]
    torch.testing.assert_close(run.model.bias.detach()[0], versions[-1][1], rtol=1e-11, atol=0)  # type: ignore[union-attr]


# --------------------------------------- hardsync: P mini-batches of mu as one of P*mu


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 9, dtype=torch.float64), nn.Tanh(), nn.Linear(9, 1, dtype=torch.float64)
    )


def check_hardsync(
    actual: nn.Module, data: TensorDataset, optimizer: str, groups: list[list[int]]
) -> None:
    expected = plain_sgd(wide, data, mse_loss, OPTIMIZERS[optimizer], groups, seed=4)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(actual.get_parameter(name), parameter, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("learners", [1, 3, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "groups"])
def test_hardsync_is_sgd_with_larger_mini_batches(
    tmp_path: Path, learners: int, optimizer: str
) -> None:
    """float64, five epochs of seven mini-batches: groups cross epochs, ragged ones included."""
    data = line_data(50)
    task = Task(model=wide, train=data, loss=lambda out, batch: mse_loss(out, batch[1]))
    run = train(
        task, tmp_path / "run", protocol="hardsync", learners=learners, batch_size=8, epochs=5,
        delay="exponential:mean=1", optimizer=OPTIMIZERS[optimizer], seed=4,
    )  # fmt: skip
    assert run.result["updates"] == -(-35 // learners)
    check_hardsync(run.model, data, optimizer, joined(stream(50, 8, 5, 4), learners))
    # The control: one mini-batch more at a time is another run altogether.
    with pytest.raises(AssertionError):
        check_hardsync(run.model, data, optimizer, joined(stream(50, 8, 5, 4), learners + 1))


@pytest.mark.parametrize("learners", [2, 3, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "groups"])
def test_hardsync_is_sgd_with_larger_mini_batches_in_the_order_it_took_them(
    tmp_path: Path, learners: int, optimizer: str
) -> None:
    """The arithmetic alone, whatever the order in which mini-batches were handed out."""
    data = line_data(50)
    recording = Recording(data)
    rows: list[UpdateRow] = []
    task = Task(model=wide, train=recording, loss=lambda out, batch: mse_loss(out, batch[1]))
    run = train(
        task, tmp_path / "run", rows, protocol="hardsync", learners=learners, batch_size=8,
        epochs=5, delay="exponential:mean=1", optimizer=OPTIMIZERS[optimizer], seed=4,
    )  # fmt: skip
    assert [len(r.num_samples) for r in rows[:-1]] == [learners] * (len(rows) - 1)
    assert sorted(recording.fetched) == sorted(stream(50, 8, 5, 4))
    check_hardsync(run.model, data, optimizer, joined(recording.fetched, learners))


def test_hardsync_in_float32_stays_close_for_twenty_updates(tmp_path: Path) -> None:
    data = class_data(200)
    recording = Recording(data)
    run = train(
        make_task(train=recording), tmp_path / "run", protocol="hardsync", learners=4,
        batch_size=9, updates=20, delay="exponential:mean=1", optimizer=OPTIMIZERS["sgd"],
    )  # fmt: skip
    assert run.result["updates"] == 20
    groups = joined(recording.fetched[:80], 4)
    expected = plain_sgd(mlp, data, cross_entropy, OPTIMIZERS["sgd"], groups)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(run.model.get_parameter(name), parameter, rtol=1e-5, atol=1e-5)


# ------------------------------------------------ one run under two names: bit for bit


@pytest.mark.parametrize(
    ("one", "other", "learners"),
    [
        ("k-sync:k=4", "hardsync", 4),
        ("backup:b=0", "hardsync", 4),
        ("k-async:k=4", "hardsync", 4),
        ("k-sync:k=3", "backup:b=1", 4),
        ("k-batch-async:k=1", "async", 4),
        ("softsync:n=4", "async", 4),
        ("softsync:n=2", "k-batch-async:k=2", 4),
        ("rennala:k=5", "k-batch-sync:k=5", 4),
        ("hardsync", "async", 1),
    ],
)
def test_two_names_of_one_rule(tmp_path: Path, one: str, other: str, learners: int) -> None:
    runs = [
        train(
            make_task(dropping), tmp_path / str(i), protocol=protocol, learners=learners,
            batch_size=8, epochs=3, delay="exponential:mean=1", optimizer=OPTIMIZERS["sgd"],
        )
        for i, protocol in enumerate((one, other))
    ]  # fmt: skip
    left, right = (named(run.model) for run in runs)
    assert all(same_bits(left[n], right[n]) for n in right)
    for key in ("weights_sha256", "state_sha256", "events_sha256", "time"):
        assert runs[0].result[key] == runs[1].result[key], key


@pytest.mark.parametrize(
    "protocol", ["k-sync:k=3", "k-batch-sync:k=4", "k-async:k=2", "k-batch-async:k=2", "async"]
)
def test_other_rules_are_other_runs(tmp_path: Path, protocol: str) -> None:
    """The control of the test above: these are not hardsync."""
    hashes = [
        train(
            make_task(dropping), tmp_path / str(i), protocol=p, learners=4, modulation="none",
            batch_size=8, epochs=3, delay="exponential:mean=1", optimizer=OPTIMIZERS["sgd"],
        ).result["weights_sha256"]
        for i, p in enumerate((protocol, "hardsync"))
    ]  # fmt: skip
    assert hashes[0] != hashes[1]
