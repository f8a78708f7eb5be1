"""What processes of a benchmark's test do. Imported there, so it imports next to nothing."""

from __future__ import annotations

import os
from collections.abc import Callable


def counting(rank: int, start: int) -> Callable[[str, int], tuple[float, float, list[object]]]:
    """Work of a process for :class:`Workers`."""
    if start < 0:
        raise ValueError("no such start")

    def run(name: str, num: int) -> tuple[float, float, list[object]]:
        if name == "end":
            os._exit(1)
        return 10.0 + rank, 20.0 + rank, [(name, start + rank, num, os.sched_getaffinity(0))]

    return run
