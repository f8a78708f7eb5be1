"""Every optimizer on ranges of the flat vector against plain, per-parameter PyTorch."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_tools import CPU, apply, hand_made, make_server, named, same_bits, seeded

import gruppetto as gp
from gruppetto.errors import InvalidSetting
from gruppetto.training.optimizers import optimizer_names
from gruppetto.training.parameters import Layout
from gruppetto.training.ranges import OptimizerOnRanges

NAMES = sorted(optimizer_names())
STEPS = 12
#: Do not follow lr at every step; they are refused together with a modulation.
FIXED_RATE = ("asgd", "rprop")
#: Options that add state or branches.
VARIANTS = [
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("sgd", {"momentum": 0.9, "fused": True}),
    ("adam", {"amsgrad": True, "betas": (0.8, 0.95)}),
    ("adamw", {"fused": True}),
    ("adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    ("rmsprop", {"centered": True, "momentum": 0.5}),
    ("nadam", {"decoupled_weight_decay": True, "weight_decay": 0.01}),
]


class Plain(nn.Module):
    """Sizes that are no multiple of 64, beside one that spans several blocks."""

    def __init__(self, only_matrices: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes: list[tuple[int, ...]] = [(3, 5), (7,), (10, 20), (1,), (2, 3, 4), (64,)]
        if only_matrices:
            shapes = [(3, 5), (7, 2), (10, 20), (1, 4), (8, 8), (5, 5)]
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))


def model_for(name: str) -> nn.Module:
    return Plain(only_matrices=name == "muon")  # the one optimizer that takes matrices only


def two_groups(model: nn.Module, name: str) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    first: dict[str, Any] = {"params": [parameters[i] for i in (0, 2, 5)], "lr": 0.02}
    second: dict[str, Any] = {"params": [parameters[i] for i in (4, 1, 3)], "lr": 0.003}
    if name != "rprop":  # has no decay
        first["weight_decay"], second["weight_decay"] = 0.0, 0.05
    return [first, second]


def gradients_of(step: int, model: nn.Module) -> dict[str, Tensor | None]:
    """Random gradients; each parameter is now and then left out, and once all of them."""
    draw = random.Random(step)
    made: dict[str, Tensor | None] = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        gradient = torch.randn(p.shape, generator=seeded(100 * step + i))
        is_absent = step == 7 or (step > 2 and draw.random() < 0.3)
        made[name] = None if is_absent else gradient
    return made


def plain_steps(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients_of(step, model).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()


class OnRanges:
    """A model in a flat vector, stepped by the class under test."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.model = model_for(name)
        built = optimizer_names()[name](two_groups(self.model, name), **options)
        self.layout = Layout(self.model, [g["params"] for g in built.param_groups])
        self.weights = self.layout.adopt(self.model, CPU)
        parameters = dict(self.model.named_parameters())
        self.stepper = OptimizerOnRanges(built, parameters, self.layout, self.weights)

    def steps(self, steps: range) -> None:
        for step in steps:
            made = hand_made(self.layout, gradients_of(step, self.model))
            self.stepper.step(made.flat, made.absent, 1.0)

    def moved(self, name: str, options: dict[str, Any]) -> OnRanges:
        """The same weights and state in a new object, by way of JSON and copied tensors."""
        tensors, plain = self.stepper.state()
        other = OnRanges(name, options)
        other.weights.copy_(self.weights)
        saved = {n: t.detach().clone() for n, t in tensors.items()}
        other.stepper.load(saved, json.loads(json.dumps(plain)))
        # JSON has no tuples, and betas are to be what the user's code set.
        assert other.options() == self.options()
        return other

    def options(self) -> list[dict[str, Any]]:
        groups = self.stepper.optimizer.param_groups
        return [{k: v for k, v in g.items() if k != "params"} for g in groups]


def check_against_plain(name: str, options: dict[str, Any]) -> None:
    reference = model_for(name)
    start = named(reference)
    optimizer = optimizer_names()[name](two_groups(reference, name), **options)
    flat = OnRanges(name, options)
    flat.steps(range(5))
    flat = flat.moved(name, options)
    flat.steps(range(5, STEPS))
    plain_steps(optimizer, reference, range(STEPS))
    for key, parameter in reference.named_parameters():
        assert same_bits(parameter, flat.model.get_parameter(key)), key
        assert not same_bits(parameter, start[key]), f"{key} never moved"
    # The gaps between parameters are zero and stay zero.
    used = torch.zeros(flat.layout.lengths[0], dtype=torch.bool)
    for slot in flat.layout.slots:
        used[slot.start : slot.start + slot.size] = True
    assert not flat.weights.vectors[0][~used].any()


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_plain_pytorch_with_absent_gradients_and_a_restart(name: str) -> None:
    check_against_plain(name, {})


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_bits_of_plain_pytorch_with_options(name: str, options: dict[str, Any]) -> None:
    check_against_plain(name, options)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "muon"])
def test_a_scalar_parameter_trains_like_any_other(name: str) -> None:
    """Shape (): a temperature, a gate. Constructors make state of that shape, too."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.rest = nn.Parameter(torch.arange(1.0, 6.0))

    reference, model = Scaled(), Scaled()
    cls = optimizer_names()[name]
    plain, ours = cls(reference.parameters(), lr=0.1), cls(model.parameters(), lr=0.1)
    layout = Layout(model, [g["params"] for g in ours.param_groups])
    weights = layout.adopt(model, CPU)
    stepper = OptimizerOnRanges(ours, dict(model.named_parameters()), layout, weights)
    for step in range(3):
        gradients = {"scale": torch.tensor(0.3 + step), "rest": torch.full((5,), 0.2)}
        for key, gradient in gradients.items():
            reference.get_parameter(key).grad = gradient.clone()
        plain.step()
        stepper.step(hand_made(layout, gradients).flat, frozenset(), 1.0)
    assert same_bits(model.scale, reference.scale)
    assert same_bits(model.rest, reference.rest)


def test_a_users_own_optimizer_gets_every_parameter_in_its_shape() -> None:
    seen: list[tuple[int, ...]] = []

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.extend(tuple(p.shape) for g in self.param_groups for p in g["params"])
            super().step()

    server = make_server(optimizer=lambda m: Mine(m.parameters(), lr=0.1))
    apply(server, [hand_made(server.layout, named(server.model))])
    assert seen == [(7, 6), (7,), (3, 7), (3,)]


def test_an_optimizer_state_that_cannot_be_saved_is_refused() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["history"] = [1, 2]

    server = make_server(optimizer=lambda m: Odd(m.parameters(), lr=0.1))
    apply(server, [hand_made(server.layout, named(server.model))])
    with pytest.raises(InvalidSetting, match="keeps 'history' as list"):
        server.state()


# ---------------------------------------------------------------- the rate


def first_step(
    name: str, factors: list[float], options: dict[str, Any], apply_to: str = "learning-rate"
) -> dict[str, Tensor]:
    """How far each parameter moves at a server's first update."""
    modulation = gp.Inverse(apply_to=apply_to) if apply_to == "gradient" else None  # type: ignore[arg-type]
    server = make_server(
        lambda: model_for(name),
        gp.optimizer(optimizer_names()[name], lr=0.01, **options),
        modulation=modulation,
    )
    # Read back in float64: the step is a difference of nearly equal numbers.
    before = {n: p.double() for n, p in named(server.model).items()}
    gradients = [
        hand_made(
            server.layout,
            {n: torch.randn(p.shape, generator=seeded(7)) for n, p in before.items()},
            num_samples=4,
        )
        for _ in factors
    ]
    apply(server, gradients, factors)
    return {n: p.double() - before[n] for n, p in named(server.model).items()}


def check_half(whole: dict[str, Tensor], half: dict[str, Tensor]) -> None:
    for name, step in whole.items():
        assert step.abs().max() > 1e-5, f"{name} did not move"
        torch.testing.assert_close(2 * half[name], step, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in FIXED_RATE])
def test_half_the_factor_is_half_the_first_step(name: str, count: int) -> None:
    options: dict[str, Any] = {"eps": 1e-2} if name == "adadelta" else {}
    if name in ("adamw", "muon"):  # their default is not zero
        options["weight_decay"] = 0.0
    check_half(first_step(name, [1.0] * count, options), first_step(name, [0.5] * count, options))


#: Adafactor measures its step by the decayed weights, so that it is not quite proportional.
WITH_DECAY = [n for n in NAMES if n not in (*FIXED_RATE, "adafactor")]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", WITH_DECAY)
def test_half_the_factor_keeps_decay_in_proportion(name: str, count: int) -> None:
    options: dict[str, Any] = {"weight_decay": 0.3}
    if name == "adadelta":
        options["eps"] = 1e-2
    check_half(first_step(name, [1.0] * count, options), first_step(name, [0.5] * count, options))


def test_a_factor_on_the_gradient_does_not_reach_adam_but_reaches_sgd() -> None:
    """Why the rate is scaled by default: Adam cancels a factor on the gradient."""
    whole = first_step("adam", [1.0], {}, "gradient")
    half = first_step("adam", [0.5], {}, "gradient")
    for name in whole:
        torch.testing.assert_close(half[name], whole[name], rtol=1e-3, atol=2e-6)
    check_half(first_step("sgd", [1.0], {}, "gradient"), first_step("sgd", [0.5], {}, "gradient"))


def test_factors_of_two_contributions_average_to_the_rate() -> None:
    """n = 4 and 4, s = 1 and 0.5: rate 0.75 on the same gradient."""
    whole, mixed = first_step("sgd", [1.0, 1.0], {}), first_step("sgd", [1.0, 0.5], {})
    for name in whole:
        torch.testing.assert_close(mixed[name], 0.75 * whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FIXED_RATE)
def test_modulation_is_refused_where_the_rate_would_not_follow(name: str) -> None:
    optimizer = gp.optimizer(optimizer_names()[name], lr=0.01)
    with pytest.raises(InvalidSetting, match="does not follow its learning rate at every step"):
        make_server(optimizer=optimizer, modulation=gp.InverseMean(cap=True))
    make_server(optimizer=optimizer, modulation=gp.NoModulation())


@pytest.mark.parametrize("name", NAMES)
def test_rates_of_both_groups_are_back_at_their_base_after_a_step(name: str) -> None:
    flat = OnRanges(name, {})
    for step, rate in enumerate((0.5, 1 / 3, 1.0, 0.0)):
        made = hand_made(flat.layout, gradients_of(step, flat.model))
        flat.stepper.step(made.flat, made.absent, rate)
        assert [g["lr"] for g in flat.stepper.optimizer.param_groups] == [0.02, 0.003]


def test_the_rate_is_back_even_when_the_step_raises() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ArithmeticError

    server = make_server(optimizer=lambda m: Broken(m.parameters(), lr=0.25))
    with pytest.raises(ArithmeticError):
        apply(server, [hand_made(server.layout, named(server.model))], [0.5])
    saved = server.state()[1]["optimizer"]
    assert [g["lr"] for g in saved["groups"]] == [0.25]


def test_every_group_of_a_server_gets_the_rate() -> None:
    """SGD by hand: step = lr_group * s * (g + decay_group * p)."""
    lrs, decays = (0.2, 0.05), (0.0, 0.1)
    server = make_server(
        optimizer=lambda m: torch.optim.SGD(
            [
                {"params": m[2].parameters(), "lr": lrs[0], "weight_decay": decays[0]},
                {"params": m[0].parameters(), "lr": lrs[1], "weight_decay": decays[1]},
            ]
        )
    )
    before = named(server.model)
    gradients = {n: torch.randn(p.shape, generator=seeded(1)) for n, p in before.items()}
    apply(server, [hand_made(server.layout, gradients)], [0.5])
    for name, p in before.items():
        group = 0 if name.startswith("2.") else 1
        expected = p - 0.5 * lrs[group] * (gradients[name] + decays[group] * p)
        torch.testing.assert_close(server.model.get_parameter(name).detach(), expected)
    assert server.last_update.learning_rate == 0.1
    assert server.last_update.factors == (0.5,)


def test_the_users_optimizer_object_is_not_shared_between_servers() -> None:
    """One spec, many runs (a grid): no state may leak from one to the next."""
    spec = gp.optimizer(torch.optim.Adam, lr=0.1)
    options = copy.deepcopy(spec.options)
    moved = []
    for _ in range(2):
        server = make_server(optimizer=spec)
        apply(server, [hand_made(server.layout, named(server.model))])
        moved.append(named(server.model))
    assert all(same_bits(moved[0][n], moved[1][n]) for n in moved[0])
    assert spec.options == options
