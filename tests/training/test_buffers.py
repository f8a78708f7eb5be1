"""Buffers of a model that many learners train: BatchNorm, counters, everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.utils.data import TensorDataset
from training_tools import CPU, class_data, contribution, make_task, named, same_bits, seeded, train

import gruppetto as gp
from gruppetto.training import buffers
from gruppetto.training.buffers import BufferChange, BufferRule, register_rule
from gruppetto.training.learner import Gradient, Learner
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.server import Server, Updating
from gruppetto.training.task import Task

DATA = TensorDataset(
    3.0 + 2.0 * torch.randn(10, 6, generator=seeded(5)),
    torch.arange(10) % 3,
)


class Pair:
    """A server and a learner; mini-batches of 4, 4 and 2 samples in the data's own order."""

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        task = Task(model=model, train=DATA, sampler=lambda epoch: range(10))
        mini_batches = MiniBatches(task, 4, 0)
        updating = Updating(gp.optimizer(torch.optim.SGD, lr=0.0))
        self.server = Server(task, updating, 0, 10, CPU)
        self.learner = Learner(
            task, self.server.replica(), self.server.layout, mini_batches, 0, CPU
        )

    def gradient(self, mini_batch: int) -> Gradient:
        return self.learner.compute(mini_batch, self.server.snapshot())

    def update(
        self, mini_batches: Sequence[int], factors: Sequence[float] | None = None
    ) -> dict[str, Tensor]:
        gradients = [self.gradient(b) for b in mini_batches]
        factors = factors or [1.0] * len(gradients)
        self.server.apply(
            [
                contribution(i, g.num_samples, s)
                for i, (g, s) in enumerate(zip(gradients, factors, strict=True))
            ],
            gradients,
        )
        return dict(self.server.model.named_buffers())


def inputs(mini_batch: int) -> Tensor:
    return DATA.tensors[0][4 * mini_batch : 4 * mini_batch + 4].double()


def mean_of(mini_batch: int) -> Tensor:
    return inputs(mini_batch).mean(0)


def var_of(mini_batch: int) -> Tensor:
    x = inputs(mini_batch)
    return (x - x.mean(0)).square().sum(0) / (len(x) - 1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-6)


def normed(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.BatchNorm1d(6, **options), nn.Linear(6, 3))


# --------------------------------------------------------------- batch norm


@pytest.mark.parametrize("momentum", [0.1, 0.25, 1.0])
def test_server_moves_its_average_once_per_update(momentum: float) -> None:
    pair = Pair(normed(momentum=momentum))
    found = pair.update([0, 2], factors=[0.25, 1.0])  # the factors must not count here
    mean = (4 * mean_of(0) + 2 * mean_of(2)) / 6
    var = (4 * var_of(0) + 2 * var_of(2)) / 6
    close(found["0.running_mean"], momentum * mean)
    close(found["0.running_var"], (1 - momentum) * torch.ones(6) + momentum * var)
    assert int(found["0.num_batches_tracked"]) == 2
    found = pair.update([1])
    close(found["0.running_mean"], (1 - momentum) * momentum * mean + momentum * mean_of(1))
    close(
        found["0.running_var"],
        (1 - momentum) * ((1 - momentum) + momentum * var) + momentum * var_of(1),
    )
    assert int(found["0.num_batches_tracked"]) == 3


@pytest.mark.parametrize("momentum", [0, 1])
def test_a_whole_number_as_momentum_is_a_momentum(momentum: int) -> None:
    """``momentum=1`` keeps the last batch's statistics, ``momentum=0`` the first ones."""
    pair = Pair(normed(momentum=momentum))
    for mini_batch in (0, 1):
        found = pair.update([mini_batch])
    expected = mean_of(1) if momentum else torch.zeros(6)
    close(found["0.running_mean"], expected)


def test_the_push_carries_the_batchs_own_statistics_exactly() -> None:
    """The kernel's own numbers, whatever came before: no trace of an older average."""
    pair = Pair(normed())
    pair.update([1, 2])
    for mini_batch in (0, 1, 2, 0):
        news = pair.gradient(mini_batch).news["0"]
        mean, var = torch.zeros(6), torch.zeros(6)
        batch_norm(inputs(mini_batch).float(), mean, var, training=True, momentum=1.0)
        assert same_bits(news["running_mean"], mean)
        assert same_bits(news["running_var"], var)
        close(news["running_mean"], mean_of(mini_batch))
        close(news["running_var"], var_of(mini_batch))
        assert int(news["num_batches_tracked"]) == 1


def test_without_momentum_the_average_is_plain_over_mini_batches() -> None:
    pair = Pair(normed(momentum=None))
    pair.update([0, 1])
    found = pair.update([0])
    close(found["0.running_mean"], (2 * mean_of(0) + mean_of(1)) / 3)
    close(found["0.running_var"], (2 * var_of(0) + var_of(1)) / 3)
    assert int(found["0.num_batches_tracked"]) == 3


def test_a_batch_norm_called_twice_reports_the_mean_of_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x) + self.norm(2 * x))

    found = Pair(Twice).update([0])
    close(found["norm.running_mean"], 0.1 * (mean_of(0) + 2 * mean_of(0)) / 2)
    close(found["norm.running_var"], 0.9 + 0.1 * (var_of(0) + 4 * var_of(0)) / 2)
    assert int(found["norm.num_batches_tracked"]) == 2


def test_a_batch_norm_that_was_not_called_keeps_its_average() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x) if len(x) == 4 else x)

    pair = Pair(Sometimes)
    found = pair.update([2])
    close(found["norm.running_mean"], torch.zeros(6))
    assert int(found["norm.num_batches_tracked"]) == 0
    # Only those that called it are averaged.
    close(pair.update([2, 1])["norm.running_mean"], 0.1 * mean_of(1))


def test_a_frozen_batch_norm_is_used_and_left_alone() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.norm.running_mean.fill_(3.0)
            self.norm.running_var.fill_(4.0)
            self.norm.num_batches_tracked.fill_(17)
            self.out = nn.Linear(6, 3)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x))

    pair = Pair(Frozen)
    start = named(pair.server.model)
    x, y = DATA.tensors[0][:4], DATA.tensors[1][:4]
    scores = ((x - 3.0) / (4.0 + 1e-5) ** 0.5) @ start["out.weight"].T + start["out.bias"]
    expected = float(nn.functional.cross_entropy(scores, y))
    assert pair.gradient(0).loss == pytest.approx(expected, rel=1e-5)
    found = pair.update([0, 1])
    assert found["norm.running_mean"].unique().tolist() == [3.0]
    assert found["norm.running_var"].unique().tolist() == [4.0]
    assert int(found["norm.num_batches_tracked"]) == 17


def test_batch_norm_without_running_statistics_is_left_to_itself() -> None:
    assert Pair(normed(track_running_stats=False)).update([0, 1]) == {}


def test_evaluation_uses_the_servers_average(tmp_path: Path) -> None:
    """Through a whole run: the counter is the mini-batches, the average is near the data's."""
    task = make_task(normed(momentum=0.5), train=DATA)
    run = train(
        task, tmp_path / "run", learners=2, batch_size=5, epochs=20,
        optimizer=gp.optimizer(torch.optim.SGD, lr=0.01),
    )  # fmt: skip
    norm = run.model[0]  # type: ignore[index]
    assert int(norm.num_batches_tracked) == 40
    # Every update sees all ten samples, so the average has converged to their mean.
    close(norm.running_mean, DATA.tensors[0].double().mean(0))


# ------------------------------------------------------- counters and the rest


class Counting(nn.Module):
    """Counts samples, remembers the last batch, keeps a scratch buffer out of state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("seen", torch.tensor(100))
        self.register_buffer("last", torch.zeros(6))
        self.register_buffer("drift", torch.tensor(0.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += len(x)
            self.last.copy_(x.mean(0))
            self.drift += 1.0
            self.scratch += x.sum()
        return self.out(x)


def test_counters_add_up_and_the_rest_comes_from_the_newest() -> None:
    pair = Pair(Counting)
    found = pair.update([0, 1, 2])
    assert int(found["seen"]) == 100 + 4 + 4 + 2
    close(found["last"], mean_of(2))  # same version: the last listed
    assert float(found["drift"]) == 1.0  # a float is no counter
    found = pair.update([1])
    assert int(found["seen"]) == 114
    assert float(found["drift"]) == 2.0  # went on from the server's value
    close(found["last"], mean_of(1))
    total = inputs(2).sum() + inputs(1).sum()
    close(found["scratch"], torch.stack([total, total]))


@pytest.mark.parametrize(
    ("versions", "newest"), [([3, 5, 4], 1), ([5, 5, 4], 1), ([5, 3, 5], 2), ([7, 1, 2], 0)]
)
def test_newest_is_the_highest_version_then_the_last_listed(
    versions: list[int], newest: int
) -> None:
    pair = Pair(Counting)
    gradients = [pair.gradient(b) for b in range(3)]
    pair.server.apply(
        [
            contribution(i, g.num_samples, version=v)
            for i, (g, v) in enumerate(zip(gradients, versions, strict=True))
        ],
        gradients,
    )
    close(pair.server.model.last, mean_of(newest))  # type: ignore[arg-type]


def test_counting_starts_from_the_version_a_learner_used() -> None:
    """Two late gradients of one version: each adds its own four, none counts the other's."""
    pair = Pair(Counting)
    old = pair.server.snapshot()
    for number in (0, 1):
        late = pair.learner.compute(number, old)
        pair.server.apply([contribution(number, 4)], [late])
    assert int(pair.server.model.seen) == 108  # type: ignore[arg-type]


def test_a_flag_is_no_counter() -> None:
    """A bool scalar ("initialised") cannot be subtracted or added; the newest one counts."""

    class Lazily(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(6, 3)
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x: Tensor) -> Tensor:
            self.ready.fill_(True)
            return self.out(x)

    assert Pair(Lazily).update([0, 1])["ready"].item() is True


def test_a_run_counts_every_sample_once(tmp_path: Path) -> None:
    run = train(
        make_task(Counting), tmp_path / "run", protocol="k-batch-async:k=2", learners=3,
        batch_size=8, epochs=2, delay="exponential:mean=1",
        optimizer=gp.optimizer(torch.optim.SGD, lr=0.01),
    )  # fmt: skip
    assert int(run.model.seen) == 100 + 2 * len(class_data())  # type: ignore[arg-type]
    assert "scratch" not in run.model.state_dict()
    assert run.staleness.keys() - {0}, "nothing was late, so nothing was shown"


# -------------------------------------------------------------- a rule of one's own


class Peak(nn.Module):
    """Remembers the largest input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("peak", torch.tensor([-1e9]))
        self.register_buffer("other", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.peak.copy_(torch.maximum(self.peak, x.max()))
            self.other += 1
        return self.out(x)


class MaxRule(BufferRule):
    """The server keeps the maximum over learners."""

    names = ("peak",)

    def is_active(self, module: nn.Module) -> bool:
        return module.training

    def prepare(self, module: nn.Module) -> None:
        module.get_buffer("peak").fill_(-1e9)

    def collect(self, module: nn.Module) -> dict[str, Tensor]:
        return {"peak": module.get_buffer("peak").clone()}

    def combine(self, module: nn.Module, changes: Sequence[BufferChange]) -> None:
        assert [c.num_samples for c in changes] == [4, 2]
        for change in changes:
            peak = module.get_buffer("peak")
            peak.copy_(torch.maximum(peak, change.tensors["peak"]))


@pytest.fixture
def _max_rule() -> Iterator[None]:
    before = list(buffers._RULES)
    register_rule(Peak, MaxRule())
    yield
    buffers._RULES[:] = before


@pytest.mark.usefixtures("_max_rule")
@pytest.mark.parametrize("order", [(0, 2)])
def test_a_registered_rule_decides(order: tuple[int, ...]) -> None:
    found = Pair(Peak).update(order)
    assert float(found["peak"]) == float(torch.cat([inputs(0), inputs(2)]).max())
    assert float(found["other"]) == 1.0  # no rule names it: the newest


def test_without_the_rule_the_newest_decides() -> None:
    """The control: the largest input is in the first of these mini-batches."""
    largest = max(range(3), key=lambda b: float(inputs(b).max()))
    other = (largest + 1) % 3
    assert float(Pair(Peak).update([largest, other])["peak"]) == float(inputs(other).max())
