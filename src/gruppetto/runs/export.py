"""``gp.export``: what a run made, for other programs.

Its newest weights as the plain ``state_dict`` that PyTorch users expect, and its trace as event
files for TensorBoard.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gruppetto.errors import InvalidSetting, RunFolderError
from gruppetto.runs.decoupled.checkpoints import state_dict_of
from gruppetto.runs.folder import RunFolder
from gruppetto.runs.tensorboard import TensorBoardLog, has_event_files
from gruppetto.trace import follow_rows

__all__ = ["export", "export_tensorboard"]


def export(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the weights of a run's newest checkpoint; the task is not needed.

    Args:
        run: its folder.
        out: ``FILE.pt`` (``torch.load`` reads it) or ``FILE.safetensors``. Default:
            ``RUN/model.pt``.

    Raises:
        RunFolderError: no run or no checkpoint there, or the file cannot be written.
        InvalidSetting: another ending.
    """
    folder = RunFolder.open(run)
    _, tensors, plain = folder.load_checkpoint()
    path = Path(out) if out is not None else folder.path / "model.pt"
    if "modules" in plain:  # of a decoupled run
        state = state_dict_of(tensors, plain)
    else:
        names = plain["server"]["state_dict"]
        state = {key: tensors[name] for key, name in names.items()}
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            # Tied weights are one tensor under several keys, which this format does not know.
            save_file({key: tensor.clone() for key, tensor in state.items()}, part)
        elif path.suffix in (".pt", ".pth"):
            torch.save(state, part)
        else:
            raise InvalidSetting(f"export: expected FILE.pt or FILE.safetensors, got {path}")
        os.replace(part, path)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}") from None
    return path


def export_tensorboard(run: str | Path, out: str | Path) -> Path:
    """Write a run's trace as TensorBoard event files; see :mod:`gruppetto.runs.tensorboard`.

    Args:
        run: its folder.
        out: a folder without event files; made if missing.

    Raises:
        RunFolderError: no run there, or a folder that holds event files or cannot be written.
        TraceError: the trace cannot be read.
        InvalidSetting: the package tensorboard is missing.
    """
    folder = RunFolder.open(run)
    path = Path(out)
    if has_event_files(path):
        # TensorBoard would draw both as one zigzag line.
        raise RunFolderError(f"{path} holds TensorBoard event files already; choose another folder")
    rows = list(follow_rows(folder.trace))
    log = TensorBoardLog(path, start=folder.started_at())
    try:
        for row in rows:
            log.row(row)
    finally:
        log.close()
    return path
