"""Processes of modules whose rings go through shared slots as on GPUs, here in the CPU's memory."""

from __future__ import annotations

from typing import Any

import pytest
import shared_slots

from gruppetto.engines.decoupled.local import ModuleEngine
from gruppetto.engines.decoupled.rings import Ring
from gruppetto.runs.decoupled import roles

TRAIN = f"{__name__}:train"


def train(prepared: roles.Prepared, descriptors: list[int], number: int, pin: bool) -> None:
    """The role of the same name; ends badly if tensors took another way."""
    shared_slots.use(pytest.MonkeyPatch())
    start, offer = ModuleEngine.start, Ring.offer

    def start_with_slots(self: ModuleEngine) -> None:
        self._ends.receive_on(shared_slots.CPU)
        start(self)

    def offer_to_slots(self: Ring, message: Any) -> bool:
        is_sent = offer(self, message)
        assert (self._device_slots is None) == (self.what == "the samples of a mini-batch")
        return is_sent

    ModuleEngine.start = start_with_slots  # type: ignore[method-assign]
    Ring.offer = offer_to_slots  # type: ignore[method-assign]
    roles.train(prepared, descriptors, number, pin)
