"""Lets these tests import the independent model of the ledger, ``oracle`` and ``driver``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "protocols"))
