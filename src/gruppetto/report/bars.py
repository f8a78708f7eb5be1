"""Stacked bars, as several figures have them: the same parts, one bar per run or learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

__all__ = ["Kind", "stacked_bars"]

#: Of a part: attribute, name, colour, hatch.
Kind = tuple[str, str, str, str]


def stacked_bars(
    axes: Axes,
    kinds: Sequence[Kind],
    values_of: Callable[[str], Sequence[float]],
    *,
    height: float,
) -> npt.NDArray[np.float64]:
    """Draw horizontal bars from 0 on, part beside part; those that are 0 in all are left out.

    Args:
        axes: bar n is drawn at y = n.
        kinds: the parts, in order.
        values_of: the attribute of a part -> its value in each bar, >= 0.
        height: of a bar, where the next is 1 away.

    Returns:
        Where each bar ends.
    """
    ends: npt.NDArray[np.float64] = np.zeros(len(values_of(kinds[0][0])))
    for attribute, name, colour, hatch in kinds:
        values = np.array(values_of(attribute), dtype=np.float64)
        if not values.any():
            continue
        axes.barh(
            np.arange(len(values)),
            values,
            left=ends,
            height=height,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
            label=name,
        )
        ends = ends + values
    return ends
