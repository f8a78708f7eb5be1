"""What a server is built from, checked: model, rates, schedule."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gruppetto.errors import InvalidSetting, TaskError
from gruppetto.staleness import Modulation, NoModulation
from gruppetto.training.optimizers import IGNORES_RATE, Schedule
from gruppetto.training.randomness import Stream, one_thread, seed_everything
from gruppetto.training.task import Task

__all__ = ["build_model", "build_scheduler", "check_rate", "scale_rate"]


def build_model(
    task: Task, seed: int, device: torch.device, initial: Mapping[str, Tensor] | None
) -> nn.Module:
    """The task's model on a device, its weights drawn under the seed or taken from ``initial``.

    Raises:
        TaskError: it cannot be built, or is lazy.
        InvalidSetting: ``initial`` does not fit.
    """
    seed_everything(seed, Stream.MODEL, 0, device)
    try:
        with one_thread():
            model = task.model()
    except Exception as error:
        raise TaskError(f"model: building it failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise TaskError(f"model: expected it to build an nn.Module, got {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TaskError(
                f"model: {name} is lazy, its shape unknown; give the layer its input size"
            )
    if initial is not None:
        try:
            model.load_state_dict(dict(initial))
        except RuntimeError as error:
            first = str(error).split("\n")
            raise InvalidSetting(
                f"initial weights do not fit the model: {' '.join(p.strip() for p in first[1:3])}"
            ) from None
    return model.to(device).train()


def check_rate(optimizer: torch.optim.Optimizer, modulation: Modulation | None) -> None:
    """See to it that a learning rate exists and that modulation can reach it.

    Raises:
        InvalidSetting: it does not, or it cannot.
    """
    name = type(optimizer).__name__
    if any("lr" not in group for group in optimizer.param_groups):
        raise InvalidSetting(f"optimizer {name} has no learning rate lr in its groups")
    varies = modulation is not None and not isinstance(modulation, NoModulation)
    if name in IGNORES_RATE and varies:
        raise InvalidSetting(
            f"optimizer {name} does not follow its learning rate at every step, so modulation "
            "cannot reach it; choose another optimizer or modulation none"
        )


def scale_rate(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Multiply every group's learning rate."""
    if scale == 1.0:  # not even an int becomes a float: state hashes show it
        return
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] = group[key] * scale


def build_scheduler(
    schedule: Schedule, optimizer: torch.optim.Optimizer, rate_scale: float
) -> LRScheduler:
    """The schedule's scheduler, which starts from the optimizer's rates.

    Raises:
        InvalidSetting: it needs a metric, or sets rates that ``rate_scale`` cannot reach.
    """
    starts = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    scheduler = schedule.factory(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidSetting(
            "schedule: ReduceLROnPlateau needs a metric at every step; expected one that "
            "depends on the step's number only"
        )
    started = [
        group.get("initial_lr", start)
        for group, start in zip(optimizer.param_groups, starts, strict=True)
    ]
    if rate_scale != 1.0 and started != starts:
        raise InvalidSetting(
            f"scale_lr: the schedule {type(scheduler).__name__} sets rates of its own, which "
            "scaling the optimizer's cannot reach; expected one that starts from the optimizer's"
        )
    return scheduler
