"""A run's folder: ``config.json``, ``trace/``, ``checkpoint-ROW.safetensors``."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gruppetto.errors import RunFolderError
from gruppetto.runs.settings import CommonSettings, Settings, read_settings
from gruppetto.trace.folder import read_config, write_atomically

__all__ = ["RunFolder", "new_folder", "versions_here"]


def versions_here() -> dict[str, str]:
    """What the bits of a run depend on, besides its settings."""
    return {
        "gruppetto": version("gruppetto"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def new_folder(out: str | Path | None, label: str) -> Path:
    """Where a new run goes: ``out``, or the first free ``runs/label-001``; nothing is made yet.

    Raises:
        RunFolderError: the folder holds a run or something else already, or cannot be written.
    """
    if out is None:
        safe = re.sub(r"[^A-Za-z0-9._=-]+", "-", label).strip("-")
        base = Path("runs")
        taken = {p.name for p in base.iterdir()} if base.is_dir() else set()
        number = next(n for n in range(1, len(taken) + 2) if f"{safe}-{n:03d}" not in taken)
        folder = base / f"{safe}-{number:03d}"
    else:
        folder = Path(out)
    if (folder / "config.json").exists() or (folder / "trace").exists():
        raise RunFolderError(f"{folder} already holds a run; choose another --out, or resume it")
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder}: expected a folder to write to, got a file")
    if folder.is_dir() and any(folder.iterdir()):
        raise RunFolderError(f"{folder} is not empty; choose another --out")
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise RunFolderError(f"{folder} cannot be written: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RunFolderError(f"{folder} cannot be written: no permission in {parent}")
    return folder


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own: the file format refuses tensors that share theirs."""
    tensor = tensor.detach().cpu().contiguous()
    owns_all = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if owns_all else tensor.clone()


class RunFolder:
    """Reads and writes the parts of a run that are not its trace."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.trace = self.path / "trace"

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run.

        Raises:
            RunFolderError: no run there.
        """
        read_config(Path(path))
        return cls(path)

    @classmethod
    def create(cls, path: Path, settings: CommonSettings, arithmetic: dict[str, Any]) -> RunFolder:
        """Make the folder and write down the settings and what the bits depend on.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        folder = cls(path)
        content = {
            "settings": settings.model_dump(mode="json"),
            "versions": versions_here(),
            "arithmetic": arithmetic,
        }
        text = json.dumps(content, indent=2) + "\n"
        write_atomically(folder.path / "config.json", text.encode())
        return folder

    def settings(self) -> Settings:
        """The settings of the run."""
        return read_settings(Settings, read_config(self.path).settings)

    def versions(self) -> dict[str, str]:
        """What the run was made with."""
        return read_config(self.path).versions

    def started_at(self) -> float:
        """When the run began, in seconds since 1970."""
        return (self.path / "config.json").stat().st_mtime

    # ------------------------------------------------------- initial weights

    def save_initial(self, state: Mapping[str, Tensor]) -> None:
        """Keep the weights a run was told to start from."""
        save_file(
            {n: t.detach().cpu().clone() for n, t in state.items()},
            self.path / "initial.safetensors",
        )

    def load_initial(self) -> dict[str, Tensor] | None:
        """The weights the run was told to start from, if any."""
        path = self.path / "initial.safetensors"
        return load_file(path) if path.is_file() else None

    # ----------------------------------------------------------- checkpoints

    def save_checkpoint(self, row: int, tensors: Mapping[str, Tensor], plain: Any) -> None:
        """Write a checkpoint after an event row in place of the one before; whole or not at all.

        Args:
            row: of the trace.
            tensors: by name.
            plain: JSON values; they travel in the file's header, so one rename replaces both.
        """
        part = self.path / "checkpoint.part"
        save_file(
            {name: _alone(tensor) for name, tensor in tensors.items()},
            part,
            metadata={"checkpoint": json.dumps({"row": row, **plain})},
        )
        # A new name, then the old one goes: renaming over a file makes some file systems write
        # its data out at once, which takes longer than all the rest.
        older = self._checkpoints()
        newest = self.path / f"checkpoint-{row:09d}.safetensors"
        os.replace(part, newest)
        for path in older:
            if path != newest:
                path.unlink()

    def _checkpoints(self) -> list[Path]:
        return sorted(self.path.glob("checkpoint-*.safetensors"))

    def load_checkpoint(self) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
        """The newest checkpoint: its row, tensors, and everything else.

        Raises:
            RunFolderError: there is none, or it cannot be read.
        """
        found = self._checkpoints()
        if not found:
            raise RunFolderError(
                f"{self.path} has no checkpoint: the run ended before its first epoch did"
            )
        try:
            with safe_open(found[-1], framework="pt") as file:
                plain = json.loads(file.metadata()["checkpoint"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return int(plain["row"]), tensors, plain
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RunFolderError(f"{found[-1]}: the checkpoint cannot be read ({error})") from None
