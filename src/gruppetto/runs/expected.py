"""What a run's updates would have taken if nothing but the injected delays cost time.

The same protocol over the same keyed delays, in virtual time and without gradients: one truth for
both, so the difference to what was measured is what computing, messages and this machine cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gruppetto.delays import KeyedDelays
from gruppetto.engines.virtual import VirtualEngine
from gruppetto.protocols.messages import ApplyUpdate, Command, Contribution, Event
from gruppetto.runs.parts import Parts, build_coordinator

__all__ = ["expected_update_time"]

#: Updates that are looked at; the mean of more tells nothing new.
_MAX_UPDATES: Final = 20_000


class _NoGradient:
    loss = 0.0
    num_samples = 1


class _NoLearner:
    def compute(self, mini_batch: int, weights: object) -> _NoGradient:
        return _NoGradient()


class _NoServer:
    needs_past = False

    def snapshot(self) -> None:
        return None

    def apply(
        self,
        contributions: Sequence[Contribution],
        gradients: Sequence[Any],
        past: Sequence[Any] = (),
    ) -> None:
        pass


class _UpTo:
    """Stops after so many updates, and knows when the last one was."""

    def __init__(self, engine: VirtualEngine, num_updates: int) -> None:
        self._engine = engine
        self._num_updates = num_updates
        self.time = 0.0
        self.count = 0

    def record(self, event: Event, commands: Sequence[Command], time: float) -> None:
        pass

    def carried_out(self, event: Event, commands: Sequence[Command], time: float) -> None:
        if any(isinstance(command, ApplyUpdate) for command in commands):
            self.time = time
            self.count += 1
            if self.count >= self._num_updates:
                self._engine.request_stop("enough")


def expected_update_time(parts: Parts, result: Mapping[str, Any]) -> float | None:
    """Seconds per update by the delays drawn, over as many updates as the run made.

    Args:
        parts: of the run.
        result: its summary.

    Returns:
        None where no delay was injected, where learners were lost and the delays tell too little,
        and where K follows a loss, which nothing tells without gradients.
    """
    settings = parts.settings
    updates = min(int(result["updates"]), _MAX_UPDATES)
    if not parts.has_delays or result["learners_lost"] or not updates:
        return None
    if parts.coordinator.protocol.measures_every is not None:
        return None
    total = parts.coordinator.ledger.num_mini_batches
    per_epoch = parts.mini_batches.per_epoch
    coordinator = build_coordinator(settings, total, per_epoch)
    delays: KeyedDelays = parts.delays
    engine = VirtualEngine(_NoServer(), _NoLearner(), delays, settings.learners)
    counted = _UpTo(engine, updates)
    engine.run(coordinator, counted)
    return counted.time / counted.count if counted.count else None
