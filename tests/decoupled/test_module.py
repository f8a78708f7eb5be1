"""One module: which gradient it applies, when, and what it keeps meanwhile."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lockstep import CPU, plain, run
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gruppetto.decoupled.methods import Backpropagation
from gruppetto.decoupled.network import Network
from gruppetto.decoupled.snapshot import Snapshot
from gruppetto.errors import InvalidSetting
from gruppetto.staleness import COMPENSATIONS, MODULATIONS
from gruppetto.training.building import build_model
from gruppetto.training.clipping import ClipNorm
from gruppetto.training.learner import NotFinite
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.optimizers import parse_optimizer
from gruppetto.training.parameters import hash_tensors
from gruppetto.training.randomness import one_thread
from gruppetto.training.server import Updating
from gruppetto.training.task import Task
from gruppetto.training.tasks import load_task

#: More than an epoch of 13, the last mini-batch of which has 13 samples.
NUM = 16
SAMPLES = 12 * 16 + 13
CUTS = ["1", "3"]
SGD = "sgd:lr=0.05,momentum=0.9,nesterov=true,weight_decay=0.001"
OPTIMIZERS = (SGD, "adam:lr=0.003")
METHODS = ("bp", "ddg", "fr", "fdg", "ddg:stash=none", "ddg:lookahead=0.5")


def spec_of(method: str, modules: int = 3) -> str:
    return f"{method}{',' if ':' in method else ':'}modules={modules}"


@functools.cache
def few() -> TensorDataset:
    return TensorDataset(*load_task("digits").train[:SAMPLES])


def digits(model: Callable[[], nn.Module]) -> Task:
    """A few of the digits, for a model of one's own."""
    return Task(model=model, train=few(), batch_size=16, epochs=2)


def deep(*, dropout: float = 0.2, norm: bool = True) -> Task:
    """The digits with five blocks."""

    def model() -> nn.Module:
        blocks: list[nn.Module] = []
        for width in (64, 32, 32, 32):
            layers: list[nn.Module] = [nn.Linear(width, 32)]
            if norm:
                layers.append(nn.BatchNorm1d(32))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
            blocks.append(nn.Sequential(*layers))
        return nn.Sequential(*blocks, nn.Linear(32, 10))

    return digits(model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_module_is_plain_training(optimizer: str) -> None:
    task = deep()
    model, losses = plain(task, NUM, optimizer)
    ended = run(task, "bp:modules=1", [], NUM, optimizer=optimizer)
    assert ended.losses == losses
    assert ended.weights == hash_tensors(dict(model.named_parameters()))
    theirs = ended.network.load(ended.snapshots).buffers()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), theirs, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_backpropagation_in_modules_is_plain_training(optimizer: str) -> None:
    task = deep(dropout=0.0)  # whose masks come from a stream of their own in each module
    model, losses = plain(task, NUM, optimizer)
    ended = run(task, "bp:modules=3", CUTS, NUM, optimizer=optimizer)
    assert ended.losses == losses
    assert ended.weights == hash_tensors(dict(model.named_parameters()))


@pytest.mark.parametrize("method", METHODS)
def test_without_moving_weights_late_gradients_are_backpropagations(method: str) -> None:
    if method == "fdg":
        method = "fdg:beta=1"
    still = "sgd:lr=0,momentum=0.9"
    ours = run(deep(), spec_of(method), CUTS, NUM, optimizer=still)
    theirs = run(deep(), "bp:modules=3", CUTS, NUM, optimizer=still)
    # The momentum is a sum over all gradients.
    for k, snapshot in theirs.snapshots.items():
        sums = {n: t for n, t in snapshot.tensors.items() if n.startswith("optimizer/")}
        assert sums
        for name, tensor in sums.items():
            assert torch.equal(ours.snapshots[k].tensors[name], tensor)


@one_thread()
def late_oracle(task: Task, num: int, rate: float, delays: list[int], *, replays: bool,
                shrink: float = 1.0) -> nn.Module:  # fmt: skip
    """Plain SGD on late gradients by their definition: of every mini-batch everything is kept, and
    each module's gradient is taken by autograd, at the weights that the method names."""
    mini_batches = MiniBatches(task, 16, 0)
    model = build_model(task, 0, CPU, None)
    borders = [0, 1, 3, 5]
    now = [nn.Sequential(*model[a:b]) for a, b in itertools.pairwise(borders)]
    versions: list[dict[int, nn.Module]] = [{0: copy.deepcopy(stage)} for stage in now]
    errors: dict[tuple[int, int], Tensor] = {}
    inputs: dict[tuple[int, int], Tensor] = {}
    for t in range(num + max(delays)):
        for k in range(3):
            if t >= num:
                continue
            batch, _ = mini_batches.fetch(t, CPU)
            x = batch[0] if k == 0 else inputs[k, t]
            inputs[k, t] = x
            with torch.no_grad():
                inputs[k + 1, t] = versions[k][max(0, t - delays[k])](x)
        for k in reversed(range(3)):
            b = t - delays[k]
            if not 0 <= b < num:
                continue
            stage = versions[k][b if replays else max(0, b - delays[k])]
            x = inputs[k, b].clone().requires_grad_()
            y = stage(x)
            stage.zero_grad()
            if k == 2:
                batch, _ = mini_batches.fetch(b, CPU)
                task.compute_loss(y, batch).backward()
            else:
                y.backward(errors[k + 1, b])
            errors[k, b] = x.grad * shrink
            with torch.no_grad():
                for mine, late in zip(now[k].parameters(), stage.parameters(), strict=True):
                    mine -= rate * late.grad
            versions[k][b + 1] = copy.deepcopy(now[k])
    return model


@pytest.mark.parametrize(
    ("method", "delays", "replays", "shrink"),
    [
        ("ddg", [2, 1, 0], False, 1.0),
        ("fr", [2, 1, 0], True, 1.0),
        ("fdg:beta=0.5", [4, 2, 0], False, 0.5),
    ],
)
def test_gradients_are_those_of_the_definition(
    method: str, delays: list[int], replays: bool, shrink: float
) -> None:
    task = deep(dropout=0.0, norm=False)
    expected = late_oracle(task, 40, 0.05, delays, replays=replays, shrink=shrink)
    ended = run(task, spec_of(method), CUTS, 40, optimizer="sgd:lr=0.05")
    ours = ended.network.load(ended.snapshots)
    for mine, theirs in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    # And none of the others: a delay of one more is another run.
    other = run(task, "bp:modules=3", CUTS, 40, optimizer="sgd:lr=0.05")
    assert other.weights != ended.weights


def test_mixed_weights_are_another_gradient() -> None:
    task = deep(dropout=0.0, norm=False)
    exact = run(task, "ddg:modules=3", CUTS, 40)
    mixed = run(task, "ddg:modules=3,stash=none", CUTS, 40)
    assert exact.weights != mixed.weights
    # They part only once a weight has changed between the passes of a mini-batch.
    assert exact.losses[:2] == mixed.losses[:2]


@pytest.mark.parametrize("method", METHODS)
def test_statistics_move_once_for_each_mini_batch(method: str) -> None:
    ended = run(deep(), spec_of(method), CUTS, 20)
    model = ended.network.load(ended.snapshots)
    counts = [int(b) for n, b in model.named_buffers() if n.endswith("num_batches_tracked")]
    assert counts == [20] * 4


@functools.cache
def whole_run(method: str, optimizer: str) -> tuple[list[float], str, str]:
    whole = run(deep(), spec_of(method), CUTS, NUM, optimizer=optimizer)
    return whole.losses, whole.weights, whole.state


@pytest.mark.parametrize("stop", [1, 2, NUM - 1])
@pytest.mark.parametrize("method", METHODS)
def test_stopping_in_flight_and_going_on_changes_no_bit(method: str, stop: int) -> None:
    spec, optimizer = spec_of(method), SGD if stop % 2 else "adam:lr=0.003"
    first = run(deep(), spec, CUTS, NUM, optimizer=optimizer, stop=stop)
    travelled = {k: Snapshot.from_bytes(s.to_bytes()) for k, s in first.snapshots.items()}
    # A second stop, of a run that was itself resumed.
    again = min(stop + 3, NUM)
    second = run(deep(), spec, CUTS, NUM, optimizer=optimizer, since=travelled, stop=again)
    last = run(deep(), spec, CUTS, NUM, optimizer=optimizer, since=second.snapshots)
    losses = first.losses + second.losses + last.losses
    assert (losses, last.weights, last.state) == whole_run(method, optimizer)


def test_what_reads_its_buffers_is_resumed_with_those_of_its_pass() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1  # another tensor every time
            return x * (1 + 0.1 * torch.sin(self.calls))

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 32), nn.Sequential(Counting(), nn.Linear(32, 32)), nn.Linear(32, 10)
        )

    task = digits(model)
    for method in ("ddg", "fr", "ddg:stash=none"):
        whole = run(task, spec_of(method), ["1", "2"], 30)
        assert float(next(whole.network.load(whole.snapshots).buffers())) == 30
        first = run(task, spec_of(method), ["1", "2"], 30, stop=11)
        last = run(task, spec_of(method), ["1", "2"], 30, since=first.snapshots)
        assert (last.weights, last.state) == (whole.weights, whole.state)


def test_what_was_laid_out_otherwise_in_memory_is_so_after_a_resume() -> None:
    class Pictures(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # The channels last: convolutions of this layout round otherwise.
            return x.view(-1, 4, 4, 4).to(memory_format=torch.channels_last)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Sequential(Pictures(), nn.Conv2d(4, 8, 3, padding=1)),
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
        )

    task = digits(model)
    whole = run(task, "ddg:modules=3", ["1", "2"], 30)
    first = run(task, "ddg:modules=3", ["1", "2"], 30, stop=11)
    saved = {k: Snapshot.from_bytes(s.to_bytes()) for k, s in first.snapshots.items()}
    assert saved[2].plain["strides"]["flight/11/input/0"] == [128, 1, 32, 8]
    last = run(task, "ddg:modules=3", ["1", "2"], 30, since=saved)
    assert (last.weights, last.state) == (whole.weights, whole.state)


class Live(torch.autograd.Function):
    """The identity; counts its graphs that are alive."""

    count = 0
    most = 0

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.guard = Guard()
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Guard:
    def __init__(self) -> None:
        Live.count += 1
        Live.most = max(Live.most, Live.count)

    def __del__(self) -> None:
        Live.count -= 1


@pytest.mark.parametrize(("method", "most"), [("bp", 1), ("ddg", 3), ("fdg", 5), ("fr", 1)])
def test_graphs_go_right_after_their_backward_pass(method: str, most: int) -> None:
    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Live.apply(x) if torch.is_grad_enabled() else x
            return result

    def model() -> nn.Module:
        first = nn.Sequential(nn.Linear(64, 32), Counted())
        return nn.Sequential(first, nn.Linear(32, 32), nn.Linear(32, 10))

    task = digits(model)
    Live.most = 0
    ended = run(task, spec_of(method), ["1", "2"], 20, stop=10)
    assert Live.most == most
    assert Live.count == ended.modules[0].in_flight * (method != "fr")
    del ended
    gc.collect()
    assert Live.count == 0


def test_the_last_module_is_never_late_and_the_others_as_they_should() -> None:
    ended = run(deep(), "ddg:modules=3", CUTS, 20, modulation=MODULATIONS.parse("inverse"))
    assert [m.version for m in ended.modules] == [20, 20, 20]
    assert [m.last_update.factors for m in ended.modules] == [(0.5,), (1.0,), (1.0,)]


def test_clipping_is_of_each_module() -> None:
    free = run(deep(), "ddg:modules=3", CUTS, 20)
    clipped = run(deep(), "ddg:modules=3", CUTS, 20, clip=ClipNorm(0.1))
    assert free.weights != clipped.weights
    moved = run(deep(), "ddg:modules=3", CUTS, 1, clip=ClipNorm(0.1), optimizer="sgd:lr=1")
    start = dict(build_model(deep(), 0, CPU, None).named_parameters())
    for snapshot in moved.snapshots.values():
        steps = [
            (t - start[n.removeprefix("parameter/")].detach()).square().sum()
            for n, t in snapshot.tensors.items()
            if n.startswith("parameter/")
        ]
        assert float(sum(steps)) ** 0.5 == pytest.approx(0.1, rel=1e-3)


def test_compensation_uses_the_weights_of_the_forward_pass() -> None:
    rule = COMPENSATIONS.parse("dc-asgd")
    assert (
        run(deep(), "ddg:modules=3", CUTS, 20, compensation=rule).weights
        != run(deep(), "ddg:modules=3", CUTS, 20).weights
    )
    for method in ("fr", "ddg:stash=none"):
        with pytest.raises(InvalidSetting, match="need the weights of the forward pass"):
            run(deep(), spec_of(method), CUTS, 20, compensation=rule)
    distance = MODULATIONS.parse("distance:c=0.0001")
    ended = run(deep(), "ddg:modules=3", CUTS, 20, modulation=distance)
    assert ended.modules[0].last_update.factors[0] < 1.0
    assert ended.modules[2].last_update.factors == (1.0,)


def test_what_crosses_a_cut_may_be_several_tensors_and_whole_numbers() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.layer(x)
            return y, (x[:, 0] > 0).long(), y.t()[:4].t()  # of other strides, and an alias

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 32)
            self.last = nn.Linear(36, 10)

        def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            y, sign, part = given
            scores: Tensor = self.last(torch.cat([torch.relu(y) + self.table(sign), part], 1))
            return scores

    task = digits(lambda: nn.Sequential(First(), Second()))
    _, losses = plain(task, 20, SGD)
    ended = run(task, "bp:modules=2", ["1"], 20, optimizer=SGD)
    assert ended.losses == pytest.approx(losses, rel=1e-5)
    late = run(task, "ddg:modules=2", ["1"], 20, optimizer=SGD)
    assert late.weights != ended.weights


def test_modules_without_weights_and_frozen_ones() -> None:
    ended = run(load_task("digits"), "ddg:modules=3", ["1", "2"], 20)  # the second is a ReLU
    assert [m.version for m in ended.modules] == [20, 20, 20]

    def model() -> nn.Module:
        built = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 10))
        built[0].requires_grad_(False)
        return built

    task = digits(model)
    ended = run(task, "ddg:modules=2", ["2"], 20)
    start = dict(build_model(task, 0, CPU, None).named_parameters())
    end = dict(ended.network.load(ended.snapshots).named_parameters())
    assert torch.equal(start["0.weight"], end["0.weight"])
    assert not torch.equal(start["2.weight"], end["2.weight"])


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    task = deep(dropout=0.0)
    mini_batches = MiniBatches(task, 16, 0)
    rules = Updating(parse_optimizer(SGD))
    network = Network(
        task, Backpropagation(modules=2), ["1"], rules, 0, mini_batches, CPU
    )  # fmt: skip
    first = network.module(1)
    batch, samples = mini_batches.fetch(0, CPU)
    before = first.snapshot(with_state=False)
    got = first.forward(0, None, batch, samples)
    assert got.outputs is not None
    bad = tuple(torch.full_like(t, torch.inf) for t in got.outputs)
    with pytest.raises(NotFinite):
        first.backward(0, bad)
    after = first.snapshot(with_state=False)
    for name, tensor in before.tensors.items():
        if name.startswith("parameter/"):
            assert torch.equal(tensor, after.tensors[name])
