"""Line charts, as SVG that follows a page's colours and width, and as PNG: one geometry for both."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from wandistiller.memory_picture import COLOURS, Pen

WIDE, HIGH = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 30
"""Margins of the plot, in units of the drawing; of the PNG in pixels."""
MOST_POINTS = 400
"""Of a line; more are drawn as means of equal parts."""


class Line(NamedTuple):
    """A named series."""

    name: str
    points: Sequence[tuple[float, float]]
    """(step, value), in order; values that are not finite are left out."""


class Chart(NamedTuple):
    """What is drawn."""

    title: str
    unit: str
    lines: list[Line]
    logarithmic: bool = False
    """Where all values are above 0."""


class Scale(NamedTuple):
    """An axis: values between two ends, and where they lie."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = map(math.log10, (self.low, self.high, value)) if self.logarithmic else (self.low, self.high, value)
        return self.begin + (self.end - self.begin) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round numbers within the ends: 1, 2 or 5 times a power of ten; of a long logarithmic axis the powers alone."""
        if self.logarithmic and self.high / self.low > 4:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) < 4 else (1,)
            return [m * 10.0**p for p in powers for m in steps if self.low <= m * 10.0**p <= self.high]
        span = self.high - self.low
        step = next(m * 10.0**e for e in range(-12, 16) for m in (1, 2, 5) if span / (m * 10.0**e) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [round(i * step, 12) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The finite ones, at most MOST_POINTS: means of parts that follow each other."""
    kept = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    size = -(-len(kept) // MOST_POINTS) or 1
    parts = [kept[i : i + size] for i in range(0, len(kept), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def smooth(points: Sequence[tuple[float, float]], over: int) -> list[tuple[float, float]]:
    """Each value as the mean of the last `over` of them."""
    window, found, total = [], [], 0.0
    for x, y in points:
        if y is None or not math.isfinite(y):
            continue
        window.append(y)
        total += y
        if len(window) > over:
            total -= window.pop(0)
        found.append((x, total / len(window)))
    return found


def _scales(chart: Chart, lines: list[Line]) -> tuple[Scale, Scale]:
    xs, ys = ([p[k] for line in lines for p in line.points] or [0.0, 1.0] for k in (0, 1))
    log = chart.logarithmic and min(ys) > 0
    low, high = (min(ys) / 1.1, max(ys) * 1.1) if log else (min(0.0, *ys), 1.05 * max(ys))
    high = high if high > low else low + 1
    return (Scale(min(xs), max(max(xs), min(xs) + 1), LEFT, WIDE - RIGHT), Scale(low, high, HIGH - BOTTOM, TOP, log))


def _drawn(chart: Chart) -> tuple[list[Line], Scale, Scale]:
    lines = [Line(line.name, thinned(line.points)) for line in chart.lines]
    lines = [line for line in lines if line.points]
    return lines, *_scales(chart, lines)


def svg(chart: Chart) -> str:
    """A figure with its legend; colours are the classes l0, l1, ... of the page."""
    lines, x, y = _drawn(chart)
    parts = [f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(chart.title)}">']
    for tick in y.ticks():
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
                     f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')  # fmt: skip
    parts += [f'<text x="{x(t):.1f}" y="{HIGH - 8}" text-anchor="middle">{t:g}</text>' for t in x.ticks()]
    for number, line in enumerate(lines):
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
        parts.append(f'<polyline class="line l{number % len(COLOURS)}" points="{points}"/>')
    legend = "".join(f'<span class="key k{n % len(COLOURS)}">{escape(line.name)}</span>' for n, line in enumerate(lines))
    return f"<figure><figcaption>{escape(chart.title)}, {escape(chart.unit)}</figcaption>{''.join(parts)}</svg>{legend}</figure>"


def png(chart: Chart, file: Path) -> None:
    """The same as a picture."""
    lines, x, y = _drawn(chart)
    top = 34
    pen = Pen(HIGH + top + 24, WIDE)
    pen.text(LEFT, 18, f"{chart.title}, {chart.unit}", 15)
    for tick in y.ticks():
        pen.line([(LEFT, top + y(tick)), (WIDE - RIGHT, top + y(tick))], "#dddddd")
        pen.text(LEFT - 6, top + y(tick), f"{tick:g}", 12, "rm")
    for tick in x.ticks():
        pen.text(x(tick), top + HIGH - 14, f"{tick:g}", 12, "mm")
    at = float(LEFT)
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x(a), top + y(b)) for a, b in line.points]
        pen.line(points if len(points) > 1 else points * 2, colour, 1.5)
        pen.box(at, top + HIGH + 4, at + 10, top + HIGH + 14, colour)
        pen.text(at + 15, top + HIGH + 9, line.name, 12)
        at += 30 + pen.width(line.name, 12)
    pen.save(file)
