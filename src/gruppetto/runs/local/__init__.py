"""A run with real processes: what each process does, and the caller's side of it."""

from __future__ import annotations

from typing import Final

from gruppetto.engines.local.forkserver import ForkServer

__all__ = ["GET_READY", "start_early"]

#: What the fork server calls first.
GET_READY: Final = "gruppetto.runs.local.roles:get_ready"


def start_early() -> None:
    """Start the fork server, so that it imports torch while the caller does, too.

    Raises:
        UsageError: this system cannot run it.
    """
    ForkServer.shared(GET_READY)
