"""Images and videos as pixels of one size, prepared as Wan does; only frames that are used are decoded."""

import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence, features
from torch import Tensor

from wandistiller.data.colours import RGB, WHITE, DepthError, to_srgb
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
PLUGINS = {
    ".heic": ("pillow_heif", "pillow-heif"),
    ".heif": ("pillow_heif", "pillow-heif"),
    ".jxl": ("pillow_jxl", "pillow-jxl-plugin"),
}
"""Modules that add a format to Pillow, by the file's ending, and the packages that have them."""
OPAQUE = {".jpg", ".jpeg", ".jpe", ".jfif", ".ppm", ".pgm"}
MOST_ENLARGED = 16
"""Greatest factor by which a picture is enlarged; a sliver would fill gigabytes, a dot is no picture."""
ORIENTATION = 0x0112  # of EXIF
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


def load_media(path: Path, size: Size, fps: float, background: RGB = WHITE) -> Tensor:
    """Read an image, or the first frames of a video, scaled to cover and cropped: pixels_CFHW in [-1, 1].

    Args:
        fps: frames a second; a faster video is thinned out to the nearest frames.
        background: colour below the transparent parts.

    Raises:
        MediaError: it cannot be read, or is too short.
    """
    try:
        with closing(media_frames(path, fps, background)) as frames:
            fitted = [np.array(_fit(frame, size)) for frame in islice(frames, size.num_frames)]
    except DepthError as error:
        raise MediaError(str(error)) from None
    except UNREADABLE as error:
        if package := missing_package(path):
            raise MediaError(f"cannot be read: this needs: pip install {package}") from None
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
    image = image.resize(covering, Image.Resampling.LANCZOS)
    left, top = (image.width - size.width) // 2, (image.height - size.height) // 2
    return image.crop((left, top, left + size.width, top + size.height))


def media_frames(path: Path, fps: float, background: RGB = WHITE) -> Iterator[Image.Image]:
    """Yield the frames to use of an image or video in RGB, decoded lazily."""
    ending = path.suffix.lower()
    if ending not in VIDEOS:
        yield _upright(path, background)
    elif ending == ".gif":
        with Image.open(path) as image:
            milliseconds = image.info.get("duration", 0)
            given_fps = 1000 / milliseconds if milliseconds else 0.0
            for frame in _every(ImageSequence.Iterator(image), given_fps, fps):
                yield to_srgb(frame, background)
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


def _upright(path: Path, background: RGB) -> Image.Image:
    """Return an image turned as its camera recorded."""
    with opened(path) as image:
        # a .jpg of format MPO has previews or a second eye behind its picture
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise MediaError("is animated; save one picture of it, or the whole as .gif or .mp4")
        shown = to_srgb(image, background)
        shown.getexif()[ORIENTATION] = image.getexif().get(ORIENTATION, 1)
        return ImageOps.exif_transpose(shown)


def opened(path: Path) -> Image.Image:
    """Open an image with the plug-in that its ending needs, if that is installed."""
    module, _ = PLUGINS.get(path.suffix.lower(), ("", ""))
    if module and find_spec(module):
        plugin = import_module(module)
        if module == "pillow_heif":
            plugin.register_heif_opener()
    return Image.open(path)


def missing_package(path: Path) -> str | None:
    """Return the package to install for a format that Pillow does not read here; None if it reads it."""
    ending = path.suffix.lower()
    if ending == ".avif":
        return None if features.check("avif") else "--upgrade pillow"
    module, package = PLUGINS.get(ending, ("", None))
    return None if module and find_spec(module) else package


def pixels_depend_on(path: Path, background: RGB) -> list[object]:
    """Return what a medium's pixels depend on but its content, size and rate; nothing for videos."""
    ending = path.suffix.lower()
    if ending in VIDEOS - {".gif"}:
        return []
    over = [background] if ending not in OPAQUE and background != WHITE else []
    return ["sRGB", *over, *filter(None, [missing_package(path)])]


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
