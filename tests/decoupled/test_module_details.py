"""What else a module must get right: draws, looking ahead, absent weights, memory, factors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from lockstep import CPU, plain, run
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.module import Module
from gruppetto.decoupled.network import Network
from gruppetto.staleness import COMPENSATIONS, MODULATIONS
from gruppetto.training.learner import NotFinite
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.optimizers import parse_optimizer
from gruppetto.training.parameters import hash_tensors
from gruppetto.training.server import Updating
from gruppetto.training.task import Task

#: Two mini-batches of 16 and one of 8 in an epoch.
SAMPLES, WIDTH, CLASSES = 40, 6, 3
SGD = "sgd:lr=0.1,momentum=0.9,weight_decay=0.1"


def task_of(model: Callable[[], nn.Module], **more: Any) -> Task:
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(inputs, torch.arange(SAMPLES) % CLASSES)
    return Task(model=model, train=data, batch_size=16, epochs=2, **more)


def small(*, dropout: float = 0.2) -> Task:
    """Three blocks, two of them with BatchNorm and dropout."""

    def block() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(dropout)
        )

    return task_of(lambda: nn.Sequential(block(), block(), nn.Linear(WIDTH, CLASSES)))


def modules_of(task: Task, spec: str, optimizer: str = "sgd:lr=0.1") -> list[Module]:
    """Cut at every block."""
    method = METHODS.parse(spec)
    rules = Updating(parse_optimizer(optimizer))
    begins = [str(k) for k in range(1, method.modules)]
    network = Network(task, method, begins, rules, 0, MiniBatches(task, 16, 0), CPU)
    return [network.module(k) for k in range(1, method.modules + 1)]


# ------------------------------------------------------------------ random numbers


class Draws(nn.Module):
    """The identity; draws a number each time and keeps it, and whether there is a graph."""

    seen: ClassVar[list[float]] = []
    graphs: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(torch.rand(())))
        self.graphs.append(torch.is_grad_enabled())
        return x


def drawing() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Draws()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Sequential(Draws(), nn.Linear(WIDTH, CLASSES)))


def test_each_module_draws_numbers_of_its_own_for_each_mini_batch() -> None:
    task = task_of(drawing)
    modules = modules_of(task, "bp:modules=3")
    batch, samples = MiniBatches(task, 16, 0).fetch(0, CPU)
    Draws.seen.clear()
    for mini_batch in range(4):
        payload = None
        for module in modules:
            payload = module.forward(mini_batch, payload, batch, samples).outputs
    assert len(set(Draws.seen)) == len(Draws.seen) == 12


@pytest.mark.parametrize("number", [1, 2])
def test_a_replay_draws_what_the_forward_pass_drew(number: int) -> None:
    task = task_of(drawing)
    module = modules_of(task, "fr:modules=3")[number - 1]
    batch, samples = MiniBatches(task, 16, 0).fetch(0, CPU)
    Draws.seen.clear()
    for mini_batch in range(2):
        given = None if number == 1 else (torch.ones(16, WIDTH),)
        module.forward(mini_batch, given, batch, samples)
    module.backward(0, (torch.ones(16, WIDTH),))
    first, second, again = Draws.seen
    assert first == again != second
    assert Draws.graphs[-3:] == [False, False, True]


# ------------------------------------------------------------------ weights


def test_looking_ahead_goes_on_by_the_last_change_of_the_weights() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES))
    first, _ = modules_of(task_of(lambda: model), "ddg:modules=2,lookahead=0.5", SGD)
    batch, samples = MiniBatches(task_of(lambda: model), 16, 0).fetch(0, CPU)
    weights = []
    for mini_batch in range(5):
        weights.append(first.snapshot(with_state=False).tensors["parameter/0.weight"])
        w, before = weights[-1], weights[-2 if mini_batch > 1 else -1]
        (outputs,) = first.forward(mini_batch, None, batch, samples).outputs or ()
        ahead = w + 0.5 * (w - before) if mini_batch > 0 else w
        torch.testing.assert_close(outputs, batch[0] @ ahead.t())
        if mini_batch > 0:
            first.backward(mini_batch - 1, (torch.ones(16, WIDTH),))
            first.step(mini_batch - 1)
        assert first.version == mini_batch


class Sometimes(nn.Module):
    """Has a layer that some mini-batches go past."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.rarely(x) if float(x.detach()[0, 0]) > 0 else y


def test_weights_without_a_gradient_stay_as_they_do_in_plain_training() -> None:
    task = task_of(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Sometimes(), nn.Linear(WIDTH, CLASSES)
        )
    )
    model, losses = plain(task, 12, SGD)
    ended = run(task, "bp:modules=2", ["2"], 12, optimizer=SGD)
    assert ended.losses == losses
    assert ended.weights == hash_tensors(dict(model.named_parameters()))
    late = run(task, "ddg:modules=3", ["2", "3"], 12, optimizer=SGD)
    never = dict(late.network.load(late.snapshots).named_parameters())["2.never"]
    assert torch.equal(never, torch.ones(3))


class Twice(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))


@pytest.mark.parametrize("method", ["ddg", "fr"])
def test_weights_tied_within_a_module_are_tied_in_its_copies(method: str) -> None:
    task = task_of(lambda: nn.Sequential(Twice(), nn.Linear(WIDTH, CLASSES)))
    # Weights do not move, so that the momentum is the sum of backpropagation's gradients.
    still = "sgd:lr=0,momentum=0.9"
    ours, theirs = (
        run(task, f"{name}:modules=2", ["1"], 8, optimizer=still).snapshots[1].tensors
        for name in (method, "bp")
    )
    sums = [name for name in theirs if name.startswith("optimizer/")]
    assert sums and all(torch.equal(ours[name], theirs[name]) for name in sums)


# ------------------------------------------------------------------ late gradients


def test_factors_know_the_delay_of_their_module() -> None:
    rule = MODULATIONS.parse("inverse-mean")
    ended = run(small(), "ddg:modules=3", ["1", "2"], 6, modulation=rule)
    factors = [m.last_update.factors[0] for m in ended.modules]
    assert factors == pytest.approx([1 / 3, 1 / 2, 1])
    first = run(small(), "ddg:modules=3", ["1", "2"], 6, modulation=MODULATIONS.parse("inverse"))
    assert [m.last_update.factors for m in first.modules] == [(0.5,), (1.0,), (1.0,)]


@pytest.mark.parametrize(
    "updating",
    [
        {"modulation": MODULATIONS.parse("inverse:normalise=true")},
        {"compensation": COMPENSATIONS.parse("gap-aware")},
        {"compensation": COMPENSATIONS.parse("dc-asgd")},
    ],
    ids=["factors", "gaps", "past-weights"],
)
def test_a_resumed_run_treats_late_gradients_as_the_whole_one(updating: dict[str, Any]) -> None:
    spec, cuts = "fdg:modules=3", ["1", "2"]
    whole = run(small(), spec, cuts, 12, **updating)
    first = run(small(), spec, cuts, 12, stop=6, **updating)
    last = run(small(), spec, cuts, 12, since=first.snapshots, **updating)
    assert first.losses + last.losses == whole.losses
    assert (last.weights, last.state) == (whole.weights, whole.state)
    assert whole.weights != run(small(), spec, cuts, 12).weights
    for mine, theirs in zip(last.modules, whole.modules, strict=True):
        assert mine.last_update == theirs.last_update


@pytest.mark.parametrize("version", [0, 1, 5, 10, 12])
def test_a_snapshot_holds_what_the_next_module_has_not_taken(version: int) -> None:
    ended = run(small(), "fdg:modules=3", ["1", "2"], 12, stop=version)
    for module, (delay, next_delay) in {1: (4, 2), 2: (2, 0), 3: (0, 0)}.items():
        sent = range(min(version + next_delay, 12), min(version + delay, 12))
        held = ended.snapshots[module].plain
        assert sorted(map(int, held["sent"])) == list(sent)[: delay if version else 0]
        assert len(held["flights"]) == (min(delay, 12 - version) if version else 0)


# ------------------------------------------------------------------ memory


class Turned(nn.Module):
    """Gives a part of the transposed; keeps an eye on its outputs."""

    given: ClassVar[list[weakref.ref[Tensor]]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x.t()[2:].t()
        self.given.append(weakref.ref(y))
        return y


def turning() -> nn.Module:
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), Turned())
    return nn.Sequential(first, nn.Linear(WIDTH - 2, CLASSES))


def test_what_is_sent_has_no_gaps() -> None:
    task = task_of(turning)
    batch, samples = MiniBatches(task, 16, 0).fetch(0, CPU)
    (sent,) = modules_of(task, "ddg:modules=2")[0].forward(0, None, batch, samples).outputs or ()
    assert sent.is_contiguous() and sent.storage_offset() == 0 and not sent.requires_grad


@pytest.mark.parametrize("method", ["bp", "ddg", "fr"])
def test_a_graph_goes_with_its_backward_pass(method: str) -> None:
    task = task_of(turning)
    batch, samples = MiniBatches(task, 16, 0).fetch(0, CPU)
    module = modules_of(task, f"{method}:modules=2")[0]
    module.forward(0, None, batch, samples)
    assert (Turned.given[-1]() is None) == (method == "fr")
    module.backward(0, (torch.ones(16, WIDTH - 2),))
    assert Turned.given[-1]() is None  # before its step


# ------------------------------------------------------------------ what is told


def test_a_loss_that_is_not_finite_is_told_as_such() -> None:
    task = task_of(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)),
        loss=lambda outputs, batch: outputs.sum() * torch.inf,
    )
    with pytest.raises(NotFinite, match="loss"):
        run(task, "ddg:modules=2", ["1"], 1)


def test_looking_at_a_version_leaves_the_modules_as_they_are() -> None:
    early = run(small(), "ddg:modules=3", ["1", "2"], 6, stop=2)
    ended = run(small(), "ddg:modules=3", ["1", "2"], 6)
    ended.network.load(early.snapshots)
    for module in ended.modules:
        now = module.snapshot(with_state=False)
        for name, tensor in now.tensors.items():
            assert torch.equal(tensor, ended.snapshots[module.number].tensors[name]), name


def test_a_hash_of_the_state_tells_what_optimizers_remember() -> None:
    task = task_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)))
    still = [
        run(task, "ddg:modules=2", ["1"], n, optimizer="sgd:lr=0,momentum=0.9") for n in (2, 3)
    ]
    assert still[0].weights == still[1].weights
    assert still[0].state != still[1].state
