"""Every rule and every compensation against numpy, step by step, and against numbers by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from late_oracle import FALL, GROUPS, RATES, START, UPDATES, Oracle, Rule, gradient_at
from torch import nn
from training_tools import CPU, contribution, hand_made, make_server, same_bits

import gruppetto as gp
from gruppetto.staleness import COMPENSATIONS, MODULATIONS, Factors, Situation
from gruppetto.training.learner import Gradient
from gruppetto.training.parameters import Flat, squared_distance
from gruppetto.training.server import Server

LIVE = 3
RULES: dict[str, Rule] = {
    "none": lambda s, d, r, v: 1.0,
    "inverse": lambda s, d, r, v: 1 / max(1, s),
    "distance:c=0.2": lambda s, d, r, v: min(0.2 / d, r) / r if d else 1.0,
    "delay-adaptive": lambda s, d, r, v: LIVE / max(LIVE, s),
    "threshold": lambda s, d, r, v: float(s <= LIVE),
    "threshold:scale=1.5,limit=1": lambda s, d, r, v: 1.0 if s <= 1 else min(1.0, 1.5 / s),
    "inverse-sqrt": lambda s, d, r, v: (1 + s) ** -0.5,
    "polynomial:a=2.0": lambda s, d, r, v: (1 + s) ** -2.0,
    "exponential:beta=0.7": lambda s, d, r, v: 0.7**s,
    "annealed-power:updates=5": lambda s, d, r, v: max(1, s) ** -max(0.0, 1 - v / 5),
}
CHANGES = {
    "none": "none",
    "dc-asgd": "dc-asgd:strength=0.3",
    "dc-asgd-adaptive": "dc-asgd-adaptive:strength=0.3,decay=0.9",
    "gap-aware": "gap-aware:decay=0.8",
}
OPTIMIZERS: dict[str, tuple[Any, float | None]] = {
    "sgd": (torch.optim.SGD, 0.0),
    "momentum": (torch.optim.SGD, 0.9),
    "adam": (torch.optim.Adam, None),
}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(START[:3]))
        self.second = nn.Parameter(torch.tensor(START[3:]).reshape(2, 1))


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=FALL)


def late_server(optimizer: str, modulation: str, compensation: str) -> Server:
    cls, momentum = OPTIMIZERS[optimizer]
    more = {} if momentum is None else {"momentum": momentum}

    def build(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [p], "lr": lr} for p, lr in zip(model.parameters(), RATES, strict=True)
        ]
        made: torch.optim.Optimizer = cls(groups, lr=RATES[0], **more)
        return made

    return make_server(
        Weights,
        build,
        modulation=MODULATIONS.parse(modulation),
        compensation=COMPENSATIONS.parse(compensation),
        schedule=gp.schedule(falling, every="update"),
    )


def vector(flat: Flat, server: Server) -> np.ndarray[Any, np.dtype[np.float64]]:
    parts = [view.reshape(-1) for view in server.layout.views(flat)]
    return torch.cat(parts).numpy().copy()


def gradient_of(server: Server, past: Flat, number: int, num_samples: int) -> Gradient:
    values = torch.from_numpy(gradient_at(vector(past, server), number))
    parts = {"first": values[GROUPS[0]], "second": values[GROUPS[1]].reshape(2, 1)}
    return hand_made(server.layout, parts, num_samples)


def take_updates(
    server: Server, modulation: str, updates: Sequence[Sequence[tuple[int, int]]] = UPDATES
) -> list[list[float]]:
    """What an engine and a coordinator of three learners do."""
    factors = Factors(MODULATIONS.parse(modulation))
    versions: list[Flat] = []
    number, applied = 0, []
    for version, update in enumerate(updates):
        versions.append(server.snapshot().flat)
        known = factors.of([Situation(version - v, 0.0, LIVE, version) for v, _ in update])
        contributions, gradients = [], []
        for (v, n), factor in zip(update, known, strict=True):
            contributions.append(contribution(number, n, factor, version=v, staleness=version - v))
            gradients.append(gradient_of(server, versions[v], number, n))
            number += 1
        past = [versions[v] for v, _ in update] if server.needs_past else []
        server.apply(contributions, gradients, past)
        applied.append(list(server.last_update.factors))
    return applied


CASES = [(m, c) for m in RULES for c in CHANGES if m in ("none", "distance:c=0.2") or c == "none"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("modulation", "change"), CASES)
def test_trajectory(modulation: str, change: str, optimizer: str) -> None:
    oracle = Oracle(RULES[modulation], change, OPTIMIZERS[optimizer][1])
    oracle.run()
    server = late_server(optimizer, modulation, CHANGES[change])
    factors = take_updates(server, modulation)
    for found, expected in zip(factors, oracle.factors, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(vector(server.weights, server), oracle.weights, rtol=1e-9)


@pytest.mark.parametrize("modulation", ["distance:c=0.2", "threshold", "inverse-sqrt"])
def test_trajectory_of_the_literal_form(modulation: str) -> None:
    """Where all is dropped the gradient is zero and momentum goes on, as the equation says."""
    oracle = Oracle(RULES[modulation], apply_to="gradient")
    oracle.run()
    spec = modulation + (",apply_to=gradient" if ":" in modulation else ":apply_to=gradient")
    server = late_server("momentum", spec, "none")
    take_updates(server, spec)
    np.testing.assert_allclose(vector(server.weights, server), oracle.weights, rtol=1e-9)


def test_a_normalised_rule_takes_longer_steps_than_the_base_rate() -> None:
    spec = "polynomial:a=2.0,normalise=true"
    server = late_server("momentum", spec, "none")
    found = take_updates(server, spec)
    raw: list[float] = []
    for version, update in enumerate(UPDATES):
        mine = [(1 + version - past) ** -2.0 for past, _ in update]
        raw += mine
        assert found[version] == pytest.approx([f / np.mean(raw) for f in mine], rel=1e-12)
    assert max(max(factors) for factors in found) > 1


# --------------------------------------------------------------------------- by hand


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))


def by_hand(modulation: str = "none", compensation: str = "none") -> list[float]:
    """One weight, SGD at rate 0.5: gradient 1 on version 0, 0.5 on version 0, 2 on version 1."""
    server = make_server(
        One,
        gp.optimizer(torch.optim.SGD, lr=0.5),
        modulation=MODULATIONS.parse(modulation),
        compensation=COMPENSATIONS.parse(compensation),
    )
    factors = Factors(MODULATIONS.parse(modulation))
    versions, found = [], []
    for version, (past, value) in enumerate([(0, 1.0), (0, 0.5), (1, 2.0)]):
        versions.append(server.snapshot().flat)
        (factor,) = factors.of([Situation(version - past, 0.0, 1, version)])
        told = contribution(version, 1, factor, version=past, staleness=version - past)
        gradient = hand_made(server.layout, {"w": torch.tensor([value], dtype=torch.float64)})
        server.apply([told], [gradient], [versions[past]] if server.needs_past else [])
        found.append(float(server.model.w.detach()))  # type: ignore[operator, arg-type]
    return found


@pytest.mark.parametrize(
    ("modulation", "compensation", "expected"),
    [
        ("none", "none", [0.5, 0.25, -0.75]),
        # Moved 0.5: 0.0625 / (0.5·0.25) is a half. Moved 0.125: the full rate.
        ("distance:c=0.0625", "none", [0.5, 0.375, -0.625]),
        ("polynomial:a=1.0", "none", [0.5, 0.375, -0.125]),
        ("threshold:limit=0", "none", [0.5, 0.5, 0.5]),
        # 0.5 + 2·0.25·(−0.5) = 0.25; then 2 + 2·4·(0.375 − 0.5) = 1.
        ("none", "dc-asgd:strength=2.0", [0.5, 0.375, -0.125]),
        # MS = g² with decay 0: λ·|g|·(w − w_past) but for 1e-7.
        # 0.5 + 1·0.5·(−0.5) = 0.25; 2 + 2·(−0.125) = 1.75.
        ("none", "dc-asgd-adaptive:strength=1.0,decay=0.0", [0.5, 0.375, -0.5]),
        # The step was 1·0.5: penalty 1 + 0.5/0.5. Then, with decay 0, the last step alone counts:
        # 0.25·0.5 moved 0.125: penalty 2 again.
        ("none", "gap-aware:decay=0.0", [0.5, 0.375, -0.125]),
    ],
)
def test_numbers_by_hand(modulation: str, compensation: str, expected: list[float]) -> None:
    assert by_hand(modulation, compensation) == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------- what holds


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_gradient_keeps_its_bits(change: str, dtype: torch.dtype) -> None:
    """Negative zero, too: SGD at rate 1 from zero weights shows every bit of the gradient."""

    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(200, dtype=dtype))

    server = make_server(Zeros, compensation=COMPENSATIONS.parse(CHANGES[change]))
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(200, generator=generator).to(dtype)
    values[::7] = -0.0
    for _ in range(2):
        gradient = hand_made(server.layout, {"w": values})
        before = gradient.flat.clone()
        server.apply([contribution()], [gradient], [server.snapshot().flat])
        assert same_bits(gradient.flat.vectors[0], before.vectors[0])


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "none"])
def test_state_is_saved_hashed_and_taken_back(change: str) -> None:
    """Loaded in the middle, the rest of the run is the same to the bit, hash included."""
    whole = late_server("adam", "none", CHANGES[change])
    take_updates(whole, "none")
    first = late_server("adam", "none", CHANGES[change])
    factors = Factors(MODULATIONS.parse("none"))
    versions: list[Flat] = []
    number, server = 0, first
    for version, update in enumerate(UPDATES):
        if version == 4:
            tensors, plain = first.state()
            server = late_server("adam", "none", CHANGES[change])
            before = server.state_sha256()
            server.load({n: t.clone() for n, t in tensors.items()}, plain)
            assert server.state_sha256() == first.state_sha256() != before
        versions.append(server.snapshot().flat)
        known = factors.of([Situation(version - v) for v, _ in update])
        told, gradients = [], []
        for (v, n), factor in zip(update, known, strict=True):
            told.append(contribution(number, n, factor, version=v, staleness=version - v))
            gradients.append(gradient_of(server, versions[v], number, n))
            number += 1
        server.apply(told, gradients, [versions[v] for v, _ in update])
    assert server.state_sha256() == whole.state_sha256()
    assert server.weights_sha256() == whole.weights_sha256()


@pytest.mark.parametrize("change", ["dc-asgd-adaptive", "gap-aware"])
def test_what_is_remembered_counts_in_the_hash(change: str) -> None:
    server = late_server("momentum", "none", CHANGES[change])
    take_updates(server, "none", UPDATES[:2])
    before = server.state_sha256()
    tensors, _ = server.state()
    remembered = [t for n, t in tensors.items() if n.startswith("compensation/")]
    remembered[0][0] += 1.0
    assert server.state_sha256() != before


def test_dropped_updates_leave_momentum_and_moments_alone() -> None:
    """All factors 0: no step; the update counts, its samples too, and the schedule goes on."""
    server = late_server("adam", "threshold", "none")
    take_updates(server, "threshold", UPDATES[:2])
    tensors, plain = server.state()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    gradient = gradient_of(server, server.weights, 9, 4)
    server.apply([contribution(9, 4, 0.0, version=0, staleness=9)], [gradient])
    after, now = server.state()
    assert all(same_bits(after[name], tensor) for name, tensor in before.items())
    assert now["samples_applied"] == plain["samples_applied"] + 4
    assert server.last_update.learning_rate == 0.0
    assert now["optimizer"]["groups"][0]["lr"] == pytest.approx(0.2 * FALL**3)


def test_absent_gradients_stay_absent() -> None:
    for change in CHANGES.values():
        server = late_server("momentum", "none", change)
        start = server.snapshot().flat
        for version in range(3):
            gradient = hand_made(server.layout, {"first": torch.ones(3, dtype=torch.float64)})
            told = contribution(version, 1, version=0, staleness=version)
            server.apply([told], [gradient], [start] if server.needs_past else [])
        moved = torch.tensor(vector(server.weights, server) - START)
        assert bool((moved[:3] != 0).all()) and bool((moved[3:] == 0).all())


def test_only_what_needs_the_past_asks_for_it() -> None:
    def needs(modulation: str, compensation: str) -> bool:
        return late_server("sgd", modulation, compensation).needs_past

    assert not needs("none", "none") and not needs("inverse", "none")
    assert needs("distance:c=1.0", "none") and needs("none", "dc-asgd")


@pytest.mark.parametrize("length", [1, 63, 64, 1000, (1 << 14) + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_distances_are_sums_in_float64(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    left, right = (torch.randn(length, generator=generator).to(dtype) for _ in range(2))
    expected = float(np.sum((left.double().numpy() - right.double().numpy()) ** 2))
    found = squared_distance(Flat([left, left]), Flat([right, left]))
    assert found == pytest.approx(expected, rel=1e-12)
    assert left.device == CPU
