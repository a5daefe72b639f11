"""Checks whether a student of few steps goes wrong, which its loss does not show, with remedies."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from wandistiller.monitoring.metrics import MetricsLine, finite_or_none, read_lines, write_lines
from wandistiller.objectives.base import SATURATION, Limit
from wandistiller.tiny.blotches import have_blotches, off_colour

WINDOW = 20
"""Steps of a mean, and of the start of a run, with which later ones are compared."""
FIRST = 4 * WINDOW
"""Steps at the start of a run whose eighth of largest numbers says which numbers are large."""
WARMED_UP = 50
"""Steps after which numbers of an objective should have left their start."""
JUMPED = 5.0
"""Times the usual norm of the student's gradient."""
SATURATED, COLLAPSED, SLOW = 1.15, 0.6, 0.8
"""Deviation of the samples over what it should be; distance of two seeds, and motion, over the teacher's."""
PALE, GARISH = 0.6, 1.6
"""Contrast of the student's pictures over the teacher's."""
LEAST_SPREAD, MOST_SPREAD = 0.94, 1.06
"""Spread and size of samples over the teacher's, within which one of them should be."""
FADED = (
    "The samples' latents spread {value:.2f} times as far as the teacher's: colours fade. Train for more "
    "updates, or raise `guidance_scale` by 0.5."
)
PATCH_PX = 8
"""Height and width of the windows of local contrast."""
Alarm = tuple[str, str]
"""Kind and text of an alarm."""


class SampleStats(NamedTuple):
    """Statistics of samples, averaged over prompts; NaN where there is none."""

    deviation: float
    """Standard deviation of the latents' elements."""
    motion: float = math.nan
    """Mean absolute difference of neighbouring latent frames; none of images."""
    distance: float = math.nan
    """Root mean square difference of the latents of two samples of one prompt; none of one sample."""
    size: float = math.nan
    """Mean absolute value of the latents' elements."""
    contrast_spread: float = math.nan
    """Of the pictures, as of `colour_stats`, and the two after it."""
    contrast: float = math.nan
    saturation: float = math.nan
    off_colour: float = math.nan
    """Mean distance of pixels from the two colours that the prompt asks for; of the embedded worlds alone."""
    blotched: float = math.nan
    """Share of samples with a blotch of another colour in any frame; of the embedded worlds alone."""


def after_given(x0_BCFHW: Tensor, frames: int) -> Tensor:
    """Return the latent frames after those that a model is given, if there are two for a motion; else all."""
    return x0_BCFHW[:, :, frames:] if x0_BCFHW.shape[2] - frames > 1 else x0_BCFHW


def sample_stats(x0_BCFHW: Tensor, other_BCFHW: Tensor | None = None, given_frames: int = 0) -> Tensor:
    """Return the first numbers of SampleStats for each sample, those of latents, float32, [B, 4].

    Args:
        other_BCFHW: samples of the same prompts from other noise.
        given_frames: latent frames at the start that the model is given, which count for no motion.
    """
    x0_BCFHW = x0_BCFHW.float()
    deviation_B = x0_BCFHW.flatten(1).std(1)
    motion_B = distance_B = torch.full_like(deviation_B, torch.nan)
    if x0_BCFHW.shape[2] > 1:
        motion_B = after_given(x0_BCFHW, given_frames).diff(dim=2).abs().flatten(1).mean(1)
    if other_BCFHW is not None:
        distance_B = (x0_BCFHW - other_BCFHW.float()).square().flatten(1).mean(1).sqrt()
    return torch.stack([deviation_B, motion_B, distance_B, x0_BCFHW.abs().flatten(1).mean(1)], 1)


def picture_stats(pixels_BCFHW: Tensor, names: Sequence[str] | None) -> Tensor:
    """Return the other numbers of SampleStats for each sample, those of pictures, float32, CPU, [B, 5].

    Args:
        pixels_BCFHW: in [0, 1].
        names: of the samples' scenes; None: they are of no embedded world.
    """
    colours_BK = colour_stats(pixels_BCFHW)
    colour_B = blotched_B = torch.full_like(colours_BK[:, 0], torch.nan)
    if names is not None:
        distance_BFHW = off_colour(pixels_BCFHW, names)
        colour_B, blotched_B = distance_BFHW.flatten(1).mean(1), have_blotches(distance_BFHW).float()
    return torch.cat([colours_BK, colour_B[:, None], blotched_B[:, None]], 1)


def colour_stats(pixels_BCFHW: Tensor) -> Tensor:
    """Return spread of local contrast, contrast and saturation, means over frames, on the CPU, [B, 3].

    Contrast is the standard deviation of a frame's pixels, local contrast the root mean square over channels
    of that in windows of PATCH_PX, of which the spread is the deviation over a frame. Saturation is the
    distance of a pixel's largest channel from its smallest, a mean over pixels.
    """
    of_frames = []
    for frame_BCHW in pixels_BCFHW.detach().unbind(2):  # one at a time: a clip of 720p has 900 MB
        mean_BCHW, square_BCHW = (avg_pool2d(x.float(), PATCH_PX) for x in (frame_BCHW, frame_BCHW.square()))
        contrast_BHW = (square_BCHW - mean_BCHW.square()).clamp(min=0).mean(1).sqrt()
        frame_BCHW = frame_BCHW.float()
        deviations = (x.flatten(1).std(1, correction=0) for x in (contrast_BHW, frame_BCHW))
        saturation_BHW = frame_BCHW.amax(1) - frame_BCHW.amin(1)
        of_frames.append(torch.stack([*deviations, saturation_BHW.flatten(1).mean(1)], 1))
    return torch.stack(of_frames).mean(0).cpu()


def nearer_to_1(spread: float, size: float) -> float:
    """Return the ratio of latents to the teacher's that is nearer to 1: colours are off where both are."""
    return min(spread, size, key=lambda ratio: abs(ratio - 1))


def write_stats(file: Path, step: int, stats: dict[str, SampleStats]) -> None:
    """Write the statistics of a step's samples, by row (teacher, student), in place of its earlier ones."""
    columns = zip(SampleStats._fields, zip(*stats.values(), strict=True), strict=True)
    values = {
        name: finite_or_none(dict(zip(stats, of_rows, strict=True)))
        for name, of_rows in columns
        if not all(map(math.isnan, of_rows))
    }
    others = [line for line in read_lines(file) if line["step"] != step]
    write_lines(file, [*others, {"step": step, **values}])


class HealthChecks:
    """Compares an objective's numbers in each step with its limits, and samples with the teacher's."""

    def __init__(self, limits: Sequence[Limit] = ()) -> None:
        self._limits = limits
        self._spread: float | None = None
        """Of the samples drawn before, over the teacher's."""
        self._contrast: float | None = None
        """Of the pictures drawn before, over the teacher's."""
        self._start: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self._norms: deque[float] = deque(maxlen=10 * WINDOW)
        self._first: dict[str, list[tuple[float, float]]] = {}
        """Of the first steps, by number: that which it is compared within, and itself."""

    def go_on_from(self, lines: list[MetricsLine]) -> None:
        """Take the numbers of a run's earlier steps from its lines of metrics.jsonl."""
        for line in lines:
            if watched := line.get("watched"):
                self._add(watched)
                if (norm := line.get("grad_norm")) is not None:
                    self._norms.append(norm)

    def step(self, step: int, watched: dict[str, float], grad_norm: float | None) -> Iterator[Alarm]:
        """Check a step, counted from 1, of an objective with numbers; others have nothing to check."""
        if not watched:
            return
        self._add(watched)
        for limit in self._limits:
            value = self._grown(limit) if limit.grows else self._surely(limit.number, step)
            if value > limit.most:
                yield limit.alarm, limit.text.format(value=value, most=limit.most, window=WINDOW)
        if grad_norm is None:
            return
        usual = median(self._norms) if len(self._norms) >= 2 * WINDOW else 0.0
        self._norms.append(grad_norm)
        if grad_norm > JUMPED * usual > 0:
            yield (
                "student jumps",
                f"The student's gradient norm is {grad_norm:.3g}, {grad_norm / usual:.0f} times the usual. "
                "If that recurs, lower its `lr`.",
            )

    def samples(self, teacher: SampleStats, student: SampleStats) -> Iterator[Alarm]:
        """Check samples of the student against the teacher's of the same prompts."""
        yield from self._colours(teacher, student)
        if teacher.contrast:
            now, before = student.contrast / teacher.contrast, self._contrast
            self._contrast = now
            if before is not None and (now < PALE and now <= before or now > GARISH and now >= before):
                yield (
                    "contrast",
                    f"The student's pictures have {now:.2f} times the contrast of the teacher's. Look at the "
                    "samples; a lower learning rate, `ema`, or another guidance_scale may help.",
                )
        if teacher.distance and (ratio := student.distance / teacher.distance) < COLLAPSED:
            yield (
                "collapse",
                f"Two seeds of one prompt differ by {ratio:.2f} of what the teacher's do: variety is lost. "
                "Add `consistency` to the objective, train for fewer steps, or go back to an earlier "
                "checkpoint.",
            )
        if teacher.motion and (ratio := student.motion / teacher.motion) < SLOW:
            yield (
                "slow motion",
                f"The student's frames change by {ratio:.2f} of what the teacher's do. More sampling steps, "
                "a larger `shift`, or `consistency` in the objective help.",
            )

    def _colours(self, teacher: SampleStats, student: SampleStats) -> Iterator[Alarm]:
        """Check the spread and the size of latents, by that which is nearer to the teacher's."""
        if not (teacher.deviation and teacher.size):
            return
        now = nearer_to_1(student.deviation / teacher.deviation, student.size / teacher.size)
        before, self._spread = self._spread, now
        goes_away = before is not None and abs(now - 1) >= abs(before - 1)
        is_of_few_steps = not math.isnan(student.distance)
        if now > SATURATED or now > MOST_SPREAD and goes_away and is_of_few_steps:
            yield "saturation", SATURATION.format(value=now, of="of the teacher's")
        elif now < LEAST_SPREAD and goes_away and is_of_few_steps:
            yield "faded", FADED.format(value=now)

    def _add(self, watched: Mapping[str, float | None]) -> None:
        # not finite: null in metrics.jsonl
        watched = {n: value for n, value in watched.items() if value is not None and math.isfinite(value)}
        for limit in self._limits:
            if limit.within:
                self._restrict(limit, watched)
        for name, value in watched.items():
            self._keep(name, value)

    def _keep(self, name: str, value: float) -> None:
        start = self._start.setdefault(name, [])
        if len(start) < WINDOW:
            start.append(value)
        self._last.setdefault(name, deque(maxlen=WINDOW)).append(value)

    def _restrict(self, limit: Limit, watched: dict[str, float]) -> None:
        """Leave a number out of a step in which that which it is compared within is not large.

        It is a mean over the parts of a step, which equals its largest by chance only.
        """
        value, within = watched.pop(limit.number, None), watched.get(limit.within)
        if value is None or within is None:
            return
        first = self._first.setdefault(limit.number, [])
        if new := len(first) < FIRST:
            first.append((within, value))
            if len(first) < FIRST:
                return
        large = sorted(among for among, _ in first)[-FIRST // 8]
        for among, number in first if new else [(within, value)]:
            if among >= large:
                self._keep(limit.number, number)

    def _surely(self, name: str, step: int) -> float:
        """Return how far a number's last mean is from 0, less two standard errors; 0 while a run warms up."""
        last = self._last.get(name, ())
        if step <= WARMED_UP + WINDOW or len(last) < WINDOW:
            return 0.0
        return abs(mean(last)) - 2 * stdev(last) / math.sqrt(WINDOW)

    def _grown(self, limit: Limit) -> float:
        """Return the mean of a number's last steps over that of the first; 0 where that does not count."""
        start = self._start.get(limit.number, [])
        if len(start) < WINDOW or not mean(start):
            return 0.0
        now = mean(self._last[limit.number])
        return now / mean(start) if now > limit.beyond else 0.0
