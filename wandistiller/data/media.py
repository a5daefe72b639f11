"""Images and videos as pixels of one size, prepared as Wan does."""

import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from wandistiller.data.colours import RGB, WHITE, coded_colours_problem, to_srgb
from wandistiller.data.lines import VIDEOS
from wandistiller.data.videos import read_frames
from wandistiller.utils import files

UNREADABLE = (
    *(ArithmeticError, EOFError, LookupError, OSError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""Exceptions of Pillow, and of videos, for files that cannot be read."""
FORMATS = "PNG JPEG MPO WEBP BMP DIB TIFF AVIF JPEG2000 TGA PPM GIF".split()
"""Pillow's names of the formats that are opened, whatever a file's ending. Of the others PostScript starts a
program, Ghostscript."""
MOST_ENLARGED = 16
"""Greatest factor by which a picture is enlarged; a sliver would fill gigabytes, a dot is no picture."""
ORIENTATION = 0x0112  # of EXIF
CROP, LETTERBOX = "crop", "letterbox"
WIDEST = 2.0
"""Greatest aspect ratio of the buckets that are made."""


class MediaError(Exception):
    """The reason why an image or video cannot be used; without its name."""

    passing = False
    """True if the system refused to read it, or it is away: the next run may be able to read it."""


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels and frames of a training sample."""

    height: int
    width: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Settings by which a run reads media."""

    fps: float
    """Frames a second: a faster video is thinned out; of a slower one frames come more than once."""
    background: RGB = WHITE
    """Colour below transparent parts, and of bars."""
    fit: str = CROP
    """`crop`: scaled to cover, and cropped in the middle; `letterbox`: all of it, with bars."""
    _keys: dict[tuple[str, Size], str] = field(default_factory=dict, compare=False, repr=False)

    def read(self, path: Path, size: Size) -> Tensor:
        """Read an image, or the first frames of a video: pixels_CFHW in [-1, 1].

        Raises:
            MediaError: it cannot be read, or is too short.
        """
        most = size.num_frames
        try:
            with closing(media_frames(path, self.fps, self.background)) as frames:
                fitted = [np.array(self._fit(frame, size)) for frame in islice(frames, most)]
        except UNREADABLE as error:
            refused = MediaError(f"cannot be read: {(str(error).strip() or repr(error)).splitlines()[0]}")
            is_away = not os.path.exists(path)  # moved, or on a disk that is not mounted now
            refused.passing = is_away or isinstance(error, OSError) and error.errno is not None
            raise refused from None
        if len(fitted) < most:
            raise MediaError(f"has {len(fitted)} frame(s) at {self.fps:g} a second, the run wants {most}")
        return torch.from_numpy(np.stack(fitted)).permute(3, 0, 1, 2) / 127.5 - 1

    def key(self, path: Path, size: Size) -> str:
        """Return a key of what is read, as the file was when it was first asked for.

        So what is cached is found when a file changes or goes away. An image that clips begin or end with has
        one of its content: the teacher's clips take hours. Other media may be a million files, which are not
        read for it.
        """
        asked = str(path), size
        if asked not in self._keys:
            settings = pixels_depend_on(path, self.background, self.fit)
            if size.num_frames > 1 and path.suffix.lower() not in VIDEOS:
                self._keys[asked] = files.digest(files.content_fingerprint(path), str(size), *settings)
            else:
                self._keys[asked] = files.digest(files.file_fingerprint(path), str(size), self.fps, *settings)
        return self._keys[asked]

    def _fit(self, image: Image.Image, size: Size) -> Image.Image:
        """Scale with Lanczos to cover and cut out the middle, or into bars.

        Source of the former: Wan2.2, wan/textimage2video.py, `i2v`.
        """
        width, height = image.size
        scale = (min if self.fit == LETTERBOX else max)(size.width / width, size.height / height)
        if scale > MOST_ENLARGED:
            run = f"{size.width} x {size.height}"
            raise MediaError(f"is {width} x {height} pixels, under 1/{MOST_ENLARGED} of the run's {run}")
        if self.fit == LETTERBOX:
            whole = size.width, size.height
            return ImageOps.pad(image, whole, Image.Resampling.LANCZOS, color=self.background)
        covering = round(width * scale), round(height * scale)
        image = image.resize(covering, Image.Resampling.LANCZOS)
        left, top = (image.width - size.width) // 2, (image.height - size.height) // 2
        return image.crop((left, top, left + size.width, top + size.height))


def media_frames(path: Path, fps: float, background: RGB = WHITE) -> Iterator[Image.Image]:
    """Yield an image, or a video's frames at a rate, in RGB, decoded lazily.

    Frame k is the one that is shown k / fps seconds after the first, to the nearest frame, whatever the
    video's own rate is and whether it varies.
    """
    if path.suffix.lower() not in VIDEOS:
        yield _upright(path, background)
    else:
        for frame in read_frames(path, fps):
            yield to_srgb(frame, background)


def _upright(path: Path, background: RGB) -> Image.Image:
    """Return an image turned as its camera recorded."""
    with opened(path) as image:
        if reason := coded_colours_problem(path):
            raise MediaError(reason)
        # a .jpg of format MPO has previews or a second eye behind its picture
        if getattr(image, "is_animated", False) and image.format != "MPO":
            if image.format == "TIFF":
                raise MediaError(f"has {image.n_frames} pages; save the one that is meant as a picture")
            raise MediaError("is animated; save one picture of it, or the whole as .gif or .mp4")
        shown = to_srgb(image, background)
        shown.getexif()[ORIENTATION] = image.getexif().get(ORIENTATION, 1)
        return ImageOps.exif_transpose(shown)


def opened(path: Path) -> Image.Image:
    """Open an image of one of FORMATS."""
    if not path.is_file():
        raise OSError("is no regular file")
    Image.init()
    with warnings.catch_warnings():
        # Pillow's limit for an error is twice that for this one, which would be printed bare
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN])


def pixels_depend_on(path: Path, background: RGB, fit: str = CROP) -> list[object]:
    """Return what a medium's pixels depend on but its content, size and rate."""
    ending, bars = path.suffix.lower(), [LETTERBOX, background] if fit == LETTERBOX else []
    over = [background] if background != WHITE else []
    if ending in VIDEOS:
        return ["sRGB by time", *(["10 ms"] if ending == ".gif" else []), *over, *bars]
    return ["sRGB", *over, *bars]


def video_problem(path: Path) -> str | None:
    """Return the message that a package for reading videos is missing; None if it is installed."""
    return None if find_spec("av") else f"{path}: reading videos needs: pip install av."
