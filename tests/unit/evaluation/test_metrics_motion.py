"""Metrics of clips on values known beforehand, and the warning of a student that moves too little."""

import math

import pytest
import torch
from torch import Tensor

from wandistiller.evaluation.metrics import METRICS, MOTION, SIZE, SPREAD, DrawnBatch, Metric
from wandistiller.evaluation.report import SLOW, slow_motion, strong_colours
from wandistiller.tiny import clips

PROMPTS = [
    "a red circle on a blue background, moving left",
    "a red square on a blue background, standing still",
]


def metric(name: str) -> Metric:
    return next(m for m in METRICS if m.name == name and m.needs != "shapes")


def drawn(pixels_BCFHW: Tensor) -> DrawnBatch:
    """A batch whose latents are its pixels."""
    return DrawnBatch(PROMPTS, pixels_BCFHW, pixels_BCFHW)


def brighter(each: float) -> DrawnBatch:
    """Two clips of five frames, each brighter than the one before."""
    level_F = torch.arange(5) * each
    return drawn(level_F.view(1, 1, 5, 1, 1).expand(2, 3, 5, 4, 4))


@pytest.mark.parametrize("name", [MOTION, "frame_motion"])
def test_motion_is_the_mean_change_from_frame_to_frame(name: str) -> None:
    assert metric(name).compute(brighter(0.125)).tolist() == pytest.approx([0.125] * 2)
    assert metric(name).compute(brighter(0.0)).tolist() == [0, 0]


def test_drift_is_the_way_of_the_mean_colour_from_the_first_to_the_last_frame() -> None:
    assert metric("colour_drift").compute(brighter(0.125)).tolist() == pytest.approx([0.5 * math.sqrt(3)] * 2)


def rendered(speed: float) -> DrawnBatch:
    return drawn(torch.stack([clips.render(prompt, speed=speed) for prompt in PROMPTS]))


@pytest.mark.parametrize("speed", [0.5, 1.0])
def test_the_speed_of_rendered_clips_is_theirs_and_those_that_stand_still_have_none(speed: float) -> None:
    speed_B = metric("speed").compute(rendered(speed))
    assert speed_B[0].item() == pytest.approx(speed) and speed_B[1].isnan()
    assert metric("speed").summary(speed_B, 0)["value"] == pytest.approx(speed)
    whole_B = metric("speed").compute(rendered(1.0))
    assert metric("speed").ratio(speed_B, whole_B, 0)["value"] == pytest.approx(speed)


def test_rendered_clips_are_fully_right_and_slower_ones_move_less() -> None:
    assert metric("fully_right").compute(rendered(1.0)).tolist() == [1, 1]
    slow, whole = (metric("frame_motion").compute(rendered(speed)) for speed in (0.5, 1.0))
    assert slow[0] < 0.8 * whole[0]


@pytest.mark.parametrize(
    ("ratio", "warns"), [(SLOW - 0.01, True), (SLOW, False), (1.2, False), (None, False)]
)
def test_a_student_that_moves_less_than_its_teacher_is_named(ratio: float | None, *, warns: bool) -> None:
    given = {} if ratio is None else {MOTION: {"value": ratio, "low": 0.1, "high": 2.0}}
    lines = slow_motion({"ratio": given})
    assert [("Slow motion" in line and "0.79 (0.1 to 2)" in line) for line in lines] == [True] * warns


@pytest.mark.parametrize(
    ("spread", "size", "named"),
    [(1.09, 1.08, "Strong"), (1.09, 1.05, None), (0.9, 0.93, "Pale"), (0.9, 0.95, None), (None, 1.0, None)],
)
def test_a_student_whose_latents_spread_unlike_its_teacher_s_is_named(
    spread: float | None, size: float, named: str | None
) -> None:
    ratio = {name: {"value": value} for name, value in ((SPREAD, spread), (SIZE, size))}
    lines = strong_colours({"ratio": ratio})
    assert [line.split()[0] for line in lines] == ([f"**{named}"] if named else [])
