"""What the name of a metric says about it."""

from __future__ import annotations

import math
from typing import Final

from gruppetto.errors import InvalidSetting

__all__ = ["is_lower_better", "parse_target"]

_LOWER: Final = ("loss", "error", "distance", "perplexity", "mse", "mae")


def is_lower_better(metric: str) -> bool:
    """Whether a smaller value of a metric is the better one, by its name.

    >>> is_lower_better("loss"), is_lower_better("accuracy")
    (True, False)
    """
    return any(word in metric.lower() for word in _LOWER)


def parse_target(text: str) -> tuple[str, float]:
    """Read ``accuracy=0.95``: a metric and the value to reach.

    Raises:
        InvalidSetting: not ``metric=number``.

    >>> parse_target("accuracy=0.95")
    ('accuracy', 0.95)
    """
    metric, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not metric or math.isnan(value):
        raise InvalidSetting(f"target: expected metric=number like accuracy=0.95, got {text!r}")
    return metric, value
