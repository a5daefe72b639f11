"""Grids of images and clips, read again by other libraries."""

from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

from wandistiller.utils.images import evenly, grid, save_clips, save_frames, tile_size

CLIP_CFHW = torch.linspace(0, 1, 4).view(1, 4, 1, 1).expand(3, 4, 64, 64)
"""Four frames, from black to white."""
ROWS = {"teacher": [CLIP_CFHW, CLIP_CFHW], "student": [CLIP_CFHW, CLIP_CFHW.flip(1)]}
LEFT, TOP, STEP = 91 + 64, 30 + 64, 128 + 6
"""Middle of the first tile, and the way to the next."""


def test_the_frames_of_a_clip_are_a_row_and_those_of_teacher_and_student_come_together(
    tmp_path: Path,
) -> None:
    save_frames(tmp_path / "frames.png", ROWS, ["a circle", "a square"])
    pixels = np.asarray(Image.open(tmp_path / "frames.png"))
    left = 7 * (4 * STEP // 33) + 64
    rows = [[pixels[TOP + STEP * r, left + STEP * f, 0] for f in range(4)] for r in range(4)]
    up = [0, 85, 170, 255]
    assert rows == [up, up, up, up[::-1]]


def test_clips_play_in_step_as_h_264_for_four_seconds(tmp_path: Path) -> None:
    save_clips(tmp_path / "clips.mp4", ROWS, ["a circle", "a square"], fps=8)
    reader = imageio_ffmpeg.read_frames(str(tmp_path / "clips.mp4"))
    about = next(reader)
    width, height = about["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    assert about["codec"] == "h264" and about["pix_fmt"].startswith("yuv420p") and len(frames) == 32
    for k in range(8):
        level = 85 * (k % 4)
        teacher, student = (frames[k][TOP + STEP * r, LEFT + STEP].mean() for r in (0, 1))
        assert abs(teacher - level) < 6 and abs(student - (255 - level)) < 6


@pytest.mark.parametrize(
    ("size", "columns", "widest", "tile"),
    [
        ((64, 64), 2, None, (128, 128)),
        ((48, 48), 8, 1920, (144, 144)),
        ((480, 832), 8, None, (480, 832)),
        ((480, 832), 8, 1920, (111, 192)),  # 8 (192 + 6) = 1920 * 33 / 40
        ((480, 832), 1, 1920, (480, 832)),
    ],
)
def test_tiles_are_whole_multiples_and_only_those_that_do_not_fit_are_smaller(
    size: tuple[int, int], columns: int, widest: int | None, tile: tuple[int, int]
) -> None:
    assert tile_size(*size, columns, widest) == tile


@pytest.mark.parametrize(("width", "columns"), [(48, 10), (101, 3), (832, 8)])
def test_an_mp4_has_even_sides_and_is_no_wider_than_phones_play(
    tmp_path: Path, width: int, columns: int
) -> None:
    clip_CFHW = torch.zeros(3, 2, 50, width, dtype=torch.uint8)
    save_clips(tmp_path / "clips.mp4", {"student": [clip_CFHW] * columns}, [""] * columns, fps=1)
    size = next(imageio_ffmpeg.read_frames(str(tmp_path / "clips.mp4")))["size"]
    assert [side % 2 for side in size] == [0, 0] and size[0] <= 1920


def test_pixels_of_8_bits_are_drawn_as_those_in_0_to_1() -> None:
    bytes_CHW = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(3, -1, -1)
    assert grid({"": [bytes_CHW]}, [""]).tobytes() == grid({"": [bytes_CHW / 255]}, [""]).tobytes()


def test_frames_are_spread_evenly_from_the_first_to_the_last() -> None:
    assert evenly(81, 3) == [0, 40, 80] and evenly(9, 9) == list(range(9))
    assert evenly(5, 9) == [0, 1, 2, 3, 4] and evenly(1, 3) == [0]


@pytest.mark.parametrize(
    ("number", "columns", "rows"),
    [(1, 1, 1), (2, 2, 1), (5, 5, 1), (6, 3, 2), (7, 4, 2), (8, 4, 2), (9, 3, 3), (10, 5, 2), (12, 4, 3)],
)
def test_the_rows_of_a_grid_are_full_where_they_can_be(number: int, columns: int, rows: int) -> None:
    picture = grid({"": [torch.ones(3, 128, 128)] * number}, [""] * number)
    left = 7 * max(13, columns * STEP // 33)
    assert picture.width == left + columns * STEP
    lines = (np.asarray(picture)[:, left + 64].max(1) > 200).astype(int)
    assert (np.diff(lines) == 1).sum() == rows
