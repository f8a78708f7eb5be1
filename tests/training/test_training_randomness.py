"""Random numbers of a mini-batch depend on (seed, mini-batch) and on nothing else."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training_tools import CPU, class_data, make_task, same_bits, train

import gruppetto as gp
from gruppetto.training.learner import Gradient, Learner
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.randomness import (
    Stream,
    keep_global_randomness,
    seed_everything,
    stream_seed,
)
from gruppetto.training.server import Server, Updating

SGD = gp.optimizer(torch.optim.SGD, lr=0.1)


class Augmented:
    """Adds noise from all three global generators; ``extra`` draws more than it needs."""

    def __init__(self, extra: int = 0) -> None:
        self.data = class_data(20)
        self.extra = extra

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        noise = torch.randn(6) + float(np.random.randn()) + random.random()
        torch.rand(self.extra)
        return x + noise, y


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))


class Team:
    """A server and learners of their own, all of one run."""

    def __init__(self, learners: int = 1, seed: int = 0, data: Any = None) -> None:
        task = make_task(dropping, train=data or Augmented())
        self.server = Server(task, Updating(SGD), seed, 20, CPU)
        self.learners = []
        for _ in range(learners):
            mini_batches = MiniBatches(task, 4, seed)
            replica, layout = self.server.replica(), self.server.layout
            self.learners.append(Learner(task, replica, layout, mini_batches, seed, CPU))

    def gradient(self, mini_batch: int, learner: int = 0) -> Gradient:
        return self.learners[learner].compute(mini_batch, self.server.snapshot())


def equal(left: Gradient, right: Gradient) -> bool:
    return left.loss == right.loss and same_bits(left.flat.vectors[0], right.flat.vectors[0])


def test_the_same_mini_batch_is_the_same_whoever_computes_it_and_whenever() -> None:
    team = Team(learners=3)
    first = {b: team.gradient(b, learner=0) for b in range(5)}
    for learner, order in ((1, (4, 2, 0, 3, 1)), (2, (3, 3, 1))):
        for mini_batch in order:
            torch.manual_seed(mini_batch + 99)  # whatever happened in between
            random.seed(4)
            np.random.seed(5)
            assert equal(team.gradient(mini_batch, learner), first[mini_batch])
    for a, b in itertools.combinations(first, 2):
        assert not equal(first[a], first[b])


def test_the_next_epoch_and_another_seed_augment_anew() -> None:
    """The same sample is drawn with other noise at another mini-batch or seed."""
    seen = {}
    for seed in (0, 1):
        task = make_task(train=Augmented(), sampler=lambda epoch: range(20))
        mini_batches = MiniBatches(task, 20, seed)
        for epoch in (0, 1):
            seen[seed, epoch] = mini_batches.fetch(epoch, CPU)[0][0]
    for a, b in itertools.combinations(seen.values(), 2):
        assert not torch.equal(a, b)
    assert not equal(Team(seed=0).gradient(0), Team(seed=1).gradient(0))


def test_dropout_does_not_depend_on_what_fetching_drew() -> None:
    """Two streams: otherwise a cached or faster dataset would change the training."""
    masks = []
    for extra in (0, 7):
        team = Team(data=Augmented(extra))
        seen: list[Tensor] = []
        model = team.learners[0]._model
        model[1].register_forward_hook(  # type: ignore[index]
            lambda module, args, output, seen=seen: seen.append(output == 0)
        )
        team.gradient(3)
        masks.append(seen[0])
    assert masks[0].any() and not masks[0].all()
    assert torch.equal(masks[0], masks[1])


def test_streams_of_a_seed_are_all_different() -> None:
    seeds = {
        stream_seed(seed, stream, number)
        for seed in (0, 1, 2**40)
        for stream in Stream
        for number in range(50)
    }
    assert len(seeds) == 3 * len(Stream) * 50
    assert all(0 <= s < 2**64 for s in seeds)


def test_seeding_sets_all_three_generators() -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    with keep_global_randomness():
        seed_everything(0, Stream.DATA, 1, CPU)
        first = draws()
        seed_everything(0, Stream.DATA, 2, CPU)
        other = draws()
        seed_everything(0, Stream.DATA, 1, CPU)
        assert draws() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


# -------------------------------------------------------------- the caller's own


def states() -> tuple[Any, ...]:
    keys = np.random.get_state()
    return torch.get_rng_state().tolist(), keys[0], keys[1].tolist(), *keys[2:], random.getstate()


def test_training_leaves_the_callers_generators_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    torch.randn(1)
    np.random.randn()  # an odd draw leaves half a pair behind, part of the state
    before = states()
    task = make_task(dropping, train=Augmented(), test=Augmented())
    train(task, tmp_path / "run", batch_size=4, epochs=1, optimizer=SGD, evaluate="live")
    assert states() == before


def test_a_run_that_fails_leaves_them_alone_too(tmp_path: Path) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        torch.rand(3)
        raise ArithmeticError("no loss today")

    before = states()
    with pytest.raises(gp.TooManyGivenUp, match="no loss today"):
        train(
            make_task(dropping, train=Augmented(), loss=loss), tmp_path / "run",
            batch_size=4, epochs=1, optimizer=SGD,
        )  # fmt: skip
    assert states() == before


def test_what_the_caller_drew_before_does_not_matter(tmp_path: Path) -> None:
    task = make_task(dropping, train=Augmented())
    hashes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        run = train(task, tmp_path / str(seed), batch_size=4, epochs=1, optimizer=SGD)
        hashes.append(run.result["weights_sha256"])
    assert hashes[0] == hashes[1]
    other = train(task, tmp_path / "other", batch_size=4, epochs=1, optimizer=SGD, seed=1)
    assert other.result["weights_sha256"] != hashes[0]
