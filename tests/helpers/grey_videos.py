"""Videos whose frames are numbered by their grey."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import imageio_ffmpeg
import numpy as np
from PIL import Image
from torch import Tensor

TICK = Fraction(1, 90_000)


def video(file: Path, frames: int, fps: int = 16) -> Path:
    """Write 32x32 pixels whose frame i is grey 4 i, up to 60 frames; return `file`."""
    if file.suffix != ".gif":
        return timed_video(file, [Fraction(i, fps) for i in range(frames)])
    pictures = [Image.fromarray(grey_HWC(i)) for i in range(frames)]
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=round(1000 / fps))
    return file


def grey_HWC(number: int) -> np.ndarray:
    return np.full((32, 32, 3), 4 * number, dtype=np.uint8)


def timed_video(file: Path, seconds: Sequence[Fraction | float]) -> Path:
    """Write such a video whose frame i is shown from `seconds[i]` on; return `file`."""
    codec, tick = ("ffv1", Fraction(1, 30)) if file.suffix == ".avi" else ("libx264", TICK)
    options = {} if codec == "ffv1" else {"g": "5"}
    with encoder(file, codec, (32, 32), rate=30, options=options) as (stream, write):
        stream.time_base = stream.codec_context.time_base = tick
        for number, second in enumerate(seconds):
            frame = av.VideoFrame.from_ndarray(grey_HWC(number))
            frame.pts, frame.time_base = round(Fraction(second) / tick), tick
            write(frame)
    return file


@contextmanager
def encoder(
    file: Path, codec: str, size: tuple[int, int], pixels: str = "yuv420p", rate: int = 16, **more: Any
) -> Iterator[tuple[Any, Callable[[av.VideoFrame], None]]]:
    """Write a video, `size` its width and height; yields its stream, and what writes a frame."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=rate, **more)
        (stream.width, stream.height), stream.pix_fmt = size, pixels
        yield stream, lambda frame: container.mux(stream.encode(frame))
        container.mux(stream.encode())


def by_ffmpeg(file: Path, fps: float) -> list[int]:
    """Return the numbers of the frames that ffmpeg's own filter gives."""
    grey = f"-vf fps={fps},scale=1:1:flags=area,format=gray -fps_mode passthrough -f rawvideo -"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(file), *grey.split()]
    return [round(grey / 4) for grey in subprocess.run(command, capture_output=True, check=True).stdout]


def numbers(pixels_CFHW: Tensor) -> list[int]:
    """Return the numbers of frames in [-1, 1]."""
    return ((pixels_CFHW.mean((0, 2, 3)) + 1) * 127.5 / 4).round().int().tolist()
