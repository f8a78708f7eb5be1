"""Decoupled runs: what a caller gives -> settings and objects, with the network's cut chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from gruppetto.decoupled.methods import METHODS
from gruppetto.decoupled.pass_times import PassTimes
from gruppetto.decoupled.split import Split, read_balance, split_model
from gruppetto.errors import InvalidSetting
from gruppetto.runs.decoupled.settings import DecoupledSettings, write_method
from gruppetto.runs.given import take_objects, take_task, write_specs
from gruppetto.runs.parts import Ingredients, prepared_torch, read_device
from gruppetto.runs.settings import read_settings
from gruppetto.training.building import build_model
from gruppetto.training.mini_batches import MiniBatches
from gruppetto.training.optimizers import Schedule
from gruppetto.training.task import Task

__all__ = ["MEASURED", "plan_decoupled"]

#: For ``pass_times``: virtual time runs as fast as this machine.
MEASURED: Final = "measured"
#: What is about learners, their lateness or their failures.
_EXCLUDED: Final = (
    "protocol",
    "learners",
    "delay",
    "delays",
    "warmup",
    "scale_lr",
    "scale_batch",
    "on_late",
    "max_staleness",
    "on_stale",
    "max_attempts",
    "max_given_up",
    "faults",
    "measure_gamma",
    "max_restarts",
)


def plan_decoupled(
    task: Task | str,
    *,
    loaded: Task | None = None,
    schedule: Schedule | None = None,
    initial: Mapping[str, Tensor] | str | Path | None = None,
    splits: dict[Any, Split] | None = None,
    **given: Any,
) -> tuple[DecoupledSettings, Ingredients]:
    """Fill in defaults, write every object as its spec, and choose where the network is cut.

    Args:
        task, schedule, initial: as for :func:`gruppetto.train`.
        loaded: the task behind its name, where the caller has loaded it already.
        splits: cuts chosen before; runs of as many modules of the same model are cut alike.
        **given: as for :func:`gruppetto.train`; ``cuts``, ``balance`` and ``pass_times`` decide on
            the cut, and what virtual time counts.

    Raises:
        UsageError: a value cannot be used.
    """
    values = {key: value for key, value in given.items() if value is not None and value != {}}
    for key in _EXCLUDED:
        if key in values:
            raise InvalidSetting(
                f"decouple: modules of one network train on every mini-batch, without learners; "
                f"expected --decouple or --{key.replace('_', '-')}, got both"
            )
    method = METHODS.parse(values["decouple"])
    values["decouple"] = write_method(method)
    loaded = take_task(task, loaded, values)
    write_specs(values, [])
    ingredients = take_objects(loaded, values, schedule, initial)
    cuts = _read_cuts(values.pop("cuts", ()), method.modules)
    balance = values.pop("balance", None)
    if balance is not None and cuts:
        raise InvalidSetting("cuts: they say where modules begin; expected cuts or balance")
    balance = read_balance("time" if balance is None else balance, method.modules)
    is_measured = values.get("pass_times") == MEASURED
    if is_measured:
        del values["pass_times"]
        if values.get("engine") != "virtual":
            raise InvalidSetting(
                "pass times are for virtual time, real processes take their own: expected engine "
                f"virtual, got {values.get('engine', 'local')}"
            )
    # The cut comes last: choosing it may take seconds.
    values["begins"] = list(cuts) or [""] * (method.modules - 1)
    settings = read_settings(DecoupledSettings, values)
    alike = (settings.model, settings.data, method.modules, balance, cuts)
    split = None if splits is None else splits.get(alike)
    if split is None or (is_measured and not split.is_measured):
        split = _split(settings, ingredients, balance, cuts, is_measured)
    if splits is not None:
        splits[alike] = split
    chosen: dict[str, Any] = {"begins": list(split.begins)}
    if settings.engine == "virtual" and settings.pass_times is None:
        # By counted operations unless asked otherwise: these are the same every time.
        chosen["pass_times"] = _pass_times(split, is_measured)
    return read_settings(DecoupledSettings, {**settings.model_dump(), **chosen}), ingredients


def _read_cuts(given: object, modules: int) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidSetting(f"cuts: expected names of blocks, got {given!r}")
    if names and len(names) != modules - 1:
        raise InvalidSetting(
            f"cuts: {modules} modules begin at {modules - 1} cuts; expected as many names, got "
            f"{len(names)}: {', '.join(names)}"
        )
    return tuple(names)


def _split(
    settings: DecoupledSettings,
    ingredients: Ingredients,
    balance: str | tuple[float, ...],
    cuts: tuple[str, ...],
    is_measured: bool,
) -> Split:
    task, device = ingredients.task, read_device(settings.device)
    with prepared_torch(settings):
        return split_model(
            build_model(task, settings.seed, device, ingredients.initial),
            task,
            MiniBatches(task, settings.batch_size, settings.seed),
            modules=settings.method.modules,
            balance=balance,
            cuts=cuts,
            device=device,
            always_measure=is_measured,
        )


def _pass_times(split: Split, is_measured: bool) -> str:
    """Virtual seconds as settings hold them: of this machine, or by counted operations."""
    times = PassTimes.from_operations(split.operations)
    if is_measured:
        assert split.forward is not None and split.backward is not None
        times = PassTimes(split.forward, split.backward)
    pairs = zip(times.forward, times.backward, strict=True)
    return ",".join(f"{forward:.6g}/{backward:.6g}" for forward, backward in pairs)
