"""Aspect-ratio buckets: the heights and widths that media are cropped to, by their own dimensions."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from wandistiller.data.lines import VIDEOS
from wandistiller.data.media import ORIENTATION, UNREADABLE, WIDEST, media_frames, opened
from wandistiller.data.tensor_cache import Measured
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import own_batches
from wandistiller.utils.files import file_fingerprint


def make_buckets(height: int, width: int, multiple: tuple[int, int]) -> list[tuple[int, int]]:
    """Return pairs (height, width) of about height x width pixels, from 1:2 to 2:1, the given one included.

    Args:
        multiple: divisors of every height and every width.
    """
    area, buckets = height * width, {(height, width)}
    for h in range(multiple[0], int((area * WIDEST) ** 0.5) + 1, multiple[0]):
        w = round(area / h / multiple[1]) * multiple[1]
        if w and max(h / w, w / h) <= WIDEST:
            buckets.add((h, w))
    return sorted(buckets)


def nearest_buckets(dimensions_N2: np.ndarray, buckets: list[tuple[int, int]]) -> np.ndarray:
    """Return the number of the bucket with the nearest aspect ratio for each (height, width).

    By logarithm, so that tall and wide are alike. (0, 0) goes to the most common bucket.
    """
    log_ratio = np.log([height / width for height, width in buckets])
    by_ratio = np.argsort(log_ratio, kind="stable")
    between = (log_ratio[by_ratio][1:] + log_ratio[by_ratio][:-1]) / 2
    readable_N = dimensions_N2.all(1)
    ratio = dimensions_N2[readable_N, 0] / dimensions_N2[readable_N, 1]
    bucket_N = np.zeros(len(dimensions_N2), np.int64)
    bucket_N[readable_N] = by_ratio[np.searchsorted(between, np.log(ratio))]
    bucket_N[~readable_N] = np.bincount(bucket_N[readable_N], minlength=1).argmax()
    return bucket_N


def media_dimensions(path_of: Callable[[int], Path], number: int, table: Path) -> np.ndarray:
    """Return (height, width) of each of `number` media as shown, (0, 0) of an unreadable one.

    Collective; the ranks share the work.

    Args:
        table: a file that stores them by the media's fingerprints, whatever the data's order.
    """
    store, name = Measured(table.parent), table.stem
    columns = {key: column.numpy() for key, column in store.read(name).items()}
    stamps = columns.get("stamp", np.zeros(0, np.uint64))
    known = columns.get("size", np.zeros((0, 2), np.int32))
    numbers = own_batches(range(number))
    own_stamps = np.array([int(file_fingerprint(path_of(i)), 16) for i in numbers], np.uint64)
    own_sizes, new = np.zeros((len(numbers), 2), np.int32), ~np.isin(own_stamps, stamps)
    own_sizes[~new] = known[np.searchsorted(stamps, own_stamps[~new])]
    progress = Progress("sizes of media", int(new.sum()), "file")
    for row in np.flatnonzero(new):
        own_sizes[row] = progress.counting(_dimensions)(path_of(numbers[row]))
    parts_stamps, parts = zip(*collectives.gather_objects((own_stamps, own_sizes)), strict=True)
    dimensions_N2 = np.zeros((number, 2), np.int32)
    for rank, part in enumerate(parts):
        dimensions_N2[rank :: collectives.world_size()] = part
    stamps, first = np.unique(np.concatenate([stamps, *parts_stamps]), return_index=True)
    if collectives.rank() == 0 and len(stamps) > len(known):
        columns = {"stamp": stamps, "size": np.concatenate([known, *parts])[first]}
        store.write(name, {key: torch.from_numpy(column) for key, column in columns.items()})
    return dimensions_N2


def _dimensions(path: Path) -> tuple[int, int]:
    try:
        if path.suffix.lower() in VIDEOS:
            with closing(media_frames(path, 1.0)) as frames:
                return next(frames).size[::-1]
        with opened(path) as image:
            # reads the header alone; a PNG's own getexif would decode it all, and a TIFF is
            # turned by Pillow itself (pillow 13)
            turned = image.format != "TIFF" and Image.Image.getexif(image).get(ORIENTATION, 1) >= 5
            return image.size if turned else image.size[::-1]
    except (*UNREADABLE, StopIteration):
        return 0, 0
