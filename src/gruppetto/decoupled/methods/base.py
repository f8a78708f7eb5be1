"""What a method of decoupled backpropagation decides; each is one file beside this one.

Module k of K runs the forward pass of mini-batch b ``delay(k)`` passes ahead of its backward pass.
A method says how far, what it keeps between the two, and at which weights the backward pass runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from gruppetto.errors import InvalidSetting
from gruppetto.spec import Registry

__all__ = ["METHODS", "Decoupled", "Keeps", "Method", "Waiting"]

#: Between the forward and the backward pass of a mini-batch: its graph, on a copy of the weights
#: or on the live ones, or its input only.
Keeps = Literal["graph-on-copy", "graph-on-live", "input"]
#: How modules wait for each other, see :mod:`gruppetto.decoupled.schedule`.
Waiting = Literal["free-running", "barrier"]


@dataclass(frozen=True)
class Method:
    """Delayed gradients for a network in K modules.

    Args:
        modules: K >= 1, the parts of the network.
        schedule: ``free-running``: a module waits only for what it needs; ``barrier``: all wait
            for each other after each mini-batch, as in the paper. The same weights either way.
    """

    modules: int = 2
    schedule: Waiting = "free-running"

    #: What stays between the passes.
    keeps: ClassVar[Keeps] = "graph-on-copy"

    def __post_init__(self) -> None:
        if isinstance(self.modules, bool) or not isinstance(self.modules, int) or self.modules < 1:
            raise InvalidSetting(f"decouple: expected modules >= 1, got modules={self.modules!r}")
        if self.schedule not in ("free-running", "barrier"):
            raise InvalidSetting(
                f"decouple: expected schedule free-running or barrier, got {self.schedule!r}"
            )

    def delay(self, module: int) -> int:
        """Forward passes of module k = 1..K between a mini-batch's forward and its backward.

        Once under way it is also the staleness of the module's gradients, in updates.
        """
        raise NotImplementedError

    @property
    def delays(self) -> tuple[int, ...]:
        """Of modules 1..K."""
        return tuple(self.delay(module) for module in range(1, self.modules + 1))

    @property
    def shrink(self) -> float:
        """What the gradient that a module sends upstream is multiplied by."""
        return 1.0

    def leap(self, module: int) -> float:
        """How many times their last change the weights are moved on for a forward pass of module k.

        See :class:`LooksAhead`; 0.0: not at all.
        """
        return 0.0


@dataclass(frozen=True)
class LooksAhead(Method):
    """Adds Nesterov's look-ahead, as many updates far as gradients are late.

    A module whose gradients are d updates late runs its forward pass, and so its backward pass, at

        w + (γ + γ² + ... + γ^d) (w − w⁻)

    w⁻ being its weights before their last update (no look-ahead before the first): where d updates
    of momentum γ alone would take the weights by the time the gradient is applied. d = 1 is
    Nesterov's look-ahead; γ = 1 is the linear prediction w − d·η·v of SpecTrain (Chen, Yang, Cheng,
    "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform",
    2018), for SGD with momentum, whose last change w − w⁻ is −η·v; between them, the prediction of
    DANA (Hakimi et al., "Taming Momentum in a Distributed Asynchronous Environment", 2019). It
    takes any optimizer. The method of AsyncPP (Ajanthan et al., "Nesterov Method for Asynchronous
    Pipeline Parallel Optimization", ICML 2025) is another: there the optimizer itself looks ahead,
    one update far, with a momentum of 0.99 (its code: NAdam on stashed weights).

    Args:
        lookahead: γ in [0, 1], usually the optimizer's momentum. 0 (default) is off.
    """

    lookahead: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        is_number = isinstance(self.lookahead, (int, float))
        if not (is_number and math.isfinite(self.lookahead) and 0.0 <= self.lookahead <= 1.0):
            raise InvalidSetting(
                f"decouple: expected lookahead in [0, 1], got lookahead={self.lookahead!r}"
            )

    def leap(self, module: int) -> float:
        return sum(self.lookahead**step for step in range(1, self.delay(module) + 1))


METHODS: Registry[Method] = Registry("method")


def Decoupled(method: str = "ddg", **keys: object) -> Method:  # noqa: N802 - reads as a class
    """A method by its name: ``gp.Decoupled("ddg", modules=2)`` is ``ddg:modules=2``.

    Raises:
        InvalidSetting: an unknown name or key, or a value outside its range.
    """
    valid = METHODS.keys_of(method)
    for key in keys:
        if key not in valid:
            raise InvalidSetting(f"method {method!r} has no key {key!r}; valid: {', '.join(valid)}")
    return METHODS[method](**keys)  # type: ignore[arg-type]
