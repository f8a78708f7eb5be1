"""A checkpoint of a decoupled run: the snapshots of all modules in one file.

Tensors are named ``module/K/NAME``, NAME as in :class:`Snapshot`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gruppetto.decoupled.snapshot import Snapshot

__all__ = ["pack_snapshots", "state_dict_of", "unpack_snapshots"]


def pack_snapshots(
    snapshots: Mapping[int, Snapshot],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and JSON values."""
    tensors = {
        f"module/{number}/{name}": tensor
        for number, snapshot in snapshots.items()
        for name, tensor in snapshot.tensors.items()
    }
    plain = {str(n): {"version": s.version, "plain": s.plain} for n, s in snapshots.items()}
    return tensors, {"modules": plain}


def unpack_snapshots(
    tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> dict[int, Snapshot]:
    """What :func:`pack_snapshots` was given: module -> its snapshot."""
    own: dict[int, dict[str, Tensor]] = {int(number): {} for number in plain["modules"]}
    for name, tensor in tensors.items():
        _, number, rest = name.split("/", 2)
        own[int(number)][rest] = tensor
    return {
        number: Snapshot(number, told["version"], own[number], told["plain"])
        for number, told in ((int(text), told) for text, told in plain["modules"].items())
    }


def state_dict_of(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[str, Tensor]:
    """The whole model's ``state_dict`` in a checkpoint."""
    snapshots = unpack_snapshots(tensors, plain)
    known = {n: t for snapshot in snapshots.values() for n, t in snapshot.tensors.items()}
    names: dict[str, str] = snapshots[1].plain["server"]["state_dict"]
    return {key: known[name] for key, name in names.items()}
