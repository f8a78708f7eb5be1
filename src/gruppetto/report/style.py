"""What the figures of a report have in common: colours, markers, sizes, how labels are written.

Figures are 5.2 inches wide with letters that stay readable at 350 pixels.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["SHORT", "WIDTH", "RunStyle", "legend_size", "run_style", "tick", "wrapped"]

#: Okabe and Ito's colours without yellow, which is too pale on white; grey instead of black.
_COLOURS: Final = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#7A5195",
)  # fmt: skip
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES: Final[tuple[Any, ...]] = ("-", (0, (6, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (1.5, 1)))

#: Inches.
WIDTH: Final = 5.2
#: Longest label, in letters, for two columns of a legend or of panels.
SHORT: Final = 24
_LINE: Final = 48


@dataclass(frozen=True)
class RunStyle:
    """How a run is drawn."""

    colour: str
    marker: str
    line: Any


def run_style(index: int) -> RunStyle:
    """The style of the run at a place in the report; the first 8 differ in colour and marker."""
    turn = index // len(_COLOURS)
    return RunStyle(
        _COLOURS[index % len(_COLOURS)],
        _MARKERS[(index + turn) % len(_MARKERS)],
        _LINES[(index + turn) % len(_LINES)],
    )


def tick(value: float, _position: int | None = None) -> str:
    """The text at a tick of an axis."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:g}"


def wrapped(label: str, width: int = _LINE) -> str:
    """A label over as many lines as it takes."""
    return "\n".join(textwrap.wrap(label, width, break_on_hyphens=False)) or label


def legend_size(labels: Sequence[str]) -> tuple[int, float]:
    """Columns of a legend, and the height in inches that it needs."""
    columns = 2 if len(labels) > 1 and max(map(len, labels)) <= SHORT else 1
    lines = sum(wrapped(label).count("\n") + 1 for label in labels)
    return columns, 0.2 * math.ceil(lines / columns)
