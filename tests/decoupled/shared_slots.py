"""Slots that a receiver makes after the fork and a sender opens, in the CPU's memory.

Torch shares memory of the CPU with the help of threads and files that do not outlive os._exit well;
that of a GPU needs neither. Here the handle is where the kernel shows the receiver's descriptor.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from gruppetto.engines.local.memory import share

CPU = torch.device("cpu")
_descriptors: dict[int, tuple[int, torch.Size]] = {}


def make_slots(device: torch.device, capacity: int, num_bytes: int) -> Tensor:
    descriptor, mapped = share(capacity * num_bytes)
    slots = mapped.view(capacity, num_bytes).to(device)
    _descriptors[slots.data_ptr()] = descriptor, slots.shape
    return slots


def handle_of(slots: Tensor) -> bytes:
    descriptor, shape = _descriptors[slots.data_ptr()]
    return f"/proc/{os.getpid()}/fd/{descriptor} {shape[0]} {shape[1]}".encode()


def open_slots(handle: bytes, device: torch.device) -> Tensor:
    path, capacity, num_bytes = handle.decode().split()
    descriptor = os.open(path, os.O_RDWR)
    _, mapped = share(int(capacity) * int(num_bytes), descriptor)
    os.close(descriptor)
    return mapped.view(int(capacity), int(num_bytes)).to(device)


def use(patch: pytest.MonkeyPatch) -> None:
    """Have rings share slots so."""
    for each in (make_slots, handle_of, open_slots):
        patch.setattr(f"gruppetto.engines.decoupled.rings.{each.__name__}", each)
