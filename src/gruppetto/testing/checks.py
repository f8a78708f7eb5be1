"""What must be true of the folder of any finished run, whichever engine made it.

Everything is derived from the trace's event rows by a fresh coordinator, and then compared with
what the engine wrote beside them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gruppetto.protocols import Coordinator
from gruppetto.protocols.messages import (
    ApplyUpdate,
    Command,
    Compute,
    Event,
    GradientPushed,
)
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.parts import build_coordinator
from gruppetto.runs.settings import Settings
from gruppetto.trace import MessageDigest, Trace, read_trace

__all__ = ["Story", "check_accounts", "check_trace", "tell"]


@dataclass
class Story:
    """A run, told from its event rows alone."""

    settings: Settings
    trace: Trace
    coordinator: Coordinator
    log: list[tuple[Event, list[Command]]] = field(default_factory=list)
    #: lease -> the work it named.
    given: dict[int, Compute] = field(default_factory=dict)
    updates: list[ApplyUpdate] = field(default_factory=list)
    #: Running hash of all commands, after each event row.
    commands: list[str] = field(default_factory=list)
    events: str = ""

    def applied(self) -> Counter[int]:
        """mini-batch -> how often it was applied."""
        leases = [c.lease for update in self.updates for c in update.contributions]
        return Counter(self.given[lease].mini_batch for lease in leases)


def tell(path: Path, num_mini_batches: int | None, batches_per_epoch: int | None = None) -> Story:
    """Fold a run's event rows through a fresh coordinator.

    Args:
        path: the run's folder.
        num_mini_batches: of the whole run.
        batches_per_epoch: mini-batches of one epoch; needed where the run has a warm-up.
    """
    folder = RunFolder.open(path)
    settings, trace = folder.settings(), read_trace(folder.trace)
    assert settings.warmup is None or batches_per_epoch is not None, "a warm-up counts epochs"
    coordinator = build_coordinator(settings, num_mini_batches, batches_per_epoch or 1)
    story = Story(settings, trace, coordinator)
    events, commands = MessageDigest(), MessageDigest()
    for row in trace.events:
        event = row.decode()
        answer = coordinator.handle(event)
        events.add(event)
        for command in answer:
            commands.add(command)
            if isinstance(command, Compute):
                story.given[command.lease] = command
            elif isinstance(command, ApplyUpdate):
                story.updates.append(command)
        story.log.append((event, answer))
        story.commands.append(commands.hexdigest())
    story.events = events.hexdigest()
    return story


def check_trace(story: Story) -> None:
    """The rows agree with each other and with what the coordinator makes of the events.

    Raises:
        AssertionError: they do not.
    """
    trace = story.trace
    assert trace.end is not None, "a run that ended has an end row"
    result = trace.end.result
    assert [row.row for row in trace.events] == list(range(trace.end.rows))
    assert [row.commands for row in trace.events] == [text[:16] for text in story.commands]
    assert story.commands[-1] == trace.end.commands_sha256 == result["commands_sha256"]
    assert story.events == result["events_sha256"]
    times = [row.time for row in trace.events]
    assert times == sorted(times), "run time never goes back"
    walls = [row.wall_time for row in trace.events]
    assert walls == sorted(walls), "wall time never goes back"
    assert len(trace.updates) == len(story.updates)
    losses = {e.lease: e.loss for e, _ in reversed(story.log) if isinstance(e, GradientPushed)}
    for row, update in zip(trace.updates, story.updates, strict=True):
        contributions = update.contributions
        assert row.version == update.version
        assert row.staleness == [c.staleness for c in contributions]
        assert row.num_samples == [c.num_samples for c in contributions]
        assert row.learners == [story.given[c.lease].learner for c in contributions]
        assert row.losses == [losses[c.lease] for c in contributions]


def check_accounts(story: Story, samples_per_epoch: int) -> None:
    """No mini-batch is lost, none counts twice, and the summary says what the rows say.

    Raises:
        AssertionError: they do not add up.
    """
    assert story.trace.end is not None
    result = story.trace.end.result
    total = story.coordinator.ledger.num_mini_batches
    parts = [result[f"mini_batches_{part}"] for part in ("applied", "given_up", "dropped", "left")]
    if total is not None:
        assert sum(parts) == total, f"applied, given up, dropped, left: {parts} of {total}"
    applied = story.applied()
    assert all(times == 1 for times in applied.values()), f"applied twice: {applied}"
    assert len(applied) == result["mini_batches_applied"]
    assert all(b >= 0 and (total is None or b < total) for b in applied)
    assert result["updates"] == len(story.updates)
    staleness = [c.staleness for update in story.updates for c in update.contributions]
    assert result["max_staleness"] == max(staleness, default=0)
    samples = sum(sum(row.num_samples) for row in story.trace.updates)
    assert result["samples"] == samples
    assert result["epochs"] == samples / samples_per_epoch
