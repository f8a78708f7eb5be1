"""What users get wrong is told in a sentence, on every engine before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gruppetto as gp
from gruppetto.errors import InvalidSetting, RunFailed, TaskError, UsageError

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))


class Remembers(nn.Module):
    """Keeps what it computed."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.last: Tensor | None = None
        self.detaches = detaches

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.last = y.detach() if self.detaches else y
        return y


def task(*first: nn.Module, **fields: Any) -> gp.Task:
    """A Sequential of three blocks and what is to come first."""
    train = TensorDataset(X, torch.arange(20) % 3)

    def model() -> nn.Module:
        return nn.Sequential(*first, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    return gp.Task(model=model, train=train, optimizer="sgd:lr=0.1", batch_size=5, **fields)


def train(what: gp.Task, out: Path, engine: str = "virtual", **settings: Any) -> gp.Run:
    chosen = {"decouple": "ddg:modules=2", "cuts": "1", "epochs": 1, "evaluate": "off", **settings}
    return gp.train(what, engine=engine, out=out / "run", progress=False, **chosen)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "rprop:lr=0.01", "modulation": "inverse"}, "Rprop does not follow its"),
        ({"schedule": gp.schedule(plateau)}, "ReduceLROnPlateau needs a metric"),
        ({"cuts": (), "balance": 3}, "expected time, parameters, or shares above 0 .*, got 3"),
    ],
)
@pytest.mark.parametrize("engine", ["virtual", "local"])
def test_what_modules_cannot_use_is_refused_before_they_are_there(
    tmp_path: Path, engine: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        train(task(), tmp_path, engine, **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["ddg", "fr", "fdg"])
def test_a_module_that_cannot_be_copied_is_refused(tmp_path: Path, method: str) -> None:
    keeps: dict[str, Any] = {"decouple": f"{method}:modules=2", "cuts": "1"}
    with pytest.raises(TaskError, match=r"the model keeps '0.last' of a forward pass"):
        train(task(Remembers(False)), tmp_path, **keeps)
    assert not list(tmp_path.iterdir())
    # Nothing is copied where nothing is late, nor of what is detached.
    train(task(Remembers(False)), tmp_path / "bp", **{**keeps, "decouple": "bp:modules=2"})
    train(task(Remembers(True)), tmp_path / "detached", **keeps)


def test_a_loss_that_depends_on_nothing_is_not_trained_on(tmp_path: Path) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1]).detach()

    with pytest.raises(RunFailed, match=r"in module 2 failed .* does not require grad"):
        train(task(loss=loss), tmp_path)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ddg", {"modules": "2"}),
        ("ddg", {"modules": 2.0}),
        ("ddg", {"lookahead": "0.5"}),
        ("fdg", {"beta": "0.5"}),
    ],
)
def test_keys_of_a_method_are_numbers(name: str, keys: dict[str, Any]) -> None:
    [(key, value)] = keys.items()
    with pytest.raises(InvalidSetting, match=f"got {key}={value!r}"):
        gp.Decoupled(name, **keys)
