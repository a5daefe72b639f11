"""Images and videos -> pixels of one size, as Wan itself prepares pictures; only the frames that are used are decoded."""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from wandistiller import distributed
from wandistiller.files import atomic, digest
from wandistiller.items import VIDEOS
from wandistiller.metrics import Progress

UNREADABLE = (ArithmeticError, EOFError, LookupError, OSError, RuntimeError, SyntaxError, TypeError, ValueError, struct.error,
              zlib.error, Image.DecompressionBombError)  # fmt: skip
"""What Pillow and imageio-ffmpeg raise for files they cannot read."""
MOST_ENLARGED = 16
"""Times that a picture is enlarged, at most; a sliver would fill gigabytes, a dot is no picture."""
WIDEST = 2.0
"""Longer over shorter side, at most, of the buckets that we make."""


class MediaError(Exception):
    """An image or video that cannot be used, and why; without its name."""


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels and frames of a sample."""

    height: int
    width: int
    num_frames: int


def load_media(path: Path, size: Size, fps: float) -> Tensor:
    """One image, or the first frames of a video, scaled to cover and cropped: pixels_CFHW in [-1, 1].

    Args:
        fps: frames a second; of a faster video the nearest frames are taken, a slower one is taken as it is.
    Raises:
        MediaError: it cannot be read, or is too short.
    """
    try:
        with closing(_frames(path, fps)) as frames:
            fitted = [np.array(_fit(frame, size)) for frame in islice(frames, size.num_frames)]
    except UNREADABLE as error:
        raise MediaError(f"cannot be read: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}") from None
    if len(fitted) < size.num_frames:
        raise MediaError(f"has {len(fitted)} frame(s) at {fps:g} a second, the run wants {size.num_frames}")
    return torch.from_numpy(np.stack(fitted)).permute(3, 0, 1, 2) / 127.5 - 1


def _fit(image: Image.Image, size: Size) -> Image.Image:
    """Scale to cover, with Lanczos, and cut out the middle. Source: Wan2.2, wan/textimage2video.py, `i2v`."""
    width, height = image.size
    scale = max(size.width / width, size.height / height)
    if scale > MOST_ENLARGED:
        raise MediaError(f"is {width} x {height} pixels, under 1/{MOST_ENLARGED} of the run's {size.width} x {size.height}")
    image = image.convert("RGB").resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    left, top = (image.width - size.width) // 2, (image.height - size.height) // 2
    return image.crop((left, top, left + size.width, top + size.height))


def _frames(path: Path, fps: float) -> Iterator[Image.Image]:
    """The frames to use, decoded one by one as they are asked for."""
    ending = path.suffix.lower()
    if ending not in VIDEOS:
        yield _upright(path)
    elif ending == ".gif":
        with Image.open(path) as image:
            milliseconds = image.info.get("duration", 0)
            yield from _every(ImageSequence.Iterator(image), 1000 / milliseconds if milliseconds else 0.0, fps)
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
    """An image turned as its camera says."""
    with Image.open(path) as image:
        if getattr(image, "is_animated", False):
            raise MediaError("is animated; save one picture of it, or the whole as .gif or .mp4")
        return ImageOps.exif_transpose(image).convert("RGB")


def video_problem(path: Path) -> str | None:
    """What this machine lacks to read a video."""
    return None if find_spec("imageio_ffmpeg") else f"{path}: reading videos needs: pip install imageio imageio-ffmpeg."


def stamp(path: Path) -> str:
    """Stands for the file as it is now; a file that was changed, or has come back, has another one."""
    try:
        found = path.stat()
    except OSError:
        return digest(str(path), None)
    return digest(str(path), found.st_size, found.st_mtime_ns)


def make_buckets(height: int, width: int, multiple: tuple[int, int]) -> list[tuple[int, int]]:
    """Sizes (height, width) of about height x width pixels, from 1:2 to 2:1, the given one among them.

    Args:
        multiple: what height and width must be multiples of.
    """
    area, found = height * width, {(height, width)}
    for h in range(multiple[0], int((area * WIDEST) ** 0.5) + 1, multiple[0]):
        w = round(area / h / multiple[1]) * multiple[1]
        if w and max(h / w, w / h) <= WIDEST:
            found.add((h, w))
    return sorted(found)


def nearest_buckets(size_N2: np.ndarray, buckets: list[tuple[int, int]]) -> np.ndarray:
    """The number of the bucket with the nearest aspect ratio for each (height, width).

    By logarithm, so that tall and wide are alike. (0, 0) goes to the bucket that most have.
    """
    log_ratio = np.log([height / width for height, width in buckets])
    by_ratio = np.argsort(log_ratio, kind="stable")
    between = (log_ratio[by_ratio][1:] + log_ratio[by_ratio][:-1]) / 2
    readable_N = size_N2.all(1)
    found_N = np.zeros(len(size_N2), np.int64)
    found_N[readable_N] = by_ratio[np.searchsorted(between, np.log(size_N2[readable_N, 0] / size_N2[readable_N, 1]))]
    found_N[~readable_N] = np.bincount(found_N[readable_N], minlength=1).argmax()
    return found_N


def pixel_sizes(path_of: Callable[[int], Path], number: int, table: Path) -> np.ndarray:
    """(height, width) of each of `number` media as shown, (0, 0) of an unreadable one. Collective; the ranks share the work.

    Args:
        table: a file that remembers what was seen, whatever the data's order.
    """
    known = _seen(table)
    mine = range(distributed.rank(), number, distributed.world_size())
    stamps = np.array([int(stamp(path_of(i)), 16) for i in mine], np.uint64)
    sizes, unseen = np.zeros((len(mine), 2), np.int32), ~np.isin(stamps, known["stamp"])
    sizes[~unseen] = known["size"][np.searchsorted(known["stamp"], stamps[~unseen])]
    progress = Progress("sizes of media", int(unseen.sum()))
    for row in np.flatnonzero(unseen):
        sizes[row] = _pixel_size(path_of(mine[row]))
        progress.advance()
    all_ranks = distributed.gather_objects((stamps, sizes, unseen))
    together = np.zeros((number, 2), np.int32)
    for rank, (_, theirs, _) in enumerate(all_ranks):
        together[rank :: distributed.world_size()] = theirs
    if distributed.rank() == 0 and any(u.any() for _, _, u in all_ranks):
        first, row = np.unique(np.concatenate([known["stamp"], *(s for s, _, _ in all_ranks)]), return_index=True)
        with atomic(table) as temporary:
            save_file({"stamp": first, "size": np.concatenate([known["size"], *(x for _, x, _ in all_ranks)])[row]}, temporary)
    return together


def _seen(table: Path) -> dict[str, np.ndarray]:
    """What `pixel_sizes` remembers; nothing, of a file that is damaged."""
    try:
        known = load_file(table) if table.is_file() else {}
        if known and len(known["stamp"]) == len(known["size"]):
            return known
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        distributed.log0("cache     %s is damaged and made anew: %s", table, error)
    return {"stamp": np.zeros(0, np.uint64), "size": np.zeros((0, 2), np.int32)}


def _pixel_size(path: Path) -> tuple[int, int]:
    try:
        if path.suffix.lower() in VIDEOS:
            with closing(_frames(path, 1.0)) as frames:
                return next(frames).size[::-1]
        with Image.open(path) as image:  # reads the header alone; a PNG's own getexif would decode it all (pillow 13)
            turned = Image.Image.getexif(image).get(0x0112, 1) >= 5
            return image.size if turned else image.size[::-1]
    except (*UNREADABLE, StopIteration):
        return 0, 0
