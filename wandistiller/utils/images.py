"""Grids of images and clips with captions, as PNG and MP4."""

import textwrap
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


def to_pil(image_CHW: Tensor) -> Image.Image:
    """Convert image_CHW in [0, 1] to an 8-bit RGB picture."""
    image_HWC = (image_CHW.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(image_HWC.cpu().numpy()))


def evenly(number: int, most: int) -> list[int]:
    """Return the places of `most` of `number` frames, spread evenly from the first to the last; or all."""
    shown = min(number, most)
    return [round(i * (number - 1) / max(1, shown - 1)) for i in range(shown)]


def drawn(output: Path) -> list[Path]:
    """List the sample grids of a run, the oldest first: in OUTPUT/samples, or its `sample_dir`."""
    run = output / "resolved" / "run.json"
    chosen = read_json(run).get("sample_dir") if run.is_file() else None
    return sorted(Path(chosen or output / "samples").glob("step_*.png"))


def grid(rows: dict[str, list[Tensor]], captions: list[str]) -> Image.Image:
    """Draw a labelled row per entry of `rows`, a captioned column per image_CHW in [0, 1]."""
    height, width = next(iter(rows.values()))[0].shape[-2:]
    factor = max(1, -(-SMALLEST_TILE // width))
    tile_w, tile_h, margin, gap = width * factor, height * factor, 90, 6
    font = ImageFont.load_default(13)
    lines = [textwrap.wrap(c, max(10, tile_w // 7))[:4] for c in captions]
    head = 12 + 16 * max(len(text) for text in lines)
    size = margin + len(captions) * (tile_w + gap), head + len(rows) * (tile_h + gap)
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for column, text in enumerate(lines):
        draw.multiline_text((margin + column * (tile_w + gap), 4), "\n".join(text), "black", font)
    for r, (label, images) in enumerate(rows.items()):
        top = head + r * (tile_h + gap)
        words = [line for part in label.splitlines() for line in textwrap.wrap(part, 11)]
        draw.multiline_text((6, top + tile_h // 2 - 8 * len(words)), "\n".join(words), "black", font)
        for column, image_CHW in enumerate(images):
            tile = to_pil(image_CHW).resize((tile_w, tile_h), Image.Resampling.NEAREST)
            picture.paste(tile, (margin + column * (tile_w + gap), top))
    return picture


def save_grid(file: Path, rows: dict[str, list[Tensor]], captions: list[str]) -> None:
    """Write one PNG of a grid."""
    with atomic(file) as temporary:
        grid(rows, captions).save(temporary, format="PNG")


def save_frames(file: Path, rows: dict[str, list[Tensor]], captions: list[str]) -> None:
    """Write one PNG: a row for each captioned clip_CFHW in [0, 1], those of one caption together."""
    number = next(iter(rows.values()))[0].shape[1]
    of_clips = {
        f"{label}: {caption}": list(clips[column].unbind(1))
        for column, caption in enumerate(captions)
        for label, clips in rows.items()
    }
    save_grid(file, of_clips, [f"frame {k + 1}" for k in range(number)])


def save_clips(file: Path, rows: dict[str, list[Tensor]], captions: list[str], fps: int) -> None:
    """Write one MP4 (H.264) of a grid in which each clip_CFHW in [0, 1] plays, all in step."""
    from imageio import get_writer  # an extra

    number = next(iter(rows.values()))[0].shape[1]
    frames = [
        grid({label: [clip[:, k] for clip in clips] for label, clips in rows.items()}, captions)
        for k in range(number)
    ]
    even = (side - side % 2 for side in frames[0].size)  # as H.264 halves the colours' resolution
    box = (0, 0, *even)
    with atomic(file) as temporary:
        named = temporary.with_suffix(".mp4")
        with get_writer(named, fps=fps, codec="libx264", macro_block_size=2) as writer:
            for picture in frames * max(1, -(-SECONDS * fps // number)):
                writer.append_data(np.asarray(picture.crop(box)))
        named.rename(temporary)
