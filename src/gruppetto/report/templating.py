"""What all pages share: figures with their words, and how a template becomes a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from gruppetto.report.svg import to_svg

__all__ = ["Plot", "drawn", "render_template"]


@dataclass(frozen=True)
class Plot:
    """A figure on a page."""

    heading: str
    #: What a reader who cannot see the picture is told.
    description: str
    caption: str
    svg: Markup


def drawn(figures: Iterable[tuple[Figure | None, str, str, str]]) -> list[Plot]:
    """The figures that there are, numbered by their places.

    Args:
        figures: each with heading, description and caption; None where there is nothing to draw.
    """
    return [
        Plot(heading, description.strip(), caption, Markup(to_svg(figure, f"plot{number}")))
        for number, (figure, heading, description, caption) in enumerate(figures, start=1)
        if figure is not None
    ]


def render_template(name: str, **values: object) -> str:
    """A page of the report from its template."""
    environment = Environment(
        loader=PackageLoader("gruppetto.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values).rstrip() + "\n"
