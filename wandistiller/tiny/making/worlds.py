"""The worlds that a teacher is made for, with the sizes and steps of its training.

They are pictures, clips, and clips that begin with a given picture, whose pictures and rows are written here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wandistiller.tiny import clips, first_frames, shapes
from wandistiller.tiny.first_frames import FOLDER, HELD_OUT, ROWS, SEEN, SPECS, render
from wandistiller.utils.images import to_pil

TINY = Path(__file__).parent.parent
BOUNDARY, IMAGE_BOUNDARY = 0.875, 0.9
"""Sigma from which the high-noise expert serves: boundary_ratio of Wan2.2 T2V and I2V A14B."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Length and batch of one training run."""

    steps: int
    batch: int
    lr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One training run of a transformer."""

    part: str
    """Folder that the result is written to."""
    start: str | None
    """Folder of the weights to start from; None for fresh ones."""
    sigmas: tuple[float, float]
    """Range of sigma that is trained; 1 is pure noise."""
    run: Run


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Scenes that prompts name, how they look, and how a teacher of them is trained."""

    scenes: dict[str, Any]
    """Every scene by canonical prompt; it has `worded(template)` and the attributes."""
    attributes: dict[str, tuple[str, ...]]
    templates: tuple[str, ...]
    seen: list[str]
    """Prompts of training."""
    held_out: list[str]
    frames: int
    size: int
    """Height and width, in pixels."""
    render: Callable[[str, int | None], Tensor]
    """Prompt and seed of the jitter (None: canonical) -> clip_CFHW in [0, 1]."""
    pipeline: Path
    """The folder that ships."""
    vae_start: Path | None
    """VAE to start from; None for a fresh one."""
    vae: Run | None
    """None: the VAE to start from is taken as it is."""
    polish: Run | None
    variants: int
    """Jittered clips per seen prompt, in training."""
    expert: dict[str, int]
    """Sizes of a transformer."""
    stages: tuple[Stage, Stage, Stage]
    """The transformer for every sigma, then the high-noise and the low-noise expert."""
    boundary: float = BOUNDARY
    begins: bool = False
    """The networks are given the first frame of a clip, and prompts say the rest."""

    def batch(self, size: int, rng: torch.Generator) -> Tensor:
        """Draw `size` jittered clips of seen prompts: clip_BCFHW in [-1, 1]."""
        index_B = torch.randint(len(self.seen) * self.variants, (size,), generator=rng).tolist()
        return rendered(self, [divmod(index, self.variants) for index in index_B])


def rendered(world: World, scenes: list[tuple[int, int]]) -> Tensor:
    """Draw the VAE's inputs, given the index of a seen prompt and the seed of each: clip_BCFHW in [-1, 1]."""
    return torch.stack([world.render(world.seen[scene], seed) for scene, seed in scenes]) * 2 - 1


def _stages(base: Run, high: Run, low: Run, boundary: float = BOUNDARY) -> tuple[Stage, Stage, Stage]:
    """A transformer for every sigma, and from it one for each range."""
    return (
        Stage(part="base", start=None, sigmas=(0.0, 1.0), run=base),
        Stage(part="transformer", start="base", sigmas=(boundary, 1.0), run=high),
        Stage(part="transformer_2", start="base", sigmas=(0.0, boundary), run=low),
    )


def _picture(prompt: str, seed: int | None) -> Tensor:
    """Draw a picture as a clip of one frame."""
    return shapes.render(prompt, seed).unsqueeze(1)


WORLDS = {
    "image": World(
        scenes=shapes.SPECS,
        attributes=shapes.ATTRIBUTES,
        templates=shapes.TEMPLATES,
        seen=shapes.SEEN,
        held_out=shapes.HELD_OUT,
        frames=1,
        size=shapes.IMAGE_SIZE,
        render=_picture,
        pipeline=TINY / "pipeline",
        vae_start=None,
        vae=Run(steps=2400, batch=16, lr=1.5e-3),
        polish=Run(steps=1500, batch=16, lr=1e-3),
        variants=8,
        expert={"num_layers": 8, "ffn_dim": 1024},
        stages=_stages(
            Run(steps=3000, batch=64, lr=1.2e-3),
            Run(steps=2000, batch=64, lr=6e-4),
            Run(steps=3000, batch=64, lr=8e-4),
        ),
    ),
    "video": World(
        scenes=clips.SPECS,
        attributes=clips.ATTRIBUTES,
        templates=clips.TEMPLATES,
        seen=clips.SEEN,
        held_out=clips.HELD_OUT,
        frames=clips.FRAMES,
        size=clips.CLIP_SIZE,
        render=clips.render,
        pipeline=TINY / "video_pipeline",
        vae_start=TINY / "pipeline" / "vae",
        vae=Run(steps=1000, batch=4, lr=1.2e-3),
        polish=Run(steps=800, batch=4, lr=1e-3),
        variants=4,
        expert={"num_layers": 6, "ffn_dim": 640},
        stages=_stages(
            Run(steps=3000, batch=64, lr=1.2e-3),
            Run(steps=2000, batch=64, lr=6e-4),
            Run(steps=3000, batch=64, lr=8e-4),
        ),
    ),
    "first_frame": World(
        scenes=first_frames.SPECS,
        attributes=first_frames.ATTRIBUTES,
        templates=first_frames.TEMPLATES,
        seen=first_frames.SEEN,
        held_out=first_frames.HELD_OUT,
        frames=clips.FRAMES,
        size=clips.CLIP_SIZE,
        render=first_frames.render,
        pipeline=TINY / "image_pipeline",
        vae_start=TINY / "video_pipeline" / "vae",
        vae=None,
        polish=None,
        variants=4,
        expert={"num_layers": 6, "ffn_dim": 640, "in_channels": 36},
        stages=_stages(
            Run(steps=3000, batch=64, lr=1.2e-3),
            Run(steps=2000, batch=64, lr=6e-4),
            Run(steps=3000, batch=64, lr=8e-4),
            IMAGE_BOUNDARY,
        ),
        boundary=IMAGE_BOUNDARY,
        begins=True,
    ),
}


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
