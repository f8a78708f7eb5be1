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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gruppetto.engines.local.forking import fork
from gruppetto.engines.local.memory import share
from gruppetto.engines.local.process import die_with_parent, name_process
from gruppetto.engines.local.wire import pair, receive
from gruppetto.engines.virtual import failure_reason
from gruppetto.training.mini_batches import MiniBatches

__all__ = ["LoaderProcess", "ReadingFailed", "Request"]

#: ticket, mini-batch, block.
_REQUEST: Final = struct.Struct("<qqq")
#: ticket, samples (-1: it failed), start and size of the pickled rest, size of a new block.
_REPLY: Final = struct.Struct("<qqqqq")
_ALIGNMENT: Final = 64
_MAX_TEXT: Final = 24_000


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
        #: ticket -> block, of what has been asked for and not arrived.
        self._asked: dict[int, int] = {}
        #: ticket -> reply, of what has arrived and not been taken.
        self._arrived: dict[int, bytes] = {}

    def request(self, mini_batch: int, block: int) -> Request:
        """Have a mini-batch read into a block, after those requested before."""
        request = Request(self._next_ticket, block)
        self._next_ticket += 1
        self._asked[request.ticket] = block
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
        _, num_samples, start, size, _ = _REPLY.unpack_from(reply)
        if num_samples < 0:
            texts = reply[_REPLY.size :].decode(errors="replace").partition("\0")
            raise ReadingFailed(texts[0], texts[2])
        block = self._blocks[request.block]
        assert block is not None
        rest = block[start : start + size].numpy().tobytes()
        return _Unpacker(io.BytesIO(rest), block).load(), num_samples

    def _take_reply(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._channel, 64_000, 1)
        if not message:
            _gone()
        ticket, _, _, _, new_size = _REPLY.unpack_from(message)
        block = self._asked.pop(ticket)
        if descriptors:
            _, self._blocks[block] = share(new_size, descriptors[0])
            os.close(descriptors[0])
        self._arrived[ticket] = message


def _gone() -> None:
    sys.exit("the process that loads this learner's data is gone")


def _load(channel: socket.socket, mini_batches: MiniBatches) -> None:
    """The loader's side: read what is requested, in order, until the learner is gone."""
    blocks: list[Tensor | None] = [None, None]
    while message := receive(channel):
        ticket, mini_batch, which = _REQUEST.unpack(message)
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
            reply = _REPLY.pack(ticket, num_samples, packer.end, len(rest), len(block))
        except Exception as error:
            text = traceback.format_exc().encode(errors="replace")[-_MAX_TEXT:]
            reason = failure_reason(error).replace("\0", " ").encode(errors="replace")
            reply = _REPLY.pack(ticket, -1, 0, 0, 0) + reason + b"\0" + text
        try:
            if descriptor is None:
                channel.send(reply)
            else:
                socket.send_fds(channel, [reply], [descriptor])
                os.close(descriptor)
        except OSError:  # the learner is gone
            return


class _Packer(pickle.Pickler):
    """Pickles a batch, its tensors apart.

    Args:
        file: for the rest.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors: list[tuple[int, Tensor]] = []
        #: Bytes of all tensors so far.
        self.end = 0

    def persistent_id(self, value: object) -> tuple[int, int, torch.dtype, tuple[int, ...]] | None:
        """A tensor's place, for tensors of the plain kind."""
        if type(value) is not Tensor or value.layout is not torch.strided:
            return None
        if not value.numel() or value.requires_grad or value.device.type != "cpu":
            return None
        start = self.end
        size = value.numel() * value.element_size()
        self._tensors.append((start, value))
        self.end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return start, size, value.dtype, tuple(value.shape)

    def write(self, block: Tensor, rest: bytes) -> None:
        """Copy tensors and the pickled rest into a block."""
        for start, tensor in self._tensors:
            size = tensor.numel() * tensor.element_size()
            block[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        block[self.end : self.end + len(rest)] = torch.frombuffer(
            bytearray(rest), dtype=torch.uint8
        )


class _Unpacker(pickle.Unpickler):
    """Reads a batch back; its tensors are views of the block."""

    def __init__(self, file: io.BytesIO, block: Tensor) -> None:
        super().__init__(file)
        self._block = block

    def persistent_load(self, place: Any) -> Tensor:
        start, size, dtype, shape = place
        return self._block[start : start + size].view(dtype).view(shape)
