"""A ring's slots in a device's memory: what goes from one GPU to another does not pass the CPU's.

The receiver's process allocates them, for CUDA memory must not exist before processes fork, and
leaves their handle where the sender finds it. From then on both copy into and out of the same
memory, each on its own device's stream; a copy between devices is the driver's, directly where they
reach each other.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Final

import torch
import torch.multiprocessing  # teaches ForkingPickler what tensors are
from torch import Tensor

from gruppetto.errors import TaskError

__all__ = ["finish_copies", "handle_of", "make_slots", "open_slots", "tidy"]

#: Where torch keeps its counts of who uses shared CUDA memory, named after the process.
_COUNTS: Final = Path("/dev/shm")


def make_slots(device: torch.device, capacity: int, num_bytes: int) -> Tensor:
    """[capacity, num_bytes] uint8 on a device. Whoever makes them must outlive their use."""
    return torch.empty((capacity, num_bytes), dtype=torch.uint8, device=device)


def handle_of(slots: Tensor) -> bytes:
    """What another process needs to reach the memory; good for one of them.

    Raises:
        TaskError: this memory cannot be shared.
    """
    try:
        return bytes(ForkingPickler.dumps(slots))
    except RuntimeError as error:
        raise _not_shared(slots.device, error) from error


def open_slots(handle: bytes, device: torch.device) -> Tensor:
    """The same memory in another process.

    Args:
        handle: of it.
        device: of the tensors to be sent, for messages to users.

    Raises:
        TaskError: it cannot be reached from here.
    """
    try:
        slots: Tensor = pickle.loads(handle)
    except RuntimeError as error:
        raise _not_shared(device, error) from error
    return slots


def finish_copies(*devices: torch.device) -> None:
    """Wait until all that was begun on these devices by this process is done.

    Another process is told of a copy through the CPU, which knows nothing of the device's queue.
    """
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def tidy(process: int, folder: Path = _COUNTS) -> None:
    """Remove what torch leaves of a process that had shared memory of a device and was killed."""
    for file in folder.glob(f"torch_{process}_*"):
        file.unlink(missing_ok=True)


def _not_shared(device: torch.device, error: RuntimeError) -> TaskError:
    reason = str(error).partition("\n")[0]
    return TaskError(
        f"two modules' processes cannot share memory of {device}: {reason}; expected a driver with "
        "CUDA inter-process communication: use --engine virtual, or --device cpu"
    )
