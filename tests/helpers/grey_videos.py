"""Videos whose frames are numbered by their grey."""

from pathlib import Path

import numpy as np
from diffusers.utils import export_to_video
from PIL import Image
from torch import Tensor


def video(file: Path, frames: int, fps: int = 16) -> Path:
    """Write 32x32 pixels whose frame i is grey 4 i, up to 60 frames; return `file`."""
    pictures = [Image.fromarray(np.full((32, 32, 3), 4 * i, dtype=np.uint8)) for i in range(frames)]
    if file.suffix == ".gif":
        pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=round(1000 / fps))
    else:
        export_to_video(pictures, str(file), fps=fps)
    return file


def numbers(pixels_CFHW: Tensor) -> list[int]:
    """Return the numbers of frames in [-1, 1]."""
    return ((pixels_CFHW.mean((0, 2, 3)) + 1) * 127.5 / 4).round().int().tolist()
