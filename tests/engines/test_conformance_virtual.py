"""The reference engine keeps the promises of all engines, and that its bits repeat."""

from __future__ import annotations

from gruppetto.engines.virtual import VirtualEngine
from gruppetto.testing import EngineConformance


class TestVirtual(EngineConformance):
    """See :class:`EngineConformance` for what is checked."""

    engine_name = "virtual"
    engine_class = VirtualEngine
    is_deterministic = True
