"""How much memory a module's process takes at most, beyond what it had when it was ready."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch.nn import functional

__all__ = ["PeakMemory"]


class PeakMemory:
    """Measures from now on: of this process as the kernel counts it, or on CUDA of tensors.

    Pages that other processes share count, too, once this one has touched them: those of rings.
    Pages of files do not: the code of libraries is in memory once for all processes.

    Args:
        device: where the module computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        _load_kernels()
        _give_back_free_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now
        except OSError:
            return
        self._before = _status("VmRSS")
        self._files_before = _status("RssFile") or 0

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            now = torch.cuda.max_memory_allocated(self._device)
        else:
            now = _status("VmHWM") or self._before
            now -= max(0, (_status("RssFile") or 0) - self._files_before)
        return max(0, now - self._before)


def _load_kernels() -> None:
    """Run a little of everything once: what torch loads at first use is not a module's memory."""
    weight, image = torch.ones(4, 4, 3, 3, requires_grad=True), torch.ones(2, 4, 8, 8)
    hidden = functional.batch_norm(functional.conv2d(image, weight), None, None, training=True)
    scores = functional.linear(functional.relu(hidden).flatten(1), torch.ones(3, 144))
    functional.cross_entropy(scores, torch.tensor([0, 1])).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD([weight], lr=0.0, momentum=0.9).step()


def _give_back_free_memory() -> None:
    """What was freed and kept for later would be taken without being seen to grow."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU library has it
    if trim is not None:
        trim(0)


def _status(name: str) -> int | None:
    """A line of ``/proc/self/status`` in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
