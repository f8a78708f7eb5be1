"""Real processes keep the promises of all engines."""

from __future__ import annotations

from gruppetto.engines.local.engine import LocalEngine
from gruppetto.testing import EngineConformance


class TestLocal(EngineConformance):
    """See :class:`EngineConformance` for what is checked."""

    engine_name = "local"
    engine_class = LocalEngine
    loop_is_here = False
    delay = "exponential:mean=0.002"
    interval = 0.01
