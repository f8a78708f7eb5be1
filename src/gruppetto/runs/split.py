"""A task's model cut into modules, measured: what ``gruppetto split`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gruppetto.decoupled.split import Split, split_model
from gruppetto.errors import InvalidSetting
from gruppetto.runs.parts import prepared_torch, read_device
from gruppetto.runs.settings import CommonSettings, read_settings
from gruppetto.training.building import build_model
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.tasks import load_task, resolve_data, resolve_model, resolve_task

__all__ = ["split_task"]


def split_task(
    task: str,
    modules: int,
    *,
    balance: str = "time",
    cuts: Sequence[str] = (),
    model: str | None = None,
    data: str | Path | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    threads: int = 1,
    device: str = "cpu",
) -> tuple[Split, CommonSettings]:
    """Cut the model of a task into modules and measure every block.

    Args:
        task: as for :func:`gruppetto.train`.
        modules: K.
        balance: ``time``, ``parameters``, or shares like ``1/1/2``.
        cuts: instead, the blocks with which modules 2 to K begin.
        model, data: as for :func:`gruppetto.train`.
        batch_size: of the mini-batch that is measured. Default: the task's.
        seed: of the weights and of the mini-batch.
        threads: of the computation.
        device: where it takes place.

    Returns:
        The split, and what it was made with.

    Raises:
        UsageError: the task cannot be loaded, or its model cannot be cut like that.
    """
    if model is not None:
        model = resolve_model(model)
    if data is not None:
        data = resolve_data(str(data))
    loaded = load_task(task, model=model, data=data)
    size = batch_size if batch_size is not None else loaded.batch_size
    if size is None:
        raise InvalidSetting("a batch size is required for this task, like 32")
    values = {
        "task": resolve_task(task), "model": model, "data": data, "batch_size": size, "epochs": 1,
        "seed": seed, "threads": threads, "device": device,
    }  # fmt: skip
    settings = read_settings(CommonSettings, values)
    where = read_device(settings.device)
    with prepared_torch(settings):
        split = split_model(
            build_model(loaded, settings.seed, where, None),
            loaded,
            MiniBatches(loaded, settings.batch_size, settings.seed),
            modules=modules,
            balance=balance,
            cuts=cuts,
            device=where,
            always_measure=True,
        )
    return split, settings
