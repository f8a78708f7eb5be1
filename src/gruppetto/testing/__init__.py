"""What tests of engines and programs share, in this project and outside of it.

* :class:`EngineConformance` is the contract of an engine as a class of pytest tests: subclass it,
  name the engine, and every engine is held to the same promises. It is the only part that needs
  pytest, which is not a dependency of this package: ``pip install pytest``.
* :func:`conformance_task` is a tiny task with everything in it that engines get wrong.
* :class:`NullServer` and :class:`NullLearner` are a server and a learner without tensors: whole
  runs of an engine in milliseconds, where only the order of things matters.

>>> from gruppetto.testing import NullLearner, NullServer
>>> NullLearner().compute(3, NullServer().snapshot()).mini_batch
3
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gruppetto.testing.conformance import EngineConformance, protocols_for
    from gruppetto.testing.null import NullGradient, NullLearner, NullServer, NullWeights
    from gruppetto.testing.task import TASK_FILE, conformance_task, reference

_HOMES = {
    "EngineConformance": "gruppetto.testing.conformance",
    "NullGradient": "gruppetto.testing.null",
    "NullLearner": "gruppetto.testing.null",
    "NullServer": "gruppetto.testing.null",
    "NullWeights": "gruppetto.testing.null",
    "TASK_FILE": "gruppetto.testing.task",
    "conformance_task": "gruppetto.testing.task",
    "protocols_for": "gruppetto.testing.conformance",
    "reference": "gruppetto.testing.task",
}

__all__ = [
    "TASK_FILE",
    "EngineConformance",
    "NullGradient",
    "NullLearner",
    "NullServer",
    "NullWeights",
    "conformance_task",
    "protocols_for",
    "reference",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gruppetto.testing' has no attribute {name!r}")
    if _HOMES[name] == "gruppetto.testing.conformance":
        _show_values_of_failing_asserts()
    value = globals()[name] = getattr(_import_module(_HOMES[name]), name)
    return value


def _show_values_of_failing_asserts() -> None:
    """The suite's asserts are to fail as those of a test file do; pytest has to know in time."""
    import sys

    import pytest

    for module in ("gruppetto.testing.conformance", "gruppetto.testing.checks"):
        if module not in sys.modules:
            pytest.register_assert_rewrite(module)


def __dir__() -> list[str]:
    return list(__all__)
