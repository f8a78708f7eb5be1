"""What the tests of real processes look at: who is there, and what a run left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["children_named", "descendants", "is_alive", "name_of", "wait_until"]

#: Seconds; much longer than anything waited for takes on a busy machine.
PATIENCE = 40.0


def wait_until(happens: Callable[[], object], patience: float = PATIENCE) -> None:
    """Poll until something is true of another process.

    Raises:
        AssertionError: it does not become true.
    """
    until = time.monotonic() + patience
    while not happens():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def _stat(pid: int) -> tuple[str, str, int] | None:
    """Name, state and parent of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 :].rsplit(")", 1)
    fields = rest.split()
    return name, fields[0], int(fields[1])


def name_of(pid: int) -> str:
    """As ``ps -o comm`` shows it; empty where there is no such process."""
    found = _stat(pid)
    return "" if found is None else found[0]


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    found = _stat(pid)
    return found is not None and found[1] not in "ZX"


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and those that these have, zombies included."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (found := _stat(int(path.name))) is not None:
            parents[int(path.name)] = found[2]
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {pid}


def children_named(pid: int, name: str) -> list[int]:
    """Descendants with a name, like ``gp learner 1``."""
    return sorted(child for child in descendants(pid) if name_of(child) == name)
