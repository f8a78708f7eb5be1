"""``gp.train``: what a caller gives -> settings and objects -> a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gruppetto.delays import DELAYS, Delay
from gruppetto.engines.faults import FAULT_PLANS
from gruppetto.errors import InvalidSetting
from gruppetto.protocols import PROTOCOLS, WARMUPS, Protocol, with_bound
from gruppetto.runs.execute import Run
from gruppetto.runs.given import refuse_decoupled, take_objects, take_task, write_specs
from gruppetto.runs.local import start_early
from gruppetto.runs.parts import Ingredients
from gruppetto.runs.seconds import load_delay
from gruppetto.runs.settings import Settings, read_settings
from gruppetto.runs.start import start_run
from gruppetto.spec import Registry
from gruppetto.staleness import (
    BATCH_SCALINGS,
    RATE_SCALINGS,
    Compensation,
    Modulation,
)
from gruppetto.trace import Row
from gruppetto.training.optimizers import OptimizerFactory, Schedule
from gruppetto.training.task import Task

if TYPE_CHECKING:
    from gruppetto.decoupled.methods import Method
    from gruppetto.runs.decoupled.settings import DecoupledSettings

__all__ = ["SAFE_MODULATION", "plan_any", "plan_run", "train"]

#: What asynchronous protocols get unless told otherwise: plain stale gradients at a synchronous
#: rate are the most common way for asynchronous training to fail.
SAFE_MODULATION = "inverse-mean:cap=true"


def train(
    task: Task | str,
    *,
    protocol: Protocol | str | None = None,
    learners: int | None = None,
    batch_size: int | None = None,
    epochs: float | None = None,
    optimizer: OptimizerFactory | str | None = None,
    modulation: Modulation | str | None = None,
    compensation: Compensation | str | None = None,
    delay: Delay | str | None = None,
    delays: Mapping[int, Delay | str] | None = None,
    schedule: Schedule | None = None,
    initial: Mapping[str, Tensor] | str | Path | None = None,
    on_event: Callable[[Row], object] | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    decouple: Method | str | None = None,
    **settings: Any,
) -> Run:
    """Train a task under a protocol, or a network's modules in parallel.

    Args:
        task: a :class:`Task`, a built-in task's name, or ``path/to/file.py[:name]``.
        protocol: who waits for whom: ``"k-batch-async:k=4"`` or ``KBatchAsync(k=4)``. Default:
            hardsync.
        learners: P. Default: 4.
        batch_size: samples of one mini-batch, per learner. Default: the task's, unless
            ``scale_batch`` is given.
        epochs: passes over the data. Default: the task's, unless ``updates`` or ``max_time`` is
            given.
        optimizer: ``"sgd:lr=0.1"``, ``gp.optimizer(torch.optim.SGD, lr=0.1)``, or a function of
            the model. Default: the task's.
        modulation: what a late gradient is worth. Default: ``inverse-mean:cap=true`` for
            asynchronous protocols, ``none`` for the others.
        compensation: how a late gradient is changed: ``"dc-asgd"`` or ``DelayCompensation()``.
            Default: not at all.
        delay: how long a mini-batch takes, in virtual seconds. Default: always 1.
        delays: learner -> a law of its own.
        schedule: learning-rate schedule, from :func:`gruppetto.schedule`.
        initial: weights to start from: a ``state_dict``, or a file of one.
        on_event: called with every row of the trace after it is written; return True to stop.
        out: the run's folder. Default: a new one under ``runs/``.
        progress: show a bar on standard error. Default: when that is a terminal. False also
            keeps back the line that says what runs.
        decouple: instead of a protocol and learners, a method of decoupled backpropagation:
            ``"ddg:modules=2"`` or ``gp.Decoupled("ddg", modules=2)``. With it go ``tail``
            (``"drain"`` or ``"drop"`` what is in flight at the end), ``cuts`` (names of the blocks
            at which modules 2..K begin) or ``balance`` (``"time"``, ``"parameters"``, shares), and
            in virtual time ``pass_times`` (``"1/2"``, ``"measured"``).
        **settings: ``updates``, ``max_time``, ``target``, ``clip``, ``on_late``,
            ``max_attempts``, ``max_given_up``, ``max_staleness``, ``on_stale``, ``warmup``,
            ``scale_lr``, ``scale_batch``,
            ``guard``, ``measure_gamma``, ``faults``, ``evaluate``, ``evaluate_every``,
            ``recalibrate_bn``, ``seed``, ``threads``, ``device``, ``memory``; see
            :class:`Settings`.

    Returns:
        The run: ``model``, ``history``, ``staleness``, ``result``, ``folder``. Also after Ctrl-C or
        SIGTERM, which end it in good order: then ``result["stopped_by"]`` is ``"interrupted"``, and
        a loop over runs has to look at it, or go on with the next one.

    Raises:
        UsageError: something given cannot work; nothing was written.
        KeyboardInterrupt: a second Ctrl-C did not wait for that.
        RunFailed: the run ended without its goal; its folder holds what there is.
    """
    if settings.get("engine") in (None, "local"):
        start_early()
    wanted, ingredients = plan_any(
        task,
        decouple=decouple,
        protocol=protocol,
        learners=learners,
        batch_size=batch_size,
        epochs=epochs,
        optimizer=optimizer,
        modulation=modulation,
        compensation=compensation,
        delay=delay,
        delays=delays,
        schedule=schedule,
        initial=initial,
        **settings,
    )
    return start_run(wanted, ingredients, out=out, progress=progress, on_event=on_event)


def plan_any(
    task: Task | str,
    *,
    loaded: Task | None = None,
    splits: dict[Any, Any] | None = None,
    **given: Any,
) -> tuple[Settings | DecoupledSettings, Ingredients]:
    """Plan a run of learners, or where ``decouple`` is given of modules; see :func:`train`.

    Args:
        task: an object, or a name.
        loaded: the task behind its name, where the caller has loaded it already.
        splits: the cuts of runs planned before, to be shared among runs of one comparison.
        **given: as for :func:`train`.

    Raises:
        UsageError: a value cannot be used.
    """
    if given.get("decouple") is not None:
        from gruppetto.runs.decoupled.train import plan_decoupled

        return plan_decoupled(task, loaded=loaded, splits=splits, **given)
    return plan_run(task, loaded=loaded, **given)


def plan_run(
    task: Task | str,
    *,
    loaded: Task | None = None,
    schedule: Schedule | None = None,
    initial: Mapping[str, Tensor] | str | Path | None = None,
    **given: Any,
) -> tuple[Settings, Ingredients]:
    """Fill in defaults and write every object as its spec; see :func:`train`.

    ``loaded`` is the task behind its name, where the caller has loaded it already.

    Raises:
        UsageError: a value cannot be used.
    """
    values = {key: value for key, value in given.items() if value is not None}
    refuse_decoupled(values)
    loaded = take_task(task, loaded, values)
    values.setdefault("protocol", "hardsync")
    values["protocol"] = _protocol(values)
    if "modulation" not in values:
        cancels = PROTOCOLS.parse(values["protocol"]).cell.cancels
        values["modulation"] = "none" if cancels else SAFE_MODULATION
        values["modulation_is_default"] = True
    own: list[tuple[str, Registry[Any]]] = [
        ("warmup", WARMUPS),
        ("scale_lr", RATE_SCALINGS),
        ("scale_batch", BATCH_SCALINGS),
        ("faults", FAULT_PLANS),
    ]
    write_specs(values, own)
    if "delay" in values:
        values["delay"] = DELAYS.format(load_delay(values["delay"]))
    values["delays"] = {
        learner: DELAYS.format(load_delay(law)) for learner, law in values.get("delays", {}).items()
    }
    if "scale_batch" in values:
        values["batch_size"] = _scaled_batch_size(values)
    ingredients = take_objects(loaded, values, schedule, initial)
    return read_settings(Settings, values), ingredients


def _protocol(values: dict[str, Any]) -> str:
    """The protocol's spec, with the bound that is given beside it; the bound's keys are taken."""
    protocol = PROTOCOLS.parse(values["protocol"])
    s, on_stale = values.pop("max_staleness", None), values.pop("on_stale", None)
    if s is not None and (isinstance(s, bool) or not isinstance(s, int)):
        raise InvalidSetting(f"max staleness: expected a whole number, got {s!r}")
    return PROTOCOLS.format(with_bound(protocol, s, on_stale))


def _scaled_batch_size(values: Mapping[str, Any]) -> int:
    """Samples of one learner's mini-batch, by the rule ``scale_batch``."""
    if "batch_size" in values:
        raise InvalidSetting(
            "scale batch: it computes the batch size; expected one of the two, got both"
        )
    learners = values.get("learners", Settings.model_fields["learners"].default)
    if not isinstance(learners, int) or learners < 1:
        raise InvalidSetting(f"learners: expected a whole number >= 1, got {learners!r}")
    return BATCH_SCALINGS.parse(values["scale_batch"]).batch_size(learners)
