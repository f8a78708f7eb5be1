"""Everything a run is told, as plain values that can be written down and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gruppetto.errors import InvalidSetting
from gruppetto.spec import suggest
from gruppetto.staleness import RATE_SCALINGS
from gruppetto.trace.metrics import is_lower_better, parse_target

__all__ = ["CommonSettings", "Settings", "Target", "read_settings"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Target:
    """A metric's value at which a run may stop: ``accuracy=0.95``.

    A metric that is better when lower (``loss``, ``error``, ...) is to fall to the value, any
    other to rise to it.

    Raises:
        InvalidSetting: not ``name=number``.
    """

    def __init__(self, text: str) -> None:
        self.metric, self.value = parse_target(text)
        self.falls = is_lower_better(self.metric)

    def is_reached(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether an evaluation reaches it.

        Raises:
            InvalidSetting: the evaluation has no such metric.
        """
        if self.metric not in metrics:
            raise InvalidSetting(
                f"target: the task's evaluation has no {self.metric!r}; it has "
                f"{', '.join(metrics) or 'nothing'}"
            )
        value = metrics[self.metric]
        if value is None or value != value:
            return False
        return value <= self.value if self.falls else value >= self.value


class CommonSettings(BaseModel):
    """What runs of learners and of decoupled modules are both told; every object as its spec."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    #: ``digits``, ``path/to/file.py:name``; the task's name when it was given as an object.
    task: str
    #: Whether ``task`` can be loaded again from its text.
    task_is_reference: bool = True
    #: A model other than the task's: a registered name or ``file.py:name``.
    model: str | None = None
    #: Folder of the data, for tasks that read one.
    data: str | None = None
    engine: Literal["local", "virtual"] = "local"
    #: Samples of one mini-batch, per learner; what ``scale_batch`` gave where there is one.
    batch_size: int = Field(ge=1)
    #: None for a run that something else ends.
    epochs: Positive | None = None
    updates: int | None = Field(None, ge=1)
    #: Seconds of run time.
    max_time: Positive | None = None
    target: str | None = None
    #: None when it was given as an object without a spec.
    optimizer: str | None = None
    #: A schedule was given, always as an object.
    has_schedule: bool = False
    modulation: str = "none"
    compensation: str = "none"
    clip: str | None = None
    #: When losses end a run as diverged. Off where nothing says so: runs of before had none.
    guard: str = "off"
    evaluate: Literal["live", "deferred", "off"] = "live"
    #: Epochs between evaluations.
    evaluate_every: Positive = 1.0
    #: Mini-batches from which BatchNorm's averages are made anew for each evaluation; 0: never.
    recalibrate_bn: int = Field(0, ge=0)
    #: Also write the run down for TensorBoard.
    tensorboard: bool = False
    seed: int = Field(0, ge=0)
    threads: int = Field(1, ge=1)
    device: str = "cpu"
    #: GiB that weights and gradients may take; None for half of what is free.
    memory: Positive | None = None

    @model_validator(mode="after")
    def _can_be_run(self) -> CommonSettings:
        self.check()
        return self

    def check(self) -> None:
        """Look at values that depend on each other.

        Raises:
            InvalidSetting: in one sentence.
        """
        if self.target is not None:
            Target(self.target)
            if self.evaluate != "live":
                raise InvalidSetting(
                    "target needs evaluation while the run goes on: expected evaluate live, got "
                    f"{self.evaluate}"
                )
        if self.epochs is None and self.updates is None and self.max_time is None:
            raise InvalidSetting("a run needs an end: give epochs, updates or max_time")


class Settings(CommonSettings):
    """The settings of a run of learners."""

    protocol: str = "hardsync"
    #: What comes before the protocol.
    warmup: str | None = None
    learners: int = Field(4, ge=1)
    scale_batch: str | None = None
    #: The law of all learners without their own; None for constant:value=1 in virtual time, and
    #: for no delay but what computing takes with real processes.
    delay: str | None = None
    #: learner -> its own law.
    delays: dict[int, str] = Field(default_factory=dict)
    #: The rule behind :attr:`rate_scale`.
    scale_lr: str | None = None
    #: Nobody chose it: it is what the protocol gets unless told otherwise.
    modulation_is_default: bool = False
    on_late: Literal["requeue", "drop"] = "requeue"
    max_attempts: int = Field(3, ge=1)
    max_given_up: int = Field(0, ge=0)
    #: Samples on which γ is measured at evaluations; 0: not.
    measure_gamma: int = Field(0, ge=0)
    faults: str | None = None
    #: Lost learners that are replaced, in the whole run; real processes only.
    max_restarts: int = Field(3, ge=0)

    def check(self) -> None:
        """Look at values that depend on each other.

        Raises:
            InvalidSetting: in one sentence.
        """
        super().check()
        if self.faults is not None and self.engine != "virtual":
            raise InvalidSetting(
                "faults are for virtual time, where they can be repeated: expected engine virtual, "
                f"got {self.engine}"
            )

    @property
    def rate_scale(self) -> float:
        """What every learning rate of the optimizer is multiplied by; 1.0 without ``scale_lr``.

        Raises:
            InvalidSetting: the rule cannot be read.
        """
        if self.scale_lr is None:
            return 1.0
        return RATE_SCALINGS.parse(self.scale_lr).factor(self.batch_size, self.learners)


M = TypeVar("M", bound=BaseModel)


def read_settings(model: type[M], values: dict[str, Any]) -> M:
    """Validate values.

    Raises:
        InvalidSetting: in one sentence, about the first that is wrong.
    """
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        message = first["msg"].replace("Input should be", "expected it to be")
        if first["type"] == "value_error":
            raise InvalidSetting(str(first["ctx"]["error"])) from None
        if first["type"] == "extra_forbidden":
            raise InvalidSetting(
                f"unknown setting {where!r}; {suggest(where, list(model.model_fields))}"
            ) from None
        if first["type"] == "missing":
            raise InvalidSetting(f"{where}: a value is required") from None
        raise InvalidSetting(
            f"{where.replace('_', ' ')}: {message}, got {first['input']!r}"
        ) from None
