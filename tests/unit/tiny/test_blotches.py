"""Colours that a prompt does not ask for, on pictures made by hand."""

import math

import pytest
import torch
from torch import Tensor

from wandistiller.evaluation.metrics import METRICS, DrawnBatch
from wandistiller.tiny import clips, shapes
from wandistiller.tiny.blotches import are_scenes, have_blotches, off_colour

WHITE = "a white square on a black background, left"
RED_OFF = math.sqrt(6) / 3
"""Distance of (1, 0, 0) from the line of greys, whose nearest is (1/3, 1/3, 1/3)."""


def with_red(pixels_CFHW: Tensor, height: int, width: int, frame: int = 0) -> Tensor:
    """Return a copy with a red patch in one frame."""
    changed = pixels_CFHW.clone()
    changed[:, frame, 20 : 20 + height, 38 : 38 + width] = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    return changed


def picture(prompt: str = WHITE, seed: int | None = None) -> Tensor:
    return shapes.render(prompt, seed)[:, None]


@pytest.mark.parametrize("seed", range(4))
def test_rendered_pictures_and_clips_with_smooth_edges_are_clean(seed: int) -> None:
    for module, prompts in ((shapes, shapes.HELD_OUT[:8]), (clips, clips.HELD_OUT[:8])):
        pixels_BCFHW = torch.stack([module.render(prompt, seed) for prompt in prompts])
        pixels_BCFHW = pixels_BCFHW if pixels_BCFHW.ndim == 5 else pixels_BCFHW[:, :, None]
        distance_BFHW = off_colour(pixels_BCFHW, prompts)
        assert distance_BFHW.max() < 1e-6 and not have_blotches(distance_BFHW).any()


@pytest.mark.parametrize(
    ("height", "width", "is_blotch"),
    [(3, 3, True), (3, 2, True), (2, 2, False), (1, 60 - 38, False)],  # 2 x 2: 4 of 9 pixels, a mean of 0.36
)
def test_a_patch_of_another_colour_is_a_blotch_from_five_pixels_of_a_window_on(
    height: int, width: int, *, is_blotch: bool
) -> None:
    distance_BFHW = off_colour(with_red(picture(), height, width)[None], [WHITE])
    assert have_blotches(distance_BFHW).tolist() == [is_blotch]
    assert distance_BFHW.sum().item() == pytest.approx(height * width * RED_OFF, rel=1e-4)


def test_a_colour_beyond_the_asked_ones_is_as_far_as_the_nearer_of_them() -> None:
    prompt = "a blue square on a purple background, left"
    magenta_13111 = torch.tensor([1.0, 0.1, 0.85]).view(1, 3, 1, 1, 1)  # 0.35 beyond purple
    assert off_colour(magenta_13111, [prompt]).item() == pytest.approx(0.35)


def test_a_blotch_in_one_frame_of_a_clip_counts() -> None:
    prompt = "a white square on a black background, moving left"
    clean = clips.render(prompt)
    clips_BCFHW = torch.stack([clean, with_red(clean, 3, 3, frame=5)])
    assert have_blotches(off_colour(clips_BCFHW, [prompt] * 2)).tolist() == [False, True]


def test_an_evaluation_counts_samples_with_a_blotch_and_has_the_mean_distance() -> None:
    pixels_BCFHW = torch.stack([picture(), with_red(picture(), 4, 4)])
    drawn = DrawnBatch([WHITE] * 2, pixels_BCFHW, pixels_BCFHW)
    blotched, off = (next(m for m in METRICS if m.name == name) for name in ("blotched", "off_colour"))
    assert blotched.summary(blotched.compute(drawn), 0)["count"] == 1
    assert off.compute(drawn).tolist() == pytest.approx([0, 16 * RED_OFF / 64**2], abs=1e-6)


def test_scenes_are_of_a_world_if_their_samples_have_its_size() -> None:
    picture_size, clip_size = (1, 64, 64), (9, 48, 48)
    assert are_scenes(shapes.HELD_OUT, picture_size) and are_scenes(clips.HELD_OUT, clip_size)
    assert not are_scenes(shapes.HELD_OUT, clip_size) and not are_scenes([WHITE, "a cat"], picture_size)
