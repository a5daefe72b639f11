"""The picture of a memory profile: areas by owner over time, resident memory above, what was done as bands."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from wandistiller.files import atomic

SCALE = 2
"""Drawn so much larger, then reduced: Pillow's own lines have steps."""
WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM, RIBBON = 1500, 520, 92, 330, 96, 50, 22
"""Pixels: a panel and its margins; the ribbon of phases lies above the plot."""
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#9c755f", "#b07aa1", "#bab0ac", "#76b7b2", "#edc948")
PHASES = {"reading the data": ("data", "#8dd3c7"), "the teacher's forward pass": ("teacher", "#80b1d3"),
          "the student's forward pass": ("student", "#fdb462"), "the student's backward pass": ("backward", "#fb8072"),
          "the optimizer's step": ("optimizer", "#b3de69"), "": ("other", "#d9d9d9")}  # fmt: skip
"""What the process says that it does -> how the picture has it; the rest is other."""
TITLES = {"cpu": ("CPU memory", "resident in CPU memory"), "cuda": ("GPU memory", "held by torch's allocator")}
GIB, MIB = 2**30, 2**20


class Axes(NamedTuple):
    """Where a panel's plot lies in the picture, and what its edges stand for."""

    top: int
    """Pixels."""
    seconds: float
    most: float
    """Bytes."""

    def x(self, second: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * second / self.seconds

    def y(self, nbytes: float) -> float:
        return self.bottom - (self.bottom - self.top) * nbytes / self.most

    @property
    def bottom(self) -> int:
        return self.top + HIGH - TOP - BOTTOM


class Pen:
    """Draws in pixels of the finished picture."""

    def __init__(self, high: int, wide: int = WIDE):
        self._image = Image.new("RGB", (wide * SCALE, high * SCALE), "white")
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "lm", fill: str = "#222222") -> None:
        self._draw.text((x * SCALE, y * SCALE), words, fill, self._font(size), anchor)

    def width(self, words: str, size: int = 13) -> float:
        return self._draw.textlength(words, self._font(size)) / SCALE

    def line(self, points: Iterable[tuple[float, float]], fill: str, width: float = 1) -> None:
        self._draw.line(_scaled(points), fill, round(width * SCALE), joint="curve")

    def area(self, points: Iterable[tuple[float, float]], fill: str) -> None:
        self._draw.polygon(_scaled(points), fill)

    def box(self, x: float, y: float, right: float, bottom: float, fill: str) -> None:
        self._draw.rectangle(_scaled([(x, y), (right, bottom)]), fill)

    def save(self, file: Path) -> None:
        with atomic(file) as temporary:
            self._image.reduce(SCALE).save(temporary, format="PNG")

    def _font(self, size: int) -> Any:
        return ImageFont.load_default(size * SCALE)


def _scaled(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x * SCALE, y * SCALE) for x, y in points]


def draw(file: Path, record: dict[str, Any]) -> None:
    """Write the picture of a rank's record, as `rank_R.json` has it: a panel for each kind of memory."""
    places = [place for place in TITLES if place in record]
    pen = Pen(HIGH * len(places))
    for number, place in enumerate(reversed(places)):
        _panel(pen, number * HIGH, record, place)
    pen.save(file)


def _panel(pen: Pen, top: int, record: dict[str, Any], place: str) -> None:
    points, resident = record[place]["owners"], record[place]["resident"]
    owners = [owner for owner in points[0] if owner != "second" and any(p[owner] for p in points)]
    height = max([sum(p[o] for o in owners) for p in points] + [s["bytes"] for s in resident])
    axes = Axes(top + TOP, max(phase["end"] for phase in record["phases"]), 1.05 * height)
    steps = record["steps"]
    pen.text(LEFT, top + 22, f"{TITLES[place][0]} of rank {record['rank']} during steps {steps[0]} to {steps[-1]}", 19)
    _bands(pen, axes, record["phases"])
    _grid(pen, axes)
    below = [0.0] * len(points)
    for owner, colour in zip(owners, COLOURS, strict=False):
        above = [b + p[owner] for b, p in zip(below, points, strict=True)]
        edge = [[(axes.x(p["second"]), axes.y(n)) for p, n in zip(points, side, strict=True)] for side in (above, below)]
        pen.area(edge[0] + edge[1][::-1], colour)
        below = above
    pen.line(((axes.x(s["second"]), axes.y(s["bytes"])) for s in resident), "black", 1.5)
    _legend(pen, axes, points, owners, resident, TITLES[place][1])


def _bands(pen: Pen, axes: Axes, phases: list[dict[str, Any]]) -> None:
    """A ribbon of phases above the plot, with a word where it fits, and lighter bands down through it; the steps above."""
    for phase in phases:
        word, colour = _phase(phase["what"])
        x, right = axes.x(phase["begin"]), axes.x(phase["end"])
        pen.box(x, axes.top - RIBBON, right, axes.top - 2, colour)
        pen.box(x, axes.top, right, axes.bottom, _light(colour))
        if pen.width(word, 12) + 6 < right - x:
            pen.text((x + right) / 2, axes.top - RIBBON / 2 - 1, word, 12, "mm")
    for step in sorted({phase["step"] for phase in phases}):
        begin, end = (pick(axes.x(p[key]) for p in phases if p["step"] == step) for pick, key in ((min, "begin"), (max, "end")))
        pen.line([(begin, axes.top - RIBBON - 20), (begin, axes.bottom)], "#555555")
        pen.text((begin + end) / 2, axes.top - RIBBON - 11, f"step {step}", 13, "mm")


def _phase(what: str) -> tuple[str, str]:
    return next(shown for words, shown in PHASES.items() if what.endswith(words))


def _light(colour: str) -> str:
    """A quarter of it, the rest white."""
    return "#" + "".join(f"{255 - (255 - int(colour[i : i + 2], 16)) // 4:02x}" for i in (1, 3, 5))


def _grid(pen: Pen, axes: Axes) -> None:
    """Both scales, in round numbers."""
    unit, name = (GIB, "GiB") if axes.most >= GIB else (MIB, "MiB")
    for n in _round_numbers(axes.most / unit):
        y = axes.y(n * unit)
        pen.line([(LEFT, y), (WIDE - RIGHT, y)], "#ffffff" if n else "#222222")
        pen.text(LEFT - 8, y, f"{n:g}", 13, "rm")
    pen.text(LEFT - 8, axes.top - RIBBON / 2 - 1, name, 13, "rm")
    for n in _round_numbers(axes.seconds):
        pen.line([(axes.x(n), axes.bottom), (axes.x(n), axes.bottom + 5)], "#222222")
        pen.text(axes.x(n), axes.bottom + 14, f"{n:g}", 13, "mm")
    pen.text((LEFT + WIDE - RIGHT) / 2, axes.bottom + 34, "seconds, without those in which tensors were counted", 13, "mm")


def _round_numbers(most: float) -> list[float]:
    """Four to ten numbers from 0 to at most `most`, in steps of 1, 2 or 5 times a power of ten."""
    step = next(m * 10.0**e for e in range(-9, 12) for m in (1, 2, 5) if most / (m * 10.0**e) <= 9)
    return [round(i * step, 9) for i in range(int(most / step) + 1)]


def _legend(
    pen: Pen, axes: Axes, points: list[dict[str, Any]], owners: list[str], resident: list[dict[str, Any]], line: str
) -> None:
    """Right of the plot: the line, the owners from top to bottom, then the phases; with the most that each took."""
    x, y = WIDE - RIGHT + 22, axes.top
    entries = [(line, "black", max([s["bytes"] for s in resident], default=0))]
    entries += [(owner, colour, max(p[owner] for p in points)) for owner, colour in zip(owners, COLOURS, strict=False)][::-1]
    pen.text(WIDE - 14, y - 16, "at most", 12, "rm", "#777777")
    for number, (words, colour, most) in enumerate(entries):
        pen.box(x, y - (1 if not number else 6), x + 14, y + (1 if not number else 6), colour)
        pen.text(x + 22, y, words)
        pen.text(WIDE - 14, y, amount(most), 13, "rm")
        y += 22
    y += 14
    for what, (word, colour) in PHASES.items():
        pen.box(x, y - 6, x + 14, y + 6, colour)
        pen.text(x + 22, y, f"{word}: {what}" if what else word, 12, "lm", "#555555")
        y += 19


def amount(nbytes: float) -> str:
    """1.23 GiB, 45 MiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.{0 if nbytes >= 10 * MIB else 2}f} MiB"
