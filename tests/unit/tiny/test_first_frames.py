"""The embedded image-to-video teacher: the picture says what is seen, the prompt how it moves."""

import pytest
import torch
from PIL import Image

from wandistiller.data.dataset import read_dataset
from wandistiller.tiny import clips, first_frames, video_scores
from wandistiller.tiny.making.scores import chosen

NAMES = chosen(first_frames.HELD_OUT, 4)


def test_first_frames_are_the_same_for_all_motions() -> None:
    for motion in clips.MOTIONS:
        name = f"a red square on a blue background, {motion}"
        still = first_frames.render("a red square on a blue background, standing still")
        assert torch.equal(first_frames.render(name)[:, 0], still[:, 0])


def test_a_rendered_clip_is_judged_right_and_at_full_speed() -> None:
    clip_BCFHW = torch.stack([first_frames.render(name) for name in NAMES])
    assert all(video_scores.fully_right(clip_BCFHW, NAMES, begins=True))
    speed_B = video_scores.speeds(clip_BCFHW, NAMES, begins=True)
    assert speed_B[~speed_B.isnan()].tolist() == pytest.approx([1.0] * int((~speed_B.isnan()).sum()))
    assert video_scores.flicker(clip_BCFHW, NAMES, begins=True).max() < 1e-6


def test_a_clip_that_stands_still_is_judged_wrong_where_it_should_move() -> None:
    names = [name for name in NAMES if "standing still" not in name]
    still_BCFHW = torch.stack([first_frames.render(name)[:, :1].expand(-1, 9, -1, -1) for name in names])
    assert not any(video_scores.fully_right(still_BCFHW, names, begins=True))


@pytest.mark.parametrize(("data", "names"), [("tiny-i2v", first_frames.SEEN), ("tiny-i2v:held_out", NAMES)])
def test_every_scene_of_a_set_is_a_row_with_its_picture(data: str, names: list[str]) -> None:
    items = list(read_dataset(data, first_frames=True))
    found = [first_frames.NAMES[item.prompt, item.image.name] for item in items]
    assert set(names) <= set(found) and len(set(found)) == len(found)
    assert all(Image.open(item.image).size == (48, 48) for item in items[:5])
