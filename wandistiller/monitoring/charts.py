"""Parts of reports: line charts as SVG, drawn by matplotlib, and pages as jinja2 templates."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

INCHES = (4.8, 2.6)
"""Small, so that the letters can be read on a phone, whose width a chart fills."""
MOST_POINTS = 400
"""Points of a line; more are drawn as means of equal parts."""
STYLE = {
    "font.size": 8,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "svg.hashsalt": "wandistiller",
}


class Line(NamedTuple):
    """A named series of points."""

    name: str
    points: Sequence[tuple[float, float | None]]
    """(step, value), in order; values that are None or not finite are left out."""


class Chart(NamedTuple):
    """A figure of lines over the step, or over sigma."""

    title: str
    unit: str
    lines: list[Line]
    logarithmic: bool = False
    """Only where all values are above 0."""


def svg(chart: Chart) -> bytes:
    """Draw a chart with its title, axes and legend; the same chart gives the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(INCHES, layout="constrained")
        axes = figure.subplots()
        for line in chart.lines:
            points = thinned(line.points)
            mark = "o" if len(points) == 1 else ""  # one point alone is no line
            axes.plot(*zip(*points, strict=True), label=line.name, marker=mark, markersize=3)
        values = [y for line in chart.lines for _, y in finite(line.points)]
        if chart.logarithmic and min(values) > 0:
            axes.set_yscale("log")
        elif min(values) >= 0:
            axes.set_ylim(bottom=0)
        axes.set_title(f"{chart.title}\n{chart.unit}", loc="left", fontweight="bold")
        axes.margins(x=0.01)
        if len(chart.lines) > 1:
            axes.legend(fontsize=7, loc="best")
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()


def finite(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Reduce the finite points to at most MOST_POINTS: means of parts that follow each other."""
    points = finite(points)
    size = -(-len(points) // MOST_POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def smooth(points: Sequence[tuple[float, float | None]], window: int) -> list[tuple[float, float]]:
    """Replace each finite value by the mean of the last `window` of them."""
    if not (points := finite(points)):
        return []
    x_N, y_N = np.array(points).T
    # each sum anew: a running one would keep the rounding of one large value
    sum_N = np.convolve(y_N, np.ones(window))[: len(points)]
    mean_N = sum_N / np.minimum(np.arange(len(points)) + 1, window)
    return list(zip(x_N.tolist(), mean_N.tolist(), strict=True))


def render(file: Path, **values: Any) -> str:
    """Fill the template in `file`; in HTML all values are escaped."""
    environment = Environment(
        loader=FileSystemLoader(file.parent),
        autoescape=".html" in file.suffixes,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(file.name).render(values)
