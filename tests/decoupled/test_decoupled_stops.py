"""A module that never waits hears all the same what it is told."""

from __future__ import annotations

import time
from typing import Any, cast

import torch
from test_decoupled_virtual import Fake

from gruppetto.decoupled.module import Forwarded, Module
from gruppetto.decoupled.schedule import ModuleProgram, Schedule
from gruppetto.engines.decoupled.channels import Channels
from gruppetto.engines.decoupled.line import Line
from gruppetto.engines.decoupled.local import ModuleEngine
from gruppetto.engines.decoupled.samples import Samples
from gruppetto.engines.local.wire import pair, send_json


class Batches(Samples):
    """Nobody reads anything."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), None)

    def fetch(self, mini_batch: int) -> tuple[Any, int]:
        return f"batch {mini_batch}", 7 + mini_batch


class Quiet:
    """A journal that tells nobody."""

    def record(self, *_: Any) -> None: ...

    def carried_out(self, *_: Any) -> None: ...


def test_the_slowest_module_hears_that_it_shall_stop() -> None:
    """Alone, or slower than all others, it has no reason ever to sleep."""
    ours, theirs = pair()
    with ours, theirs:

        class Told(Fake):
            def forward(self, mini_batch: int, *given: Any) -> Forwarded:
                if mini_batch == 3:
                    send_json(ours, {"stop": "interrupted"}, [])
                return super().forward(mini_batch, *given)

        module, schedule = Told(1, 1), Schedule((0,), 40)
        send_json(ours, {"start": time.perf_counter(), "time": 0.0}, [])
        ends = Channels(schedule, (), 0).ends(1)
        engine = ModuleEngine(cast(Module, module), schedule, ends, Line(theirs), Batches())
        assert engine.run(ModuleProgram(schedule, 1), Quiet()) == "interrupted"
        assert module.version == 4, "what was begun, no more"
