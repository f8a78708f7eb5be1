"""Lets these tests look at processes as those of the engines do; gives each one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: a second thread makes them no faster, and on a busy machine much slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
