"""A module at one of its versions, as values that travel and are saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

__all__ = ["Snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """What a module was at a version.

    Tensors are named ``parameter/NAME`` and ``buffer/NAME`` as in the whole model, and where the
    snapshot is to be resumed from ``optimizer/…``, ``compensation/…``, ``flight/MINI-BATCH/…``.
    """

    module: int
    version: int
    tensors: dict[str, Tensor]
    #: JSON values; empty where only weights were asked for.
    plain: dict[str, Any]

    def to_bytes(self) -> bytes:
        """For another process."""
        plain = {"module": self.module, "version": self.version, "plain": self.plain}
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        return save(tensors, metadata={"snapshot": json.dumps(plain)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Snapshot:
        """What :meth:`to_bytes` gave."""
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        plain = json.loads(header["__metadata__"]["snapshot"])
        return cls(plain["module"], plain["version"], load(data), plain["plain"])
