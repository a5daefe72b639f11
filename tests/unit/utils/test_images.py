"""Grids of images and clips, read again by other libraries."""

from pathlib import Path

import imageio_ffmpeg
import numpy as np
import torch
from PIL import Image

from wandistiller.utils.images import save_clips, save_frames

CLIP_CFHW = torch.linspace(0, 1, 4).view(1, 4, 1, 1).expand(3, 4, 64, 64)
"""Four frames, from black to white."""
ROWS = {"teacher": [CLIP_CFHW, CLIP_CFHW], "student": [CLIP_CFHW, CLIP_CFHW.flip(1)]}
LEFT, TOP, STEP = 90 + 64, 30 + 64, 128 + 6
"""Middle of the first tile, and the way to the next."""


def test_the_frames_of_a_clip_are_a_row_and_those_of_teacher_and_student_come_together(
    tmp_path: Path,
) -> None:
    save_frames(tmp_path / "frames.png", ROWS, ["a circle", "a square"])
    pixels = np.asarray(Image.open(tmp_path / "frames.png"))
    rows = [[pixels[TOP + STEP * r, LEFT + STEP * f, 0] for f in range(4)] for r in range(4)]
    up = [0, 85, 170, 255]
    assert rows == [up, up, up, up[::-1]]


def test_clips_play_in_step_as_h_264_for_four_seconds(tmp_path: Path) -> None:
    save_clips(tmp_path / "clips.mp4", ROWS, ["a circle", "a square"], fps=8)
    reader = imageio_ffmpeg.read_frames(str(tmp_path / "clips.mp4"))
    about = next(reader)
    width, height = about["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    assert about["codec"] == "h264" and len(frames) == 32
    for k in range(8):
        level = 85 * (k % 4)
        teacher, student = (frames[k][TOP + STEP * r, LEFT + STEP].mean() for r in (0, 1))
        assert abs(teacher - level) < 6 and abs(student - (255 - level)) < 6
