"""Files of the pictures that are drawn during a run, from pixels known beforehand."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from wandistiller.data.dataset import PromptItem
from wandistiller.training import pictures
from wandistiller.training.pictures import PictureDrawer, Row

PROMPTS = ["a circle", "a square"]
LEVELS = [0, 64, 128, 192, 255]
"""Brightness of the frames of the teacher's clips; the student's go the other way."""


def drawer(frames: int) -> PictureDrawer:
    folder = SimpleNamespace(fps=16, config=SimpleNamespace(takes_image=False))
    job = SimpleNamespace(run=SimpleNamespace(num_frames=frames), folder=folder)
    data = SimpleNamespace(sample_items=[PromptItem(prompt) for prompt in PROMPTS])
    return PictureDrawer(job, data, None, None, None)


def rows(draw: PictureDrawer) -> dict[str, Row]:
    level_F11 = torch.tensor(LEVELS).view(5, 1, 1) / 255
    clip_CFHW = level_F11.expand(3, 5, 128, 128)
    looks = {"teacher": draw._look(clip_CFHW), "student": draw._look(clip_CFHW.flip(1))}
    return {name: Row(*(x[None].expand(2, *x.shape) for x in look)) for name, look in looks.items()}


def test_the_png_of_clips_has_teacher_above_student_in_the_first_middle_and_last_frame(
    tmp_path: Path,
) -> None:
    draw = drawer(5)
    draw._write(tmp_path / "step.png", rows(draw))
    pixels = np.asarray(Image.open(tmp_path / "step.png"))
    assert [pixels[28 + 64 + 134 * r, 90 + 64, 0] for r in range(6)] == [0, 255, 128, 128, 255, 0]
    assert (tmp_path / "step.mp4").is_file()


def test_an_image_is_kept_as_it_was_decoded() -> None:
    pixels_CFHW = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    look = drawer(1)._look(pixels_CFHW)
    assert torch.equal(look.stills, pixels_CFHW) and look.clips.numel() == 0


def test_large_clips_are_kept_as_small_as_they_play() -> None:
    look = drawer(5)._look(torch.zeros(3, 5, 480, 1200))
    assert look.stills.shape == (3, 3, 480, 1200)
    assert look.clips.shape == (3, 5, 314, 786) and look.clips.dtype == torch.uint8


def test_without_its_libraries_the_png_comes_alone_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pictures, "can_write_mp4", lambda: False)
    monkeypatch.setattr(logging.getLogger("wandistiller"), "propagate", True)
    caplog.set_level(logging.INFO, "wandistiller")
    draw = drawer(5)
    for step in (1, 2):
        draw._write(tmp_path / f"{step}.png", rows(draw))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["1.png", "2.png"]
    assert caplog.text.count("pip install av") == 1


def test_the_png_comes_last_as_it_says_that_all_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(pictures, "save_clips", full)
    draw = drawer(5)
    with pytest.raises(OSError, match="no space"):
        draw._write(tmp_path / "step.png", rows(draw))
    assert not (tmp_path / "step.png").exists()
