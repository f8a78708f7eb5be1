"""What lies beside a trace, as far as it can be read without torch: ``RUN/config.json``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gruppetto.errors import RunFolderError

__all__ = ["RecordedConfig", "read_config", "write_atomically"]


@dataclass(frozen=True)
class RecordedConfig:
    """What a run was told, and what it was made with."""

    settings: dict[str, Any]
    versions: dict[str, str]


def read_config(folder: Path) -> RecordedConfig:
    """The configuration of an existing run.

    Raises:
        RunFolderError: no run there, or its configuration is something else.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder} does not exist; expected the folder of a run")
    path = folder / "config.json"
    if not path.is_file():
        raise RunFolderError(f"{folder} holds no run: expected config.json in it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return RecordedConfig(dict(content["settings"]), dict(content["versions"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise RunFolderError(f"{path}: expected a run's settings, got something else") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Raises:
        RunFolderError: it cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path} ({error.strerror}); name a place that can be written"
        ) from None
