"""Lets these tests look at processes as those of the engines do, ``local_processes``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
