"""Optimizers by name and by object, and schedules that follow applied samples."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gruppetto.errors import InvalidSetting
from gruppetto.spec import split_spec, suggest

__all__ = [
    "ELEMENTWISE",
    "OptimizerFactory",
    "OptimizerSpec",
    "Schedule",
    "build_optimizer",
    "momentum_of",
    "optimizer",
    "optimizer_names",
    "parse_optimizer",
    "schedule",
]

#: What a user may give: a spec, or a function of the model that returns the optimizer.
OptimizerFactory: TypeAlias = "OptimizerSpec | Callable[[nn.Module], torch.optim.Optimizer]"

_NAMES: Final[dict[str, str]] = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adamax": "Adamax",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adafactor": "Adafactor",
    "rmsprop": "RMSprop",
    "asgd": "ASGD",
    "rprop": "Rprop",
    "muon": "Muon",
}

#: Treat every element alike, so that they may run on a whole range of the flat vector at once.
ELEMENTWISE: Final[frozenset[str]] = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"}
    | {"ASGD", "Rprop"}
)

#: Their step does not follow ``lr`` at every update, so a factor on it would come late or never.
IGNORES_RATE: Final[frozenset[str]] = frozenset({"ASGD", "Rprop"})

_REFUSED: Final[dict[str, str]] = {
    "LBFGS": "it evaluates the loss several times per step, which no late gradient can answer",
    "SparseAdam": "it needs sparse gradients, and these are densified; use Adam",
}


def optimizer_names() -> dict[str, type[torch.optim.Optimizer]]:
    """The names ``--optimizer`` takes, with this torch's classes."""
    return {n: getattr(torch.optim, c) for n, c in _NAMES.items() if hasattr(torch.optim, c)}


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch optimizer class and its keyword arguments; made by :func:`optimizer`."""

    cls: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """Build it over parameters or parameter groups."""
        return self.cls(parameters, **self.options)

    def __str__(self) -> str:
        names = {cls: name for name, cls in optimizer_names().items()}
        options = ",".join(f"{k}={_show(v)}" for k, v in self.options.items())
        name = names.get(self.cls, f"{self.cls.__module__}.{self.cls.__qualname__}")
        return name + (":" + options if options else "")


def _show(value: object) -> str:
    if isinstance(value, (tuple, list)):  # the comma separates keys
        return "/".join(_show(v) for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def optimizer(cls: type[torch.optim.Optimizer], **options: Any) -> OptimizerSpec:
    """An optimizer for :func:`gruppetto.train`: ``gp.optimizer(torch.optim.SGD, lr=0.1)``.

    Raises:
        InvalidSetting: not an optimizer class, a keyword it does not take, or one that cannot
            work with late gradients (LBFGS, SparseAdam).
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise InvalidSetting(f"expected a torch.optim.Optimizer class, got {cls!r}")
    _refuse(cls)
    valid = list(inspect.signature(cls.__init__).parameters)[2:]
    takes_any = any(
        p.kind is inspect.Parameter.VAR_KEYWORD
        for p in inspect.signature(cls.__init__).parameters.values()
    )
    for key in options:
        if key not in valid and not takes_any:
            raise InvalidSetting(
                f"optimizer {cls.__name__} has no key {key!r}; {suggest(key, valid)}"
            )
        value = options[key]
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidSetting(
                f"optimizer {cls.__name__}: expected {key} to be finite, got {value}"
            )
    spec = OptimizerSpec(cls, dict(options))
    try:  # out-of-range values are refused now, not when the run has started
        spec([nn.Parameter(torch.zeros(2, 2))])
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidSetting(f"optimizer {cls.__name__}: {error}") from None
    return spec


def parse_optimizer(text: str) -> OptimizerSpec:
    """Read ``sgd:lr=0.1,momentum=0.9``.

    Raises:
        InvalidSetting: unknown name or key, or a value of the wrong type.
    """
    name, texts = split_spec(text, "optimizer")
    known = optimizer_names()
    if name.lower() in ("lbfgs", "sparse-adam", "sparseadam"):
        _refuse(torch.optim.LBFGS if name.lower() == "lbfgs" else torch.optim.SparseAdam)
    if name not in known:
        raise InvalidSetting(f"unknown optimizer {name!r}; {suggest(name, list(known))}")
    parameters = inspect.signature(known[name].__init__).parameters
    valid = list(parameters)[2:]
    options: dict[str, Any] = {}
    for key, value in texts.items():
        if key not in parameters:
            raise InvalidSetting(f"optimizer {name!r} has no key {key!r}; {suggest(key, valid)}")
        options[key] = _read(value, parameters[key].default, f"optimizer {name}:{key}")
    return optimizer(known[name], **options)


def _read(text: str, default: object, what: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    parts = text.split("/")  # a pair like betas=0.9/0.99, since the comma separates keys
    try:
        numbers = [float(p) for p in parts]
    except ValueError:
        raise InvalidSetting(
            f"{what}: expected a number (or a/b for a pair), got {text!r}"
        ) from None
    if isinstance(default, tuple) and len(numbers) != len(default):
        raise InvalidSetting(
            f"{what}: expected {len(default)} numbers like 0.9/0.999, got {text!r}"
        )
    if type(default) is int and numbers[0].is_integer():
        return int(numbers[0])
    return tuple(numbers) if len(numbers) > 1 else numbers[0]


def _refuse(cls: type[torch.optim.Optimizer]) -> None:
    if cls.__name__ in _REFUSED:
        raise InvalidSetting(f"optimizer {cls.__name__} is refused: {_REFUSED[cls.__name__]}")


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Of the first parameter group, as torch's SGD means it; 0 where there is none."""
    return float(optimizer.param_groups[0].get("momentum", 0.0))


def build_optimizer(
    factory: OptimizerFactory,
    model: nn.Module,
    param_groups: Callable[[nn.Module], list[dict[str, Any]]] | None,
) -> torch.optim.Optimizer:
    """The user's optimizer over a model.

    Args:
        factory: a spec, or a function of the model.
        param_groups: the task's groups. Each is a dict with ``params`` and options of the
            optimizer; ``lr_scale`` multiplies the spec's rate, so that ``--optimizer`` keeps it.

    Raises:
        InvalidSetting: the factory does not return an optimizer, or returns a refused one.
    """
    if isinstance(factory, OptimizerSpec):
        parameters: Any = model.parameters()
        if param_groups is not None:
            default = inspect.signature(factory.cls.__init__).parameters["lr"].default
            parameters = [dict(group) for group in param_groups(model)]
            for group in parameters:
                scale = group.pop("lr_scale", 1.0)
                if scale != 1.0 and "lr" not in group:
                    group["lr"] = factory.options.get("lr", default) * scale
        try:
            built = factory(parameters)
        except (ValueError, TypeError, RuntimeError) as error:
            raise InvalidSetting(f"optimizer {factory}: {error}") from None
    else:
        built = factory(model)
        if not isinstance(built, torch.optim.Optimizer):
            raise InvalidSetting(
                "expected the optimizer function to return a torch.optim.Optimizer, "
                f"got {type(built).__name__}"
            )
    _refuse(type(built))
    return built


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule of the server; made by :func:`schedule`."""

    factory: Callable[[torch.optim.Optimizer], LRScheduler]
    every: Literal["epoch", "update"] = "epoch"


def schedule(
    factory: Callable[[torch.optim.Optimizer], LRScheduler],
    every: Literal["epoch", "update"] = "epoch",
) -> Schedule:
    """A schedule for :func:`gruppetto.train`, stepped at the server, never per learner.

    ``epoch`` steps whenever applied samples cross an epoch, ``update`` at each update.

    Raises:
        InvalidSetting: ``every`` is neither.
    """
    if every not in ("epoch", "update"):
        raise InvalidSetting(f"schedule: expected every='epoch' or 'update', got {every!r}")
    if not callable(factory):
        raise InvalidSetting(
            "schedule: expected a function of the optimizer, like "
            f"lambda o: StepLR(o, 10), got {type(factory).__name__}"
        )
    return Schedule(factory, every)
