"""Grids of images and clips with captions, as PNG and MP4."""

import textwrap
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from wandistiller.utils.files import atomic, read_json

SECONDS = 4
"""Least length of an animation, in which a short clip repeats."""
SMALLEST_TILE = 128
"""Pixels; smaller images are enlarged by whole factors, so that their pixels stay visible."""
MOST_FRAMES = 9
"""Frames of a long clip that are looked at one by one, spread evenly."""
STILLS = 3
"""Frames of a clip in a PNG of training: the first, the middle, the last."""
WIDEST = 1920
"""Pixels of an MP4: phones play no wider H.264 reliably."""
CRF = "18"
"""Quality of H.264, of which people see no loss; less is better."""
BT709 = 1
"""Of ITU-T H.273."""
GAP = 6
"""Pixels between the tiles of a grid."""
COLUMNS = (4, 5, 3)
"""Numbers of tiles beside each other, the best first; of these that which leaves the fewest places empty."""
LABELLED = 33
"""40ths of a grid's width for its tiles; the other 7 are for the labels of its rows."""
PAPER, INK = "#121212", "#e6e6e6"
"""Dark, as around pictures everywhere, so that they do not glare on a dark page."""


def to_bytes(pixels: Tensor) -> Tensor:
    """Round pixels in [0, 1] to 0 ... 255; those of 8 bits stay."""
    return pixels if pixels.dtype == torch.uint8 else (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def to_pil(image_CHW: Tensor) -> Image.Image:
    """Convert image_CHW in [0, 1], or of 8 bits, to an 8-bit RGB picture."""
    return Image.fromarray(np.ascontiguousarray(to_bytes(image_CHW).permute(1, 2, 0).cpu().numpy()))


def can_write_mp4() -> bool:
    """Return whether the library for it is installed: the extra `video`."""
    return bool(find_spec("av"))


def write_mp4(file: Path, frames: Callable[[], Iterable[Image.Image]], fps: int, plays: int = 1) -> None:
    """Write an MP4 (H.264, BT.709) of pictures of one even size; `frames` gives them once for each play."""
    import av

    # the index comes first, so that a page can play the file while it is loading
    with av.open(file, "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": CRF})
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        for number, picture in enumerate(picture for _ in range(plays) for picture in frames()):
            if number == 0:
                stream.width, stream.height = picture.size
            frame = av.VideoFrame.from_image(picture).reformat(format="yuv420p", dst_colorspace="ITU709")
            frame.colorspace, frame.pts, frame.time_base = BT709, number, 1 / Fraction(fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def tile_size(height: int, width: int, columns: int, widest: int | None = None) -> tuple[int, int]:
    """Return height and width of the tiles of a grid: whole multiples of what is small.

    Args:
        widest: pixels of the whole grid, at most, for which tiles are smaller than their images.
    """
    factor = max(1, -(-SMALLEST_TILE // width))
    most = max(16, LABELLED * widest // 40 // columns - GAP) if widest else width * factor
    if factor * width <= most:
        return height * factor, width * factor
    return max(1, round(height * most / width)), most


def evenly(number: int, most: int) -> list[int]:
    """Return the indices of `most` of `number` frames, spread evenly from the first to the last; or all."""
    shown = min(number, most)
    return [round(i * (number - 1) / max(1, shown - 1)) for i in range(shown)]


def drawn(output: Path) -> list[Path]:
    """List the sample grids of a run, the oldest first: in OUTPUT/samples, or its `sample_dir`."""
    run = output / "resolved" / "run.json"
    chosen = read_json(run).get("sample_dir") if run.is_file() else None
    return sorted(Path(chosen or output / "samples").glob("step_*.png"))


def grid(
    rows: dict[str, list[Tensor]], captions: list[str], widest: int | None = None, columns: int | None = None
) -> Image.Image:
    """Draw a labelled row per entry of `rows`, a captioned column per image_CHW in [0, 1] or of 8 bits.

    After so many `columns`, one of COLUMNS by default, the others follow below, so that labels can be read
    where a screen is narrow.
    """
    number, (height, width) = len(captions), next(iter(rows.values()))[0].shape[-2:]
    tile_h, tile_w = tile_size(height, width, number, widest)
    columns = min(columns or min(COLUMNS, key=lambda many: -number % many), number)
    size = max(13, min(columns, max(COLUMNS)) * (tile_w + GAP) // LABELLED)  # a 40th of the width
    left = 7 * size
    font, across, down, line = ImageFont.load_default(size), tile_w + GAP, tile_h + GAP, size + 3
    lines = [textwrap.wrap(c, max(10, round(1.8 * tile_w / size)))[:5] for c in captions]
    head = 12 + line * max(len(text) for text in lines)
    band, bands = head + len(rows) * down, -(-number // columns)
    picture = Image.new("RGB", (left + columns * across, bands * band), PAPER)
    draw = ImageDraw.Draw(picture)
    for i, text in enumerate(lines):
        corner = left + i % columns * across, i // columns * band + 4
        draw.multiline_text(corner, "\n".join(text), INK, font, spacing=3)
    method = Image.Resampling.NEAREST if tile_w >= width else Image.Resampling.BOX
    for r, (label, images) in enumerate(rows.items()):
        words = [word for part in label.splitlines() for word in textwrap.wrap(part, 11)]
        for i, image_CHW in enumerate(images):
            top = i // columns * band + head + r * down
            if i % columns == 0:
                middle = top + (tile_h - line * len(words)) // 2
                draw.multiline_text((6, middle), "\n".join(words), INK, font, spacing=3)
            tile = to_pil(image_CHW).resize((tile_w, tile_h), method)
            picture.paste(tile, (left + i % columns * across, top))
    return picture


def save_grid(
    file: Path, rows: dict[str, list[Tensor]], captions: list[str], columns: int | None = None
) -> None:
    with atomic(file) as temporary:
        grid(rows, captions, columns=columns).save(temporary, format="PNG")


def save_frames(file: Path, rows: dict[str, list[Tensor]], captions: list[str]) -> None:
    """Write one PNG: a row for each captioned clip_CFHW, those of one caption together.

    Clips are in [0, 1] or of 8 bits, and of long ones MOST_FRAMES frames are shown.
    """
    frames = evenly(next(iter(rows.values()))[0].shape[1], MOST_FRAMES)
    of_clips = {
        f"{label}: {caption}": [clips[column][:, k] for k in frames]
        for column, caption in enumerate(captions)
        for label, clips in rows.items()
    }
    save_grid(file, of_clips, [f"frame {k + 1}" for k in frames], MOST_FRAMES)


def save_clips(file: Path, rows: dict[str, list[Tensor]], captions: list[str], fps: int) -> None:
    """Write one MP4 (H.264) of a grid in which each clip_CFHW in [0, 1], or of 8 bits, plays, all in step.

    It is at most WIDEST wide, and drawn one frame at a time, as the frames of long clips take GiB.
    """
    number = next(iter(rows.values()))[0].shape[1]

    def frames() -> Iterator[Image.Image]:
        for k in range(number):
            frame = {label: [clip[:, k] for clip in clips] for label, clips in rows.items()}
            picture = grid(frame, captions, WIDEST)
            even = (side - side % 2 for side in picture.size)  # H.264 halves the colours' resolution
            yield picture.crop((0, 0, *even))

    with atomic(file) as temporary:
        write_mp4(temporary, frames, fps, plays=max(1, -(-SECONDS * fps // number)))
