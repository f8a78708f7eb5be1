"""Figures as bytes that are the same every time: SVG to stand inside a page, and PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gruppetto.trace.folder import write_atomically

__all__ = ["plain_style", "save_png", "to_svg", "write_atomically"]

_STYLE: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 11.0,
    "axes.labelsize": 11.5,
    "axes.titlesize": 11.0,
    "axes.edgecolor": "#777777",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "text.parse_math": False,  # a name with dollar signs is a name
    "legend.fontsize": 11.0,
    # Outlines of letters rather than text: looks the same whatever fonts the reader has.
    "svg.fonttype": "path",
    "svg.hashsalt": "gruppetto",
}


@contextmanager
def plain_style() -> Iterator[None]:
    """Draw in the report's style, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def to_svg(figure: Figure, prefix: str) -> str:
    """A figure as one ``<svg>`` element that scales to the width it is given.

    Args:
        figure: drawn in :func:`plain_style`.
        prefix: put before every id, so that several figures can stand in one page.
    """
    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with plain_style():
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    # Inside HTML no namespaces are needed; without a size the picture takes the box's width.
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib writes a viewBox"
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    return f'<svg {box.group()} aria-hidden="true" focusable="false">{body.strip()}'


def save_png(figure: Figure, path: Path, dpi: int = 160) -> Path:
    """Write a figure as a PNG file, the same bytes every time; returns its path.

    Raises:
        RunFolderError: it cannot be written there.
    """
    buffer = io.BytesIO()
    with plain_style():
        FigureCanvasAgg(figure)
        figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    write_atomically(path, buffer.getvalue())
    return path
