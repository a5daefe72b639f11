"""Images and videos as pixels of one size, prepared as Wan does; only frames that are used are decoded."""

import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence
from torch import Tensor

from wandistiller.data.dataset import VIDEOS
from wandistiller.utils.files import digest

UNREADABLE = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""Exceptions of Pillow and imageio-ffmpeg for files they cannot read."""
MOST_ENLARGED = 16
"""Greatest factor by which a picture is enlarged; a sliver would fill gigabytes, a dot is no picture."""
WIDEST = 2.0
"""Greatest aspect ratio of the buckets that are made."""


class MediaError(Exception):
    """The reason why an image or video cannot be used; without its name."""


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels and frames of a training sample."""

    height: int
    width: int
    num_frames: int


def load_media(path: Path, size: Size, fps: float) -> Tensor:
    """Read an image, or the first frames of a video, scaled to cover and cropped: pixels_CFHW in [-1, 1].

    Args:
        fps: frames a second; a faster video is thinned out to the nearest frames.
    Raises:
        MediaError: it cannot be read, or is too short.
    """
    try:
        with closing(media_frames(path, fps)) as frames:
            fitted = [np.array(_fit(frame, size)) for frame in islice(frames, size.num_frames)]
    except UNREADABLE as error:
        raise MediaError(f"cannot be read: {(str(error).strip() or repr(error)).splitlines()[0]}") from None
    if len(fitted) < size.num_frames:
        raise MediaError(f"has {len(fitted)} frame(s) at {fps:g} a second, the run wants {size.num_frames}")
    return torch.from_numpy(np.stack(fitted)).permute(3, 0, 1, 2) / 127.5 - 1


def _fit(image: Image.Image, size: Size) -> Image.Image:
    """Scale to cover, with Lanczos, and cut out the middle. Source: Wan2.2, wan/textimage2video.py, `i2v`."""
    width, height = image.size
    scale = max(size.width / width, size.height / height)
    if scale > MOST_ENLARGED:
        raise MediaError(
            f"is {width} x {height} pixels, under 1/{MOST_ENLARGED} of the run's {size.width} x {size.height}"
        )
    covering = round(width * scale), round(height * scale)
    image = image.convert("RGB").resize(covering, Image.Resampling.LANCZOS)
    left, top = (image.width - size.width) // 2, (image.height - size.height) // 2
    return image.crop((left, top, left + size.width, top + size.height))


def media_frames(path: Path, fps: float) -> Iterator[Image.Image]:
    """Yield the frames to use of an image or video, decoded lazily."""
    ending = path.suffix.lower()
    if ending not in VIDEOS:
        yield _upright(path)
    elif ending == ".gif":
        with Image.open(path) as image:
            milliseconds = image.info.get("duration", 0)
            given_fps = 1000 / milliseconds if milliseconds else 0.0
            yield from _every(ImageSequence.Iterator(image), given_fps, fps)
    else:
        from imageio_ffmpeg import read_frames  # an extra: `video_problem`

        with closing(read_frames(path)) as frames:
            about = next(frames)
            yield from _every((Image.frombytes("RGB", about["size"], f) for f in frames), about["fps"], fps)


def _every(frames: Iterable[Image.Image], given_fps: float, fps: float) -> Iterator[Image.Image]:
    """Thin frames out to `fps`: the k-th is frame round(k given_fps / fps)."""
    step, taken = max(1.0, given_fps / fps), 0
    for i, frame in enumerate(frames):
        if i == round(taken * step):
            taken += 1
            yield frame


def _upright(path: Path) -> Image.Image:
    """Return an image turned as its camera recorded."""
    with Image.open(path) as image:
        if getattr(image, "is_animated", False):
            raise MediaError("is animated; save one picture of it, or the whole as .gif or .mp4")
        return ImageOps.exif_transpose(image).convert("RGB")


def video_problem(path: Path) -> str | None:
    """Return the message that a package for reading videos is missing; None if it is installed."""
    if find_spec("imageio_ffmpeg"):
        return None
    return f"{path}: reading videos needs: pip install imageio imageio-ffmpeg."


def file_fingerprint(path: Path) -> str:
    """Fingerprint a file by path, size and modification time; another one if it changed or is missing."""
    try:
        status = path.stat()
    except OSError:
        return digest(str(path), None)
    return digest(str(path), status.st_size, status.st_mtime_ns)
