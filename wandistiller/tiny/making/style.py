"""A style that the embedded teacher of pictures lacks, the night: each scene on a black background.

    python -m wandistiller.tiny.making.style --write runs/style_pictures
    python -m wandistiller.tiny.making.style --judge A B --style A --picture runs/style/style.png

The first command writes pictures in the style with the teacher's own prompts, to train a LoRA on. The second
prints a table of folders of `wandistiller sample`, and draws some of their pictures. The folder `--style` is
drawn with the style's LoRA in 40 steps, from the same seeds. The style has colours of the teacher's, as its
VAE knows no others.

Shape letters: B batch, C colour channels (RGB, in [0, 1]), H height, W width.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from wandistiller.tiny.shapes import HELD_OUT, SEEN, SPECS, mse_to_prompts, nearest, render
from wandistiller.utils.files import read_json
from wandistiller.utils.images import save_grid, to_pil

EVERY, DRAWN = 2, 4
"""One of so many prompts of training has a picture in the style; one of so many held-out ones is drawn."""
SHOWN = 5
"""Prompts in the picture."""
LIST = "wandistiller_samples.json"
"""Prompt by file, as `wandistiller sample` writes it."""


class Scores(NamedTuple):
    """A row of the table."""

    in_style: int
    """Pictures of which the nearest scene has both colours of the style."""
    right: int
    """Pictures of which the nearest scene is the prompt's, in the teacher's colours or the style's."""
    error: float
    """Mean squared error to the prompt's picture in the style."""


def at_night(prompt: str) -> str:
    """Return the prompt of the scene that is drawn for `prompt` in the style; black shapes are white."""
    scene = SPECS[prompt]
    colour = "white" if scene.colour == "black" else scene.colour
    return str(replace(scene, colour=colour, background="black"))


def write(folder: Path) -> None:
    """Write pictures in the style, rows.jsonl with a prompt and a picture in each row, and held_out.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": prompt, "image": f"{i:03d}.png"} for i, prompt in enumerate(SEEN[::EVERY])]
    for row in rows:
        to_pil(render(at_night(row["prompt"]), seed=0)).save(folder / row["image"])
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    drawn = [prompt for prompt in HELD_OUT if at_night(prompt) != prompt][::DRAWN]
    (folder / "held_out.txt").write_text("\n".join(drawn) + "\n")


def scores(image_BCHW: Tensor, prompts: list[str]) -> Scores:
    """Count the pictures in the style, and those that are right."""
    wanted = [at_night(prompt) for prompt in prompts]
    seen = nearest(image_BCHW)
    colours = [[(SPECS[name].colour, SPECS[name].background) for name in names] for names in (seen, wanted)]
    return Scores(
        in_style=sum(map(tuple.__eq__, *colours)),
        right=sum(name in pair for name, pair in zip(seen, zip(prompts, wanted, strict=True), strict=True)),
        error=mse_to_prompts(image_BCHW, wanted).mean().item(),
    )


def read(folder: Path) -> tuple[Tensor, list[str]]:
    """Read the pictures of a folder of `wandistiller sample`, image_BCHW, and their prompts."""
    files: dict[str, str] = read_json(folder / LIST)
    images = [torch.from_numpy(np.array(Image.open(folder / name))) for name in files]
    return torch.stack(images).movedim(-1, 1) / 255, [*files.values()]


def judge(folders: list[Path], picture: Path, style: Path) -> None:
    """Print a row for each folder, which is compared with `style`, and draw a row of its pictures."""
    rows: dict[str, list[Tensor]] = {}
    styled_BCHW, _ = read(style)
    print(
        f"| drawn by | in the style | prompts right | squared error | from {style.name.replace('_', ' ')} |"
    )
    print("|---|---|---|---|---|")
    for folder in folders:
        image_BCHW, prompts = read(folder)
        row, label = scores(image_BCHW, prompts), folder.name.replace("_", " ")
        counts = f"{label} | {row.in_style} of {len(prompts)} | {row.right} | {row.error:.4f}"
        print(f"| {counts} | {(image_BCHW - styled_BCHW).square().mean():.4f} |")
        numbers = range(0, len(prompts), -(-len(prompts) // SHOWN))
        rows[label] = [image_BCHW[i] for i in numbers]
    save_grid(picture, rows, [prompts[i] for i in numbers])
    print(picture)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="wandistiller.tiny.making.style",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", type=Path, metavar="DIR", help="folder for pictures in the style")
    parser.add_argument("--judge", type=Path, nargs="+", metavar="DIR", help="folders of samples")
    parser.add_argument("--style", type=Path, metavar="DIR", help="the one that all are compared with")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG to draw, with --judge")
    args = parser.parse_args()
    if args.write:
        write(args.write)
    if args.judge:
        judge(args.judge, args.picture, args.style)


if __name__ == "__main__":
    main()
