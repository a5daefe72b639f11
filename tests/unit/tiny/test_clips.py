"""The world of clips and its judge, in closed form: no network is opened here."""

import pytest
import torch
from slow_cases import slow_but

from wandistiller.tiny import clips, video_scores
from wandistiller.tiny.making.scores import chosen
from wandistiller.tiny.making.text import all_wordings
from wandistiller.tiny.making.worlds import WORLDS

PROMPTS = chosen(clips.HELD_OUT, 8)
MOVING = [prompt for prompt in PROMPTS if clips.SPECS[prompt].motion != clips.STILL]


def rendered(prompts: list[str], seed: int | None = None, *, speed: float = 1.0) -> torch.Tensor:
    return torch.stack([clips.render(prompt, seed, speed=speed) for prompt in prompts])


def test_one_scene_in_ten_is_held_out() -> None:
    seen, held_out = set(clips.SEEN), set(clips.HELD_OUT)
    assert (len(seen), len(held_out), len(seen & held_out)) == (837, 93, 0)


def test_no_training_batch_and_no_wording_of_training_has_a_held_out_scene() -> None:
    world = WORLDS["video"]
    assert set(world.seen).isdisjoint(clips.HELD_OUT)
    assert set(all_wordings(world)).isdisjoint(
        clips.SPECS[prompt].worded(template)
        for prompt in clips.HELD_OUT
        for template in range(len(clips.TEMPLATES))
    )
    own_BCFHW = world.batch(6, torch.Generator().manual_seed(0))
    assert set(video_scores.nearest((own_BCFHW + 1) / 2)) <= set(world.seen)


@pytest.mark.parametrize("attribute", clips.ATTRIBUTES)
def test_every_attribute_of_held_out_scenes_is_seen(attribute: str) -> None:
    names = {getattr(clips.SPECS[prompt], attribute) for prompt in clips.SEEN}
    assert names == set(clips.ATTRIBUTES[attribute])


def test_a_clip_starts_and_ends_half_its_way_from_the_middle() -> None:
    cover_FHW = clips.cover("square", "moving left")
    pixel_W = torch.arange(clips.CLIP_SIZE) + 0.5
    centre_F = (cover_FHW.sum(1) @ pixel_W) / cover_FHW.sum((1, 2))
    expected_F = torch.linspace(32.0, 16.0, clips.FRAMES)
    torch.testing.assert_close(centre_F, expected_F, atol=0.02, rtol=0)


def test_distances_are_those_to_rendered_clips() -> None:
    noisy_BCFHW = (rendered(PROMPTS[:2], 3) + 0.1 * torch.randn(2, 3, 9, 48, 48)).clamp(0, 1)
    all_NCFHW = rendered(list(clips.SPECS)[::31])
    expected_BN = (noisy_BCFHW[:, None].double() - all_NCFHW).square().sum((2, 3, 4, 5))
    distance_BN = video_scores.squared_distances(noisy_BCFHW)[:, ::31]
    torch.testing.assert_close(distance_BN, expected_BN, atol=1e-3, rtol=1e-6)


@pytest.mark.slow
def test_the_nearest_candidate_of_each_canonical_clip_is_its_prompt() -> None:
    for prompts in (list(clips.SPECS)[start::10] for start in range(10)):
        assert video_scores.nearest(rendered(prompts)) == prompts


@pytest.mark.slow
def test_every_jittered_clip_is_judged_right() -> None:
    for prompts in (list(clips.SPECS)[start::10] for start in range(10)):
        assert all(video_scores.fully_right(rendered(prompts, 7), prompts))


@pytest.mark.parametrize("word", ["colour", "shape", "background", "motion"])
def test_a_clip_that_differs_in_one_attribute_is_judged_wrong(word: str) -> None:
    own = clips.ClipScene("red", "square", "blue", "moving left")
    change = {"colour": "green", "shape": "cross", "background": "black", "motion": "moving right"}[word]
    names = [change if name == word else getattr(own, name) for name in clips.ATTRIBUTES]
    assert video_scores.fully_right(rendered([str(clips.ClipScene(*names))]), [str(own)]) == [False]


@pytest.mark.parametrize("speed", slow_but([0.5, 1.5], [0.0, 0.5, 1.0, 1.5]))
def test_the_fitted_speed_is_the_rendered_one(speed: float) -> None:
    assert video_scores.speeds(rendered(MOVING, speed=speed), MOVING).tolist() == pytest.approx(
        [speed] * len(MOVING)
    )


def test_jitter_does_not_look_like_speed() -> None:
    speed_B = video_scores.speeds(rendered(MOVING, 5), MOVING)
    assert (speed_B - 1).abs().max() < 0.13
    assert (speed_B.mean() - 1).abs() < 0.03


def test_a_scene_that_stands_still_has_no_speed() -> None:
    prompt = "a red circle on a blue background, standing still"
    assert video_scores.speeds(rendered([prompt]), [prompt]).isnan().all()


def test_flicker_is_the_mean_change_of_added_noise() -> None:
    noise_BCFHW = torch.randn(4, 3, 9, 48, 48, generator=torch.Generator().manual_seed(0))
    clip_BCFHW = rendered(PROMPTS[:4])
    for scale in (0.01, 0.05):
        flicker_B = video_scores.flicker(clip_BCFHW + scale * noise_BCFHW, PROMPTS[:4])
        # the difference of two normal numbers has a mean absolute value of 2 / sqrt(pi) standard deviations
        expected = scale * 2 / torch.pi**0.5
        assert flicker_B.tolist() == pytest.approx([expected] * 4, rel=0.02)


def test_noise_that_stays_the_same_is_no_flicker() -> None:
    constant_BC1HW = 0.05 * torch.randn(2, 3, 1, 48, 48, generator=torch.Generator().manual_seed(0))
    assert video_scores.flicker(rendered(PROMPTS[:2]) + constant_BC1HW, PROMPTS[:2]).max() < 1e-6
