"""The pictures that the embedded image-to-video teacher's clips begin with, and the rows that name them."""

import json

from wandistiller.tiny.first_frames import FOLDER, HELD_OUT, ROWS, SEEN, SPECS, render
from wandistiller.utils.images import to_pil

SEED = 20_000
"""Jitter of the pictures; no training has it."""


def write_rows() -> None:
    """Write each picture once, and the rows of both sets."""
    FOLDER.mkdir(exist_ok=True)
    drawn = {scene.picture: name for name, scene in SPECS.items()}
    for file, name in drawn.items():
        to_pil(render(name, SEED)[:, 0]).save(FOLDER / file, optimize=True)
    for file, names in zip(ROWS.values(), (SEEN, HELD_OUT), strict=True):
        rows = [{"prompt": SPECS[name].worded(0), "image": SPECS[name].picture} for name in names]
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")
