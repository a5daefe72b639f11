"""Small students of the embedded teacher, for benchmarks of recipes: trained, and their pictures drawn."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from drawing import of_stock, stock
from ranks import environment

from wandistiller.evaluation.sampling import Sampling
from wandistiller.tiny import shapes

PROMPTS = shapes.HELD_OUT


def run(recipe: dict[str, Any], output: Path) -> Path:
    """Write a recipe beside its output folder, and train by it."""
    file = output.with_name(f"{output.name}.json")
    file.write_text(json.dumps(recipe))
    words = [sys.executable, "-m", "wandistiller", "train", "--recipe", file]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment())
    if done.returncode:
        sys.exit(f"{output.name}:\n{done.stderr[-3000:]}")
    return output


def pictures(student: Path, seed: int, **sampling: int) -> torch.Tensor:
    """Draw the held-out prompts, each from a seed of its own from `seed` on; BCHW in [0, 1]."""
    drawn, pipe, how = [], stock(student), Sampling(height=64, width=64, **sampling)
    for i in range(0, len(PROMPTS), 8):
        part = PROMPTS[i : i + 8]
        drawn.append(of_stock(pipe, part, [seed + i + k for k in range(len(part))], how)[:, :, 0])
    return torch.cat(drawn)
