"""Checks whether a student of few steps goes wrong, which its loss does not show, with remedies."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wandistiller.monitoring.metrics import read_lines, write_lines

WINDOW = 20
"""Steps of a mean, and of the start of a run, with which later ones are compared."""
WARMED_UP = 50
"""Steps after which the critic should know the student's samples."""
LAGS = 0.9
"""The critic's squared error over the teacher's at the student's samples; at 1 it knows no more of them."""
GROWN, JUMPED = 1.2, 5.0
"""Times the gradient's mean at the start; times the usual norm of the student's gradient."""
SATURATED, COLLAPSED, SLOW = 1.15, 0.6, 0.8
"""Deviation of the samples over what it should be; distance of two seeds, and motion, over the teacher's."""
Alarm = tuple[str, str]
"""Kind and text of an alarm."""


class SampleStats(NamedTuple):
    """Statistics of sampled latents, averaged over prompts."""

    deviation: float
    """Standard deviation of the elements."""
    motion: float
    """Mean absolute difference of neighbouring latent frames; 0 of images."""
    distance: float
    """Root mean square difference of two samples of one prompt; 0 if there is one sample."""


def sample_stats(x0_BCFHW: Tensor, other_BCFHW: Tensor | None = None) -> Tensor:
    """Return the numbers of SampleStats for each sample, float32, [B, 3].

    Args:
        other_BCFHW: samples of the same prompts from other noise.
    """
    x0_BCFHW = x0_BCFHW.float()
    deviation_B = x0_BCFHW.flatten(1).std(1)
    motion_B = distance_B = torch.zeros_like(deviation_B)
    if x0_BCFHW.shape[2] > 1:
        motion_B = x0_BCFHW.diff(dim=2).abs().flatten(1).mean(1)
    if other_BCFHW is not None:
        distance_B = (x0_BCFHW - other_BCFHW.float()).square().flatten(1).mean(1).sqrt()
    return torch.stack([deviation_B, motion_B, distance_B], 1)


def write_stats(file: Path, step: int, stats: dict[str, SampleStats]) -> None:
    """Write the statistics of samples after `step` steps, in place of earlier ones of that step.

    Args:
        stats: by row: teacher, student.
    """
    columns = zip(SampleStats._fields, zip(*stats.values(), strict=True), strict=True)
    values = {name: dict(zip(stats, of, strict=True)) for name, of in columns if any(of)}
    others = [line for line in read_lines(file) if line["step"] != step]
    write_lines(file, [*others, {"step": step, **values}])


class HealthChecks:
    """Compares what is watched in each step with the start of the run, and samples with the teacher's."""

    def __init__(self) -> None:
        self._start: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self._norms: deque[float] = deque(maxlen=10 * WINDOW)
        self._last_exit = -1.0

    def go_on_from(self, lines: list[dict[str, Any]]) -> None:
        """Take the start of the run from its lines of metrics.jsonl."""
        for line in lines[:WINDOW]:
            self._add(line.get("watched", {}))

    def step(self, step: int, watched: dict[str, float], grad_norm: float | None) -> Iterator[Alarm]:
        """Check a step, counted from 1, of an objective with a critic; others have nothing to check."""
        if not watched:
            return
        self._add(watched)
        if step > WARMED_UP + WINDOW and min(self._last["critic_share"]) > LAGS:
            yield (
                "critic lags",
                f"The critic knows the student's samples hardly better than the teacher does: its squared "
                f"error was over {LAGS} of the teacher's in {WINDOW} steps. Give it more `critic_updates` or "
                "a higher `critic_lr`, or let it follow: `critic_follows` 0.03.",
            )
        if (grown := self._grown("gradient")) > GROWN:
            yield (
                "critic diverges",
                f"The gradient that moves the samples has grown to {grown:.2f} times its start. Lower the "
                "student's `lr`, from an earlier checkpoint.",
            )
        if (grown := self._grown("deviation")) > SATURATED:
            yield "saturation", _saturated(grown, "at the start of the run")
        yield from self._jump(grad_norm)

    def _jump(self, grad_norm: float | None) -> Iterator[Alarm]:
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
        """Check the student's samples against the teacher's of the same prompts."""
        if teacher.deviation and (ratio := student.deviation / teacher.deviation) > SATURATED:
            yield "saturation", _saturated(ratio, "of the teacher's")
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

    def _add(self, watched: dict[str, float]) -> None:
        watched = {name: value for name, value in watched.items() if value is not None}  # null if not finite
        if (exit_ := watched.get("exit", -1.0)) > self._last_exit:
            self._last_exit = exit_
            for kept in (self._start, self._last):  # samples of earlier exits are blurred
                kept.pop("deviation", None)
        elif exit_ < self._last_exit:
            watched.pop("deviation", None)
        for name, value in watched.items():
            start = self._start.setdefault(name, [])
            if len(start) < WINDOW:
                start.append(value)
            self._last.setdefault(name, deque(maxlen=WINDOW)).append(value)

    def _grown(self, name: str) -> float:
        """Return the mean of the last steps over that of the first."""
        start = self._start.get(name, [])
        return mean(self._last[name]) / mean(start) if len(start) == WINDOW and mean(start) else 0.0


def _saturated(ratio: float, of: str) -> str:
    return (
        f"The samples' latents spread {ratio:.2f} times as far as those {of}: colours saturate. Lower "
        "`guidance_scale` by 1 or the student's `lr`, or add `consistency` to the objective."
    )
