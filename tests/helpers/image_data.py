"""Prompts with given frames: pictures and a clip, of noise from fixed seeds."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

PROMPTS = ["a red circle", "a blue square"]


def noise(seed: int, frames: int = 1) -> list[Image.Image]:
    """Return frames of 70 x 80 pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 70, 80, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in pixels]


def image_data(folder: Path, *, pictures: int = 6) -> Path:
    """Write `first_frames.jsonl`, with pictures whose clips a teacher makes, and a clip of 12 frames."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(pictures):
        noise(i)[0].save(folder / f"{i}.png")
    first, *others = noise(100, 12)
    first.save(folder / "clip.gif", save_all=True, append_images=others, duration=60)
    rows = [{"prompt": PROMPTS[i % 2], "image": f"{i}.png"} for i in range(pictures)]
    rows.append({"prompt": "left", "video": "clip.gif"})
    file = folder / "first_frames.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def with_last_images(data: Path) -> Path:
    """Write `both_ends.jsonl` beside such a file: each picture's clip ends with the next picture."""
    *pictures, clip = map(json.loads, data.read_text().splitlines())
    names = [row["image"] for row in pictures]
    lasts = names[1:] + names[:1]
    rows = [row | {"last_image": last} for row, last in zip(pictures, lasts, strict=True)]
    file = data.with_name("both_ends.jsonl")
    file.write_text("\n".join(map(json.dumps, [*rows, clip])))
    return file
