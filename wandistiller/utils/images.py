"""Grids of images with captions, as PNG."""

import textwrap
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from wandistiller.utils.files import atomic, read_json

SMALLEST_TILE = 128
"""Pixels; smaller images are enlarged by whole factors, so that their pixels stay visible."""


def to_pil(image_CHW: Tensor) -> Image.Image:
    """Convert image_CHW in [0, 1] to an 8-bit RGB picture."""
    image_HWC = (image_CHW.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(image_HWC.cpu().numpy()))


def drawn(output: Path) -> list[Path]:
    """List the sample grids of a run, the oldest first: in OUTPUT/samples, or its `sample_dir`."""
    run = output / "resolved" / "run.json"
    chosen = read_json(run).get("sample_dir") if run.is_file() else None
    return sorted(Path(chosen or output / "samples").glob("step_*.png"))


def save_grid(file: Path, rows: dict[str, list[Tensor]], captions: list[str]) -> None:
    """Write one PNG: a labelled row per entry of `rows`, a captioned column per image_CHW in [0, 1]."""
    height, width = next(iter(rows.values()))[0].shape[-2:]
    factor = max(1, -(-SMALLEST_TILE // width))
    tile_w, tile_h, margin, gap = width * factor, height * factor, 90, 6
    font = ImageFont.load_default(13)
    lines = [textwrap.wrap(c, max(10, tile_w // 7))[:4] for c in captions]
    head = 12 + 16 * max(len(text) for text in lines)
    grid = Image.new(
        "RGB", (margin + len(captions) * (tile_w + gap), head + len(rows) * (tile_h + gap)), "white"
    )
    draw = ImageDraw.Draw(grid)
    for column, text in enumerate(lines):
        draw.multiline_text((margin + column * (tile_w + gap), 4), "\n".join(text), "black", font)
    for r, (label, images) in enumerate(rows.items()):
        top = head + r * (tile_h + gap)
        words = [line for part in label.splitlines() for line in textwrap.wrap(part, 11)]
        draw.multiline_text((6, top + tile_h // 2 - 8 * len(words)), "\n".join(words), "black", font)
        for column, image_CHW in enumerate(images):
            tile = to_pil(image_CHW).resize((tile_w, tile_h), Image.Resampling.NEAREST)
            grid.paste(tile, (margin + column * (tile_w + gap), top))
    with atomic(file) as temporary:
        grid.save(temporary, format="PNG")
