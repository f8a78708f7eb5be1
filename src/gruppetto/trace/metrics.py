"""What the name of a metric says about it."""

from __future__ import annotations

from typing import Final

__all__ = ["is_lower_better"]

_LOWER: Final = ("loss", "error", "distance", "perplexity", "mse", "mae")


def is_lower_better(metric: str) -> bool:
    """Whether a smaller value of a metric is the better one, by its name.

    >>> is_lower_better("loss"), is_lower_better("accuracy")
    (True, False)
    """
    return any(word in metric.lower() for word in _LOWER)
