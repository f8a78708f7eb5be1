"""Optimizers by name: what is read, and the sentences of what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_tools import make_server, make_task, mlp, train

import gruppetto as gp
from gruppetto.errors import InvalidSetting, UsageError
from gruppetto.training.optimizers import OptimizerSpec, optimizer_names, parse_optimizer


@pytest.mark.parametrize(
    ("text", "cls", "options"),
    [
        ("sgd:lr=0.1", torch.optim.SGD, {"lr": 0.1}),
        ("sgd:lr=1,momentum=0.9", torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}),
        ("sgd:lr=0.1,momentum=0.9,nesterov=true", torch.optim.SGD,
         {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("adam:lr=1e-3,betas=0.9/0.99", torch.optim.Adam, {"lr": 1e-3, "betas": (0.9, 0.99)}),
        ("adamw:weight_decay=0.01,amsgrad=false", torch.optim.AdamW,
         {"weight_decay": 0.01, "amsgrad": False}),
        ("rmsprop", torch.optim.RMSprop, {}),
        ("rprop:etas=0.5/1.2,step_sizes=1e-6/50", torch.optim.Rprop,
         {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)}),
    ],
)  # fmt: skip
def test_read(text: str, cls: type, options: dict[str, Any]) -> None:
    spec = parse_optimizer(text)
    assert spec.cls is cls
    assert spec.options == options
    assert {k: type(v) for k, v in spec.options.items()} == {k: type(v) for k, v in options.items()}


@pytest.mark.parametrize("name", sorted(optimizer_names()))
def test_every_name_builds_with_a_rate(name: str) -> None:
    spec = parse_optimizer(f"{name}:lr=0.01")
    built = spec([nn.Parameter(torch.zeros(2, 2))])
    assert type(built) is optimizer_names()[name]
    assert built.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("adm:lr=0.1", r"unknown optimizer 'adm'; valid: sgd, .*\(did you mean 'adam'\?\)"),
        ("", "optimizer: expected something like name:key=value"),
        ("sgd:", "ends in a colon"),
        ("sgd:lr", "expected key=value, got 'lr'"),
        ("sgd:lr=0.1,lr=0.2", "'lr' is given twice"),
        ("sgd:momentom=0.9",
         r"optimizer 'sgd' has no key 'momentom'; valid: lr, .*\(did you mean 'momentum'\?\)"),
        ("sgd:params=1", "has no key 'params'"),
        ("sgd:self=1", "has no key 'self'"),
        ("sgd:lr=fast", r"sgd:lr: expected a number \(or a/b for a pair\), got 'fast'"),
        ("adam:betas=0.9", "adam:betas: expected 2 numbers like 0.9/0.999, got '0.9'"),
        ("adam:betas=0.9/0.99/0.999", "expected 2 numbers"),
        ("adam:betas=0.9/x", "expected a number"),
        ("sgd:lr=-1", "optimizer SGD: Invalid learning rate: -1"),
        ("adam:betas=0.9/1.5", "optimizer Adam: Invalid beta parameter"),
        ("sgd:lr=0.1,nesterov=true", "Nesterov momentum requires a momentum"),
        ("lbfgs:lr=0.1", "LBFGS is refused: it evaluates the loss several times per step"),
        ("LBFGS", "LBFGS is refused"),
        ("sparse-adam", "SparseAdam is refused: it needs sparse gradients"),
        ("sparseadam:lr=0.1", "SparseAdam is refused"),
    ],
)  # fmt: skip
def test_refused(text: str, sentence: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_optimizer(text)
    assert re.search(sentence, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "options", "sentence"),
    [
        (torch.optim.LBFGS, {"lr": 1.0}, "LBFGS is refused"),
        (torch.optim.SparseAdam, {}, "SparseAdam is refused"),
        (torch.optim.SGD, {"momentun": 0.9}, "did you mean 'momentum'"),
        (torch.optim.SGD, {"lr": -1.0}, "Invalid learning rate"),
        (torch.optim.SGD, {"lr": "0.1"}, "optimizer SGD: "),
        (nn.Linear, {}, r"expected a torch\.optim\.Optimizer class, got"),
        ("sgd", {}, "expected a torch.optim.Optimizer class, got 'sgd'"),
    ],
)
def test_objects_refused(cls: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        gp.optimizer(cls, **options)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS is refused"),
        (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam is refused"),
        (lambda m: None, "return a torch.optim.Optimizer, got NoneType"),
    ],
)
def test_functions_of_the_model_refused(make: Any, sentence: str) -> None:
    with pytest.raises(InvalidSetting, match=sentence):
        make_server(optimizer=make)


def test_a_model_the_optimizer_cannot_take_is_refused_in_a_sentence() -> None:
    """Muon takes matrices only; the biases must give a usage error, not a traceback."""
    if "muon" not in optimizer_names():
        pytest.skip("this torch has no Muon")
    with pytest.raises(UsageError, match="2D parameters"):
        make_server(optimizer=parse_optimizer("muon:lr=0.02"))


@pytest.mark.parametrize(
    "text", ["sgd:lr=0.1,momentum=0.9", "adam:lr=0.001,betas=0.9/0.99,amsgrad=true"]
)
def test_a_spec_is_written_so_that_it_can_be_read_again(text: str) -> None:
    spec = parse_optimizer(text)
    assert parse_optimizer(str(spec)) == spec


def test_a_run_with_a_pair_among_its_options_can_be_replayed(tmp_path: Path) -> None:
    """The folder names the optimizer, so the name must lead back to it."""
    optimizer = gp.optimizer(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9))
    run = train(make_task(), tmp_path / "run", batch_size=10, epochs=1, optimizer=optimizer)
    assert gp.replay(run.folder.path, task=make_task(), progress=False)["matches"]


def test_an_option_that_no_spec_can_write_is_asked_for_again(tmp_path: Path) -> None:
    """The folder cannot name it: a usage error that says so, or the right optimizer."""

    class Mine(torch.optim.SGD):
        pass

    optimizer = gp.optimizer(Mine, lr=0.1)
    run = train(make_task(), tmp_path / "run", batch_size=10, epochs=1, optimizer=optimizer)
    with pytest.raises(gp.UsageError, match="give it again: optimizer="):
        gp.replay(run.folder.path, task=make_task(), progress=False)
    assert gp.replay(run.folder.path, task=make_task(), optimizer=optimizer, progress=False)[
        "matches"
    ]


def test_a_class_instead_of_an_optimizer_is_refused_by_train(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"expected a spec like sgd:lr=0\.1"):
        gp.train(
            make_task(),
            batch_size=5,
            epochs=1,
            optimizer=torch.optim.SGD,
            out=tmp_path,
            engine="virtual",
        )
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------ the task's groups


def groups_by_kind(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "lr_scale": 0.5, "weight_decay": 0.0},
    ]


def rates_and_decays(optimizer: Any) -> list[tuple[float, float]]:
    server = make_server(mlp, optimizer, param_groups=groups_by_kind)
    groups = server.state()[1]["optimizer"]["groups"]
    assert all("lr_scale" not in g for g in groups)
    return [(g["lr"], g["weight_decay"]) for g in groups]


def test_lr_scale_multiplies_the_given_rate() -> None:
    assert rates_and_decays(parse_optimizer("sgd:lr=0.4")) == [(0.4, 0.1), (0.2, 0.0)]


def test_lr_scale_multiplies_the_optimizers_own_rate_when_none_is_given() -> None:
    assert rates_and_decays(OptimizerSpec(torch.optim.Adam)) == [(1e-3, 0.1), (5e-4, 0.0)]


def test_a_group_keeps_a_rate_of_its_own() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, second = list(model[0].parameters()), list(model[2].parameters())
        return [{"params": first, "lr": 0.7}, {"params": second}]

    server = make_server(mlp, parse_optimizer("sgd:lr=0.4"), param_groups=groups)
    assert [g["lr"] for g in server.state()[1]["optimizer"]["groups"]] == [0.7, 0.4]
