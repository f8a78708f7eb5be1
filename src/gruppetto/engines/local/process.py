"""What a process tells the kernel about itself."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

__all__ = ["die_with_parent", "name_process"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, whatever way that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the kernel knew
        os._exit(1)


def name_process(role: str) -> None:
    """The name that ``top`` and ``ps -o comm`` show: ``gp learner 3``, at most 15 letters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"gp {role}".encode()[:15])
