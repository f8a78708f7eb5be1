"""One page about a plan: what is recommended, what every candidate is predicted to take, and why.

Everything comes in as the planner's JSON result; nothing is predicted here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from gruppetto.errors import InvalidSetting
from gruppetto.report.plan_plots import Band, measured_times, predictions
from gruppetto.report.simulated import time_unit
from gruppetto.report.table import format_number
from gruppetto.report.templating import Plot, drawn, render_template
from gruppetto.trace.folder import write_atomically

__all__ = ["render_plan_page", "write_plan_page"]

_MAX_BINS: Final = 60
#: Keys of a candidate that name it.
_NAMING: Final = ("protocol", "batch_size", "learning_rate_factor")
_MIDDLE: Final = ("value", "median", "mean", "seconds")
_ENDS: Final = ("low", "high")


def write_plan_page(result: Mapping[str, Any], path: Path, command: str | None = None) -> Path:
    """Write a plan as one self-contained HTML file.

    Args:
        result: with the keys

            * ``candidates``: at least one mapping with ``protocol``, and as far as known
              ``batch_size``, ``learning_rate_factor``, ``update_time`` and ``time_to_target`` in
              seconds, ``staleness`` and ``error_floor``. A number is given as it is, with its
              band as ``KEY_band``: ``[low, high]``; or as a mapping with ``value`` (or ``median``,
              ``mean``, ``seconds``), ``low`` and ``high``. None is what is not known, or never
              reached.
            * ``recommendation``: a sentence, or the recommended candidate, or its place.
            * ``why``: a sentence, or several.
            * ``delay``: ``spec``, the law; ``warnings`` about the fit; ``n``, measured times; and
              to draw them ``times``, or ``histogram`` with ``edges`` and ``counts``; and the law's
              ``density`` with ``seconds`` and ``density``.
        path: the file, replaced as a whole if it exists; missing folders are made.
        command: what to type for this page.

    Returns:
        The path.

    Raises:
        InvalidSetting: no candidates.
        RunFolderError: the file cannot be written.
    """
    write_atomically(path, render_plan_page(result, command).encode())
    return path


def render_plan_page(result: Mapping[str, Any], command: str | None = None) -> str:
    """The page that :func:`write_plan_page` writes, as text."""
    candidates: Sequence[Mapping[str, Any]] = result.get("candidates") or ()
    if not candidates:
        raise InvalidSetting("a page about a plan needs at least one candidate, got none")
    delay: Mapping[str, Any] = result.get("delay") or {}
    chosen = _chosen(candidates, result.get("recommendation"))
    return render_template(
        "plan.html",
        title="A plan",
        summary=_recommendation(result.get("recommendation"), candidates, chosen),
        remarks=_sentences(result.get("why")),
        warnings=[str(text) for text in delay.get("warnings") or ()],
        table=_table(candidates),
        colours=["#D55E00" if n == chosen else "#0072B2" for n in range(len(candidates))],
        plots=_plots(candidates, chosen, delay),
        settings=_settings(result, delay),
        command=command,
    )


# ------------------------------------------------------------------- what was given


def _number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        return None
    return float(value) if math.isfinite(value) else None


def _band(candidate: Mapping[str, Any], key: str) -> Band:
    """A number with its band, in whichever form it is given."""
    given = candidate.get(key)
    if isinstance(given, Mapping):
        middle = next((given[name] for name in _MIDDLE if given.get(name) is not None), None)
        ends = given.get("band") or [given.get(name) for name in _ENDS]
    else:
        middle = given
        ends = next(
            (candidate[f"{key}_{end}"] for end in ("band", "range", "bounds")
             if candidate.get(f"{key}_{end}")),
            [candidate.get(f"{key}_{end}") for end in _ENDS],
        )  # fmt: skip
    return Band(_number(middle), _number(ends[0]), _number(ends[1]))


def _names(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each by its protocol, and by what else differs."""
    batches = len({str(each.get("batch_size")) for each in candidates}) > 1
    rates = len({str(each.get("learning_rate_factor")) for each in candidates}) > 1
    names = []
    for each in candidates:
        name = str(each["protocol"])
        if batches and each.get("batch_size") is not None:
            name += f", batch {each['batch_size']}"
        if rates and each.get("learning_rate_factor") is not None:
            name += f", rate × {each['learning_rate_factor']:.3g}"
        names.append(name)
    return names


def _chosen(candidates: Sequence[Mapping[str, Any]], recommended: object) -> int | None:
    """The place of the recommended candidate; None where it cannot be told."""
    if isinstance(recommended, int) and not isinstance(recommended, bool):
        return recommended if 0 <= recommended < len(candidates) else None
    if isinstance(recommended, Mapping):
        keys = [key for key in _NAMING if key in recommended]
        fits = [
            number
            for number, each in enumerate(candidates)
            if keys and all(each.get(key) == recommended[key] for key in keys)
        ]
        return fits[0] if fits else None
    if isinstance(recommended, str):
        # The longest name that is in the sentence: k-async is also in k-async:k=4.
        named = [n for n, name in enumerate(_names(candidates)) if name in recommended]
        named = named or [n for n, c in enumerate(candidates) if str(c["protocol"]) in recommended]
        return max(named, key=lambda n: len(_names(candidates)[n]), default=None)
    return None


def _sentences(given: object) -> str | None:
    if given is None:
        return None
    return given if isinstance(given, str) else " ".join(str(each) for each in _several(given))


def _several(given: object) -> list[object]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _recommendation(
    given: object, candidates: Sequence[Mapping[str, Any]], chosen: int | None
) -> str:
    if isinstance(given, str) and " " in given.strip():
        return given
    if chosen is None:
        return "Nothing is recommended." if given is None else str(given)
    best = candidates[chosen]
    text = f"Recommended: {best['protocol']}"
    if best.get("batch_size") is not None:
        text += f" with mini-batches of {best['batch_size']}"
    if (factor := _number(best.get("learning_rate_factor"))) is not None:
        text += f" and the learning rate times {factor:.3g}"
    time = _band(best, "time_to_target")
    if time.value is not None:
        text += f"; it should reach the target after {_seconds(time)}"
    return f"{text}."


def _seconds(band: Band) -> str:
    """A time with its band, in words."""
    if band.value is None:
        return "unknown"
    unit, factor = time_unit(band.ends)
    text = f"{format_number(factor * band.value)} {unit}"
    if band.low is None:
        return text
    high = "more" if band.high is None else format_number(factor * band.high)
    return f"{text} ({format_number(factor * band.low)} to {high})"


# ------------------------------------------------------------------- what is shown


def _table(candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One row per candidate: heading -> text; columns that nobody fills are left out."""
    updates = [_band(each, "update_time") for each in candidates]
    unit, factor = time_unit([x for band in updates for x in band.ends])

    def text(band: Band, times: float, otherwise: str) -> str:
        if band.value is None:
            return otherwise
        return format_number(times * band.value)

    def spread(band: Band, times: float) -> str:
        if band.low is None:
            return "-"
        high = "?" if band.high is None else format_number(times * band.high)
        return f"{format_number(times * band.low)} to {high}"

    rows = []
    for each, update in zip(candidates, updates, strict=True):
        target = _band(each, "time_to_target")
        floor = _number(each.get("error_floor"))
        rate = _number(each.get("learning_rate_factor"))
        rows.append(
            {
                "protocol": str(each["protocol"]),
                "batch size": str(each.get("batch_size", "-")),
                "learning rate ×": "-" if rate is None else f"{rate:.3g}",
                "s to target": text(target, 1.0, "not reached"),
                "s to target, between": spread(target, 1.0),
                f"{unit} per update": text(update, factor, "unknown"),
                f"{unit} per update, between": spread(update, factor),
                "staleness": text(_band(each, "staleness"), 1.0, "-"),
                "error floor": "-" if floor is None else f"{floor:.3g}",
            }
        )
    empty = [key for key in rows[0] if all(row[key] in ("-", "None") for row in rows)]
    return [{key: value for key, value in row.items() if key not in empty} for row in rows]


def _plots(
    candidates: Sequence[Mapping[str, Any]], chosen: int | None, delay: Mapping[str, Any]
) -> list[Plot]:
    names = _names(candidates)
    figures: list[tuple[Figure | None, str, str, str]] = []
    for key, heading in (
        ("time_to_target", "Predicted time to target"),
        ("update_time", "Time per update"),
    ):
        bands = [_band(each, key) for each in candidates]
        unit, factor = time_unit([x for band in bands for x in band.ends])
        scaled = [
            Band(*(None if x is None else factor * x for x in (band.value, band.low, band.high)))
            for band in bands
        ]
        words = "; ".join(f"{n}: {_seconds(b)}" for n, b in zip(names, bands, strict=True))
        caption = "dots: predicted"
        if any(band.low is not None for band in bands):
            caption += "; bars: where it probably lies"
        if chosen is not None:
            caption += "; the recommended one is a diamond"
        figure = predictions(names, scaled, chosen, f"{heading.lower()} ({unit})")
        figures.append((figure, heading, f"Dots with error bars. {words}.", caption))
    law = str(delay.get("spec", "the fitted law"))
    figures.append(
        (
            _measured(delay, law),
            "Measured times",
            f"Histogram of measured seconds per mini-batch, and the density of {law}.",
            "bars: measured; line: the density of the law fitted to them",
        )
    )
    return drawn(figures)


def _measured(delay: Mapping[str, Any], law: str) -> Figure | None:
    histogram, times = delay.get("histogram"), delay.get("times")
    if histogram is not None:
        counts = np.asarray(histogram["counts"], dtype=np.float64)
        edges = np.asarray(histogram["edges"], dtype=np.float64)
    elif times is not None and len(times):
        values = np.asarray(times, dtype=np.float64)
        values = values[np.isfinite(values)]
        # A few long ones would leave everything else in one bar.
        top = float(np.quantile(values, 0.995)) if values.size > 200 else float(values.max())
        counts, edges = _bins(values[values <= top])
    else:
        return None
    density = delay.get("density")
    curve = None
    if density is not None:
        curve = (
            np.asarray(density["seconds"], dtype=np.float64),
            np.asarray(density["density"], dtype=np.float64),
        )
    return measured_times(edges, counts, curve, law)


def _bins(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Freedman and Diaconis's bins, not too many."""
    low, high = float(values.min()), float(values.max())
    q25, q75 = np.quantile(values, [0.25, 0.75])
    width = 2.0 * float(q75 - q25) / values.size ** (1 / 3)
    number = math.ceil((high - low) / width) if width > 0.0 else 10
    counts, edges = np.histogram(values, bins=max(1, min(_MAX_BINS, number)))
    return counts.astype(np.float64), edges


def _settings(result: Mapping[str, Any], delay: Mapping[str, Any]) -> dict[str, str]:
    """What the plan was made from: plain values of the result."""
    settings = {"delay": str(delay["spec"])} if "spec" in delay else {}
    if delay.get("n") is not None:
        settings["measured times"] = f"{delay['n']:,}"
    left = ("candidates", "delay", "recommendation", "why", "report", "png")
    for key, value in result.items():
        if key not in left and isinstance(value, str | int | float):
            settings[key.replace("_", " ")] = f"{value:g}" if type(value) is float else str(value)
    return settings
