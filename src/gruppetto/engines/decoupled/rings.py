"""Rings: how tensors go from one module's process to another's, without a copy through a socket.

A ring has one sender and one receiver. Its slots lie in an anonymous file that is mapped before
the processes fork; the sender copies tensors in, the receiver copies them out into memory of its
own and frees the slot at once, so a graph may keep what was received. Two counting event
descriptors say how many messages wait and how many slots are free. Both can be polled beside other
descriptors, and nobody ever spins or waits for one of them alone.

    sender     free -1   slot written   filled +1
    receiver   filled -1   slot read   free +1

Tensors keep strides and alignment, for the bits of what is computed from them depend on both.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from gruppetto.engines.decoupled.device_slots import (
    finish_copies,
    handle_of,
    make_slots,
    open_slots,
)
from gruppetto.engines.local.memory import share
from gruppetto.errors import GruppettoError, TaskError
from gruppetto.protocols.messages import StopAt

__all__ = ["Message", "Ring", "copied", "span_bytes"]

_ALIGNMENT: Final = 64
_PAGE: Final = 4096
#: Room in a slot for what is said about the tensors beside them.
_HEADER_ROOM: Final = 16_384
#: Kind, mini-batch (or version), samples, start and size of the header.
_CELL: Final = struct.Struct("<qqqqq")
_CELL_BYTES: Final = 512
_SIZE: Final = struct.Struct("<q")
_PAYLOAD: Final = 1
_STOP: Final = 2

#: Start, bytes, dtype, shape, strides; a list in the bytes of a header.
_Place = tuple[int, int, str, tuple[int, ...], tuple[int, ...]]


class Message(NamedTuple):
    """What a ring carries: tensors of one mini-batch, and bytes beside them."""

    mini_batch: int
    num_samples: int
    tensors: Sequence[Tensor]
    rest: bytes = b""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    places: list[_Place]
    rest: bytes
    #: Tensors lie in the receiver's slots on its device.
    is_on_device: bool


class Ring:
    """One direction between two modules. Make it before the processes fork.

    Messages without tensors (:class:`StopAt`) keep their place among the others and need no free
    slot; there may be one of them in a ring at a time.

    Args:
        what: it carries, for messages to users: ``the outputs of module 1``.
        capacity: messages with tensors that it holds.
        num_bytes: of the tensors of one message.
        headroom: messages may be so many times as large. Pages of a slot take memory only once
            they are written to.
    """

    def __init__(self, what: str, capacity: int, num_bytes: int, headroom: int = 1) -> None:
        self.what = what
        self.capacity = capacity
        self._num_bytes = num_bytes
        self._slot_bytes = _pages(headroom * num_bytes + _HEADER_ROOM)
        # One cell more than slots, for the message that needs no slot.
        self._num_cells = capacity + 1
        cells_end = _PAGE + _pages(self._num_cells * _CELL_BYTES)
        descriptor, mapped = share(cells_end + capacity * self._slot_bytes)
        os.close(descriptor)  # the mapping holds the memory
        #: Size of the handle of the receiver's slots on its device, and the handle; 0 for none.
        self._handle = _bytes_of(mapped[:_PAGE])
        self._cells = _bytes_of(mapped[_PAGE:cells_end])
        self._slots = list(mapped[cells_end:].view(capacity, self._slot_bytes))
        #: In the receiver those that it has made, in the sender the same; None where there are none
        #: or the sender has not looked yet.
        self._device_slots: Tensor | None = None
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE
        #: Readable while a message waits.
        self.filled = os.eventfd(0, flags)
        #: Readable while a slot is free.
        self.free = os.eventfd(capacity, flags)
        # Each side counts for itself, all messages and those in slots.
        self._sent = self._filled = self._received = self._emptied = 0

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last process that maps it."""
        os.close(self.filled)
        os.close(self.free)

    # ---------------------------------------------------------------- sender

    def offer(self, message: Message) -> bool:
        """Send a message if a slot is free.

        Raises:
            TaskError: it is larger than a slot.
        """
        places, end = _places(message.tensors)
        there = self._on_device(message.tensors, end)
        # Beside the tensors, which are elsewhere if they are on the device.
        start = 0 if there is not None else end
        header = msgspec.msgpack.encode(_Header(places, message.rest, there is not None))
        if start + len(header) > self._slot_bytes:
            raise TaskError(
                f"{self.what} for mini-batch {message.mini_batch} take {start + len(header)} "
                f"bytes, and a slot between two processes holds {self._slot_bytes}; expected "
                "mini-batches of about the size of the first: pad them alike in collate_fn, or use "
                "--engine virtual"
            )
        if not _take(self.free):
            return False
        number = self._filled % self.capacity
        slot = self._slots[number]
        space = slot if there is None else there[number]
        for place, tensor in zip(places, message.tensors, strict=True):
            _write(space, place, tensor)
        finish_copies(space.device, *(tensor.device for tensor in message.tensors))
        _bytes_of(slot)[start : start + len(header)] = header
        self._filled += 1
        numbers = (_PAYLOAD, message.mini_batch, message.num_samples, start, len(header))
        self._post(_CELL.pack(*numbers))
        return True

    def _on_device(self, tensors: Sequence[Tensor], num_bytes: int) -> Tensor | None:
        """The receiver's slots on its device, if it has any and these tensors belong there."""
        [size] = _SIZE.unpack_from(self._handle)
        if not size or not tensors:
            return None
        if self._device_slots is None:
            handle = bytes(self._handle[_SIZE.size : _SIZE.size + size])
            self._device_slots = open_slots(handle, tensors[0].device)
        # A larger one goes through the file, which has more room.
        return self._device_slots if num_bytes <= self._device_slots.shape[1] else None

    def send_stop(self, stop: StopAt) -> None:
        """Tell the receiver at which version the run ends; at most once."""
        room = _CELL_BYTES - _CELL.size
        reason = stop.reason.encode()[:room].decode(errors="ignore").encode()
        self._post(_CELL.pack(_STOP, stop.version, 0, 0, len(reason)) + reason)

    def _post(self, cell: bytes) -> None:
        start = self._sent % self._num_cells * _CELL_BYTES
        self._cells[start : start + len(cell)] = cell
        self._sent += 1
        os.eventfd_write(self.filled, 1)

    # -------------------------------------------------------------- receiver

    def receive_on(self, device: torch.device) -> None:
        """Have tensors come through memory of a device; the receiver, before anything is sent.

        Messages beyond the usual size go through the CPU's memory.

        Raises:
            TaskError: memory of this device cannot be shared.
        """
        self._device_slots = make_slots(device, self.capacity, _pages(self._num_bytes + _PAGE))
        handle = handle_of(self._device_slots)
        _SIZE.pack_into(self._handle, 0, len(handle))
        self._handle[_SIZE.size : _SIZE.size + len(handle)] = handle

    def take(self, mini_batch: int) -> Message | StopAt | None:
        """The next message, in memory of its own; None when there is none yet.

        Args:
            mini_batch: that it must be of.

        Raises:
            GruppettoError: it is of another one: a bug in the engine.
        """
        if not _take(self.filled):
            return None
        start = self._received % self._num_cells * _CELL_BYTES
        self._received += 1
        kind, number, num_samples, header_start, size = _CELL.unpack_from(self._cells, start)
        if kind == _STOP:
            text = self._cells[start + _CELL.size : start + _CELL.size + size]
            return StopAt(number, bytes(text).decode())
        if number != mini_batch:
            raise GruppettoError(
                f"{self.what}: expected mini-batch {mini_batch}, got {number}: a bug in the engine"
            )
        position = self._emptied % self.capacity
        space = self._slots[position]
        data = bytes(_bytes_of(space)[header_start : header_start + size])
        header = msgspec.msgpack.decode(data, type=_Header)
        if header.is_on_device:
            assert self._device_slots is not None
            space = self._device_slots[position]
        tensors = [_read(space, place) for place in header.places]
        finish_copies(space.device)
        self._emptied += 1
        os.eventfd_write(self.free, 1)
        return Message(number, num_samples, tensors, header.rest)


def copied(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own, with its strides and alignment."""
    [place], end = _places([tensor])
    return _read(_whole_bytes(tensor, place, end), place)


def span_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that tensors take in a slot."""
    return _places(tensors)[1]


def _pages(num_bytes: int) -> int:
    """Bytes of whole pages."""
    return -(-num_bytes // _PAGE) * _PAGE


def _bytes_of(block: Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array)


def _take(descriptor: int) -> bool:
    """One less of what an event descriptor counts, if there is any."""
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return False
    return True


def _places(tensors: Sequence[Tensor]) -> tuple[list[_Place], int]:
    """Where tensors lie in a slot, and where the last one ends."""
    places: list[_Place] = []
    end = 0
    for tensor in tensors:
        width = tensor.element_size()
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if tensor.device.type == "cpu":
            past = tensor.data_ptr() % _ALIGNMENT
            start += past if past % width == 0 else 0
        size = _span(tensor) * width
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append((start, size, dtype, tuple(tensor.shape), tensor.stride()))
        end = start + size
    return places, end


def _span(tensor: Tensor) -> int:
    """Elements from a tensor's first in memory to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((_span(tensor),), (1,))


def _write(slot: Tensor, place: _Place, tensor: Tensor) -> None:
    start, size = place[:2]
    if size:
        slot[start : start + size].view(tensor.dtype).copy_(_flat(tensor))


def _read(slot: Tensor, place: Any) -> Tensor:
    start, size, name, shape, strides = place
    dtype: torch.dtype = getattr(torch, name)
    if not size:
        return torch.empty_strided(shape, strides, dtype=dtype, device=slot.device)
    source = slot[start : start + size].view(dtype)
    # Torch's memory starts at multiples of the alignment: as far past one as the sender's.
    past = start % _ALIGNMENT // dtype.itemsize
    own = torch.empty(past + len(source), dtype=dtype, device=slot.device)[past:]
    return own.copy_(source).as_strided(shape, strides)


def _whole_bytes(tensor: Tensor, place: _Place, end: int) -> Tensor:
    block = torch.empty(end, dtype=torch.uint8)
    _write(block, place, tensor)
    return block
