"""A process that reads mini-batches for one learner, and hands their tensors over in memory.

Two blocks of shared memory take turns: the learner uses one batch while the next is written. What
is not a tensor (a list of texts, a dict around them) is pickled into the block behind the tensors.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import cloudpickle
import torch
from torch import Tensor

from gruppetto.engines.local.forking import fork
from gruppetto.engines.local.memory import share
from gruppetto.engines.local.process import die_with_parent, name_process
from gruppetto.engines.local.wire import (
    is_readable,
    pack_texts,
    pair,
    receive,
    receive_with_files,
    unpack_texts,
)
from gruppetto.engines.virtual import failure_reason
from gruppetto.training.mini_batches import MiniBatches

__all__ = ["LoaderProcess", "ReadingFailed", "Request"]

#: ticket, mini-batch, block.
_REQUEST: Final = struct.Struct("<qqq")
#: ticket, block, samples (-1: it failed), start and size of the pickled rest, size of the block.
_REPLY: Final = struct.Struct("<qqqqqq")
_ALIGNMENT: Final = 64


class ReadingFailed(Exception):
    """The user's data raised in the loader process; both texts are of there."""

    def __init__(self, reason: str, traceback: str) -> None:
        super().__init__(reason)
        self.traceback = traceback


class Request(NamedTuple):
    """A mini-batch that has been asked for."""

    ticket: int
    #: Which of the two blocks it is read into.
    block: int


class LoaderProcess:
    """The learner's side; forks the process.

    Args:
        mini_batches: of the run.
    """

    def __init__(self, mini_batches: MiniBatches) -> None:
        self._channel, theirs = pair()
        parent = os.getpid()
        if fork() == 0:
            self._channel.close()
            die_with_parent(parent)
            name_process("loader")
            code = 1
            try:
                _load(theirs, mini_batches)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        self._blocks: list[Tensor | None] = [None, None]
        self._next_ticket = 0
        #: ticket -> reply, of what has arrived and not been taken.
        self._arrived: dict[int, bytes] = {}

    def close(self) -> None:
        """Let the process end."""
        self._channel.close()

    def request(self, mini_batch: int, block: int) -> Request:
        """Have a mini-batch read into a block; what was requested for that block before is void."""
        # Replies that nobody waits for must not fill the socket: both sides would wait for good.
        while is_readable(self._channel, 0.0):
            self._take_reply()
        request = Request(self._next_ticket, block)
        self._next_ticket += 1
        try:
            self._channel.send(_REQUEST.pack(request.ticket, mini_batch, block))
        except OSError:
            _gone()
        return request

    def forget_others(self, wanted: Iterable[Request]) -> None:
        """Replies to all other requests are void."""
        tickets = {request.ticket for request in wanted}
        self._arrived = {t: reply for t, reply in self._arrived.items() if t in tickets}

    def receive(self, request: Request) -> tuple[Any, int]:
        """A requested mini-batch; its tensors are good until its block is requested again.

        Raises:
            ReadingFailed: the user's data raised.
            SystemExit: the loader is gone, and a learner without data is of no use.
        """
        while request.ticket not in self._arrived:
            self._take_reply()
        reply = self._arrived.pop(request.ticket)
        _, _, num_samples, start, size, _ = _REPLY.unpack_from(reply)
        if num_samples < 0:
            raise ReadingFailed(*unpack_texts(reply[_REPLY.size :]))
        block = self._blocks[request.block]
        assert block is not None
        rest = block[start : start + size].numpy().tobytes()
        return _Unpacker(io.BytesIO(rest), block).load(), num_samples

    def _take_reply(self) -> None:
        message, descriptors = receive_with_files(self._channel, 1)
        if not message:
            _gone()
        ticket, block, _, _, _, size = _REPLY.unpack_from(message)
        if descriptors:
            _, self._blocks[block] = share(size, descriptors[0])
            os.close(descriptors[0])
        self._arrived[ticket] = message


def _gone() -> None:
    print("gruppetto: the process that loads a learner's data is gone", file=sys.stderr)
    sys.exit(1)


def _load(channel: socket.socket, mini_batches: MiniBatches) -> None:
    """The loader's side: read what is requested, in order, until the learner is gone."""
    blocks: list[Tensor | None] = [None, None]
    #: block -> (ticket, mini-batch) still to be read; a newer one takes the place of an older.
    wanted: dict[int, tuple[int, int]] = {}
    while True:
        while not wanted or is_readable(channel, 0.0):
            message = receive(channel)
            if not message:
                return
            ticket, mini_batch, which = _REQUEST.unpack(message)
            wanted[which] = ticket, mini_batch
        which = min(wanted, key=wanted.__getitem__)
        ticket, mini_batch = wanted.pop(which)
        descriptor = None
        try:
            batch, num_samples = mini_batches.fetch(mini_batch, torch.device("cpu"))
            file = io.BytesIO()
            packer = _Packer(file)
            packer.dump(batch)
            rest = file.getvalue()
            end = packer.end + len(rest)
            block = blocks[which]
            if block is None or len(block) < end:
                # Some room to grow: batches of texts differ in length.
                descriptor, block = share(end + end // 4 + 4096)
                blocks[which] = block
            packer.write(block, rest)
            reply = _REPLY.pack(ticket, which, num_samples, packer.end, len(rest), len(block))
        except Exception as error:
            size = 0 if descriptor is None else len(blocks[which] or ())
            texts = pack_texts(failure_reason(error), traceback.format_exc())
            reply = _REPLY.pack(ticket, which, -1, 0, 0, size) + texts
        try:
            if descriptor is None:
                channel.send(reply)
            else:
                socket.send_fds(channel, [reply], [descriptor])
                os.close(descriptor)
        except OSError:  # the learner is gone
            return


#: Start, bytes, dtype, shape, strides.
_Place: TypeAlias = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a batch, its tensors apart: strides and alignment stay, for the bits depend on both.

    With cloudpickle, because a batch may be of a class that a script or a notebook defines.

    Args:
        file: for the rest.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        #: id -> place and the tensor itself.
        self._tensors: dict[int, tuple[_Place, Tensor]] = {}
        #: Bytes of all tensors so far.
        self.end = 0

    def persistent_id(self, value: object) -> _Place | None:
        """A tensor's place, for tensors of the plain kind."""
        if type(value) is not Tensor or value.layout is not torch.strided:
            return None
        if not value.numel() or value.requires_grad or value.device.type != "cpu":
            return None
        if value.is_conj() or value.is_neg() or value.is_quantized:
            return None
        if id(value) in self._tensors:
            return self._tensors[id(value)][0]
        width = value.element_size()
        past = value.data_ptr() % _ALIGNMENT
        start = self.end + (past if past % width == 0 else 0)
        size = _span(value) * width
        place = start, size, value.dtype, tuple(value.shape), value.stride()
        self._tensors[id(value)] = place, value
        self.end = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
        return place

    def write(self, block: Tensor, rest: bytes) -> None:
        """Copy tensors and the pickled rest into a block."""
        for (start, size, dtype, _, _), tensor in self._tensors.values():
            whole = tensor.as_strided((_span(tensor),), (1,))
            block[start : start + size].view(dtype).copy_(whole)
        block[self.end : self.end + len(rest)] = torch.frombuffer(
            bytearray(rest), dtype=torch.uint8
        )


class _Unpacker(pickle.Unpickler):
    """Reads a batch back; its tensors are views of the block."""

    def __init__(self, file: io.BytesIO, block: Tensor) -> None:
        super().__init__(file)
        self._block = block
        self._views: dict[int, Tensor] = {}

    def persistent_load(self, place: Any) -> Tensor:
        start, size, dtype, shape, strides = place
        if start not in self._views:
            whole = self._block[start : start + size].view(dtype)
            self._views[start] = whole.as_strided(shape, strides)
        return self._views[start]


def _span(tensor: Tensor) -> int:
    """Elements from a tensor's first in memory to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
