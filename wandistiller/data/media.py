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
from typing import Any

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
CROP, LETTERBOX = "crop", "letterbox"
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


def load_media(
    path: Path,
    size: Size,
    fps: float,
    background: RGB = WHITE,
    *,
    fit: str = CROP,
    clip: int = 0,
    clips: int = 1,
) -> Tensor:
    """Read an image, or a clip of a video: pixels_CFHW in [-1, 1].

    Of several clips of a video the first begins with its first frame, the last ends with its last one, and
    the others begin evenly between. In a short video they overlap; if it has no frame more than a clip, all
    are the same.

    Args:
        fps: frames a second; a faster video is thinned out to the nearest frames.
        background: colour below the transparent parts, and of bars.
        fit: `crop`: scaled to cover, and cropped in the middle; `letterbox`: all of it, with bars.
        clip: number of the clip, from 0.
        clips: clips of the video, 1 for the first frames alone.

    Raises:
        MediaError: it cannot be read, or is too short.
    """
    fitted: list[np.ndarray] = []
    try:
        for is_exact in (False, True)[: 2 if clip else 1]:
            if len(fitted) < size.num_frames:  # by the length in its header: then it ends before
                begin = _begin(path, size.num_frames, fps, clip / (clips - 1), is_exact) if clip else 0
                with closing(media_frames(path, fps, background, begin)) as frames:
                    taken = islice(frames, size.num_frames)
                    fitted = [np.array(_fit(frame, size, fit, background)) for frame in taken]
    except DepthError as error:
        raise MediaError(str(error)) from None
    except UNREADABLE as error:
        if package := missing_package(path):
            raise MediaError(f"cannot be read: this needs: pip install {package}") from None
        raise MediaError(f"cannot be read: {(str(error).strip() or repr(error)).splitlines()[0]}") from None
    if len(fitted) < size.num_frames:
        raise MediaError(f"has {len(fitted)} frame(s) at {fps:g} a second, the run wants {size.num_frames}")
    return torch.from_numpy(np.stack(fitted)).permute(3, 0, 1, 2) / 127.5 - 1


def _begin(path: Path, num_frames: int, fps: float, part: float, is_exact: bool) -> int:
    """Return the first frame of a clip, among the frames to use; `part` of the way to the last clip.

    Args:
        is_exact: decode the whole video to count its frames, instead of taking its header's word.
    """
    if path.suffix.lower() == ".gif":
        with Image.open(path) as image:
            given_fps, number = _fps_of_gif(image), image.n_frames
    else:
        from imageio_ffmpeg import count_frames_and_secs

        header = _header(path)
        given_fps = header["fps"]
        number = count_frames_and_secs(path)[0] if is_exact else round(header["duration"] * given_fps)
    step = max(1.0, given_fps / fps)
    usable = int((number - 1) / step) + 1
    while round(usable * step) < number:
        usable += 1
    while usable and round((usable - 1) * step) >= number:
        usable -= 1
    return round(part * max(0, usable - num_frames))


def _fit(image: Image.Image, size: Size, fit: str, background: RGB) -> Image.Image:
    """Scale with Lanczos to cover and cut out the middle, or into bars.

    Source of the former: Wan2.2, wan/textimage2video.py, `i2v`.
    """
    width, height = image.size
    scale = (min if fit == LETTERBOX else max)(size.width / width, size.height / height)
    if scale > MOST_ENLARGED:
        raise MediaError(
            f"is {width} x {height} pixels, under 1/{MOST_ENLARGED} of the run's {size.width} x {size.height}"
        )
    if fit == LETTERBOX:
        whole = size.width, size.height
        return ImageOps.pad(image, whole, Image.Resampling.LANCZOS, color=background)
    covering = round(width * scale), round(height * scale)
    image = image.resize(covering, Image.Resampling.LANCZOS)
    left, top = (image.width - size.width) // 2, (image.height - size.height) // 2
    return image.crop((left, top, left + size.width, top + size.height))


def media_frames(path: Path, fps: float, background: RGB = WHITE, begin: int = 0) -> Iterator[Image.Image]:
    """Yield the frames to use of an image or video in RGB, decoded lazily, from number `begin` on."""
    ending = path.suffix.lower()
    if ending not in VIDEOS:
        yield _upright(path, background)
    elif ending == ".gif":
        with Image.open(path) as image:
            for frame in _every(ImageSequence.Iterator(image), _fps_of_gif(image), fps, begin):
                yield to_srgb(frame, background)
    else:
        from imageio_ffmpeg import read_frames  # an extra: `video_problem`

        at, more = 0, {}
        if begin and (given_fps := _header(path)["fps"]):
            at = round(begin * max(1.0, given_fps / fps))
            more = {"input_params": ["-ss", f"{(at - 0.5) / given_fps:.6f}"]}  # half a frame early: rounding
        with closing(read_frames(path, **more)) as frames:
            about = next(frames)
            shown = (Image.frombytes("RGB", about["size"], f) for f in frames)
            yield from _every(shown, about["fps"], fps, begin, at)


def _header(path: Path) -> dict[str, Any]:
    """Read what the head of a video says, such as `fps` and `duration` in seconds."""
    from imageio_ffmpeg import read_frames

    with closing(read_frames(path)) as frames:
        return next(frames)


def _fps_of_gif(image: Image.Image) -> float:
    """Return frames a second by the first frame's time; 0 if it has none."""
    milliseconds = image.info.get("duration", 0)
    return 1000 / milliseconds if milliseconds else 0.0


def _every(
    frames: Iterable[Image.Image], given_fps: float, fps: float, begin: int = 0, at: int = 0
) -> Iterator[Image.Image]:
    """Thin frames out to `fps`: the k-th is frame round(k given_fps / fps), from the k `begin` on.

    Args:
        at: number of the first of `frames`.
    """
    step, taken = max(1.0, given_fps / fps), begin
    for i, frame in enumerate(frames, at):
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


def pixels_depend_on(path: Path, background: RGB, fit: str = CROP) -> list[object]:
    """Return what a medium's pixels depend on but its content, size and rate; nothing for cropped videos."""
    ending, bars = path.suffix.lower(), [LETTERBOX, background] if fit == LETTERBOX else []
    if ending in VIDEOS - {".gif"}:
        return bars
    over = [background] if ending not in OPAQUE and background != WHITE else []
    return ["sRGB", *over, *bars, *filter(None, [missing_package(path)])]


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
