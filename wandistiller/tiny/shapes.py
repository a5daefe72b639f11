"""The toy world of the embedded teacher: coloured shapes on coloured backgrounds, and a check of images.

A prompt such as "a red circle on a blue background, left" names one of 1120 scenes (8 colours, 7 other
background colours, 4 shapes, 5 places). `render` draws it, with small keyed jitter of position and size so
that a scene is a distribution and not one picture. `fully_right` judges an image without a network: it finds
the nearest of all 1120 canonical pictures, so colour, background, shape and place must all be right. A tenth
of the scenes is held out.

Shape letters: B batch, C colour channels (RGB, in [0, 1]), H height, W width, N all canonical scenes.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from wandistiller.utils.keyed_random import keyed_generator

IMAGE_SIZE = 64
"""Height and width of every image, in pixels."""
HELD_OUT_SHARE = 0.1
SUPERSAMPLING = 4
SHAPE_RADIUS_PX = 13.0
POSITION_JITTER_PX = 2.0
SIZE_JITTER = 0.08
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.08, 0.10),
    "green": (0.08, 0.70, 0.15),
    "blue": (0.08, 0.15, 0.90),
    "yellow": (0.97, 0.90, 0.10),
    "purple": (0.65, 0.10, 0.85),
    "cyan": (0.10, 0.85, 0.92),
    "white": (0.97, 0.97, 0.97),
    "black": (0.05, 0.05, 0.05),
}
CENTRES: dict[str, tuple[float, float]] = {
    "left": (17.0, 32.0),
    "right": (47.0, 32.0),
    "top": (32.0, 17.0),
    "bottom": (32.0, 47.0),
    "center": (32.0, 32.0),
}
"""Centre of the shape as (x, y) in pixels; y grows downwards."""
SHAPES = ("circle", "square", "triangle", "cross")
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "background": tuple(COLOURS),
    "place": tuple(CENTRES),
}
TEMPLATES = (
    "a {colour} {shape} on a {background} background, {place}",
    "{colour} {shape}, {background} background, {place}",
    "a {colour} {shape} at the {place} of a {background} background",
    "on a {background} background there is a {colour} {shape} at the {place}",
    "{place}: a {colour} {shape} on {background}",
    "a {background} background with a {colour} {shape} on the {place}",
    "A {colour} {shape} on a {background} background, {place}.",
)
"""The canonical wording first, then the paraphrases that the text encoder is also trained on."""


@dataclass(frozen=True)
class Described:
    """Base of the scenes of both worlds; `str(scene)` is the canonical prompt."""

    templates: ClassVar[tuple[str, ...]]
    colour: str
    shape: str
    background: str

    def __str__(self) -> str:
        return self.worded(0)

    def worded(self, template: int) -> str:
        """Describe the scene with `templates[template]`."""
        return self.templates[template].format(**asdict(self))


@dataclass(frozen=True)
class Scene(Described):
    """One picture."""

    templates = TEMPLATES
    place: str


_SCENES = (Scene(*names) for names in product(COLOURS, SHAPES, COLOURS, CENTRES) if names[0] != names[2])
SPECS = {str(scene): scene for scene in _SCENES}
"""All 1120 scenes by canonical prompt, in a fixed order."""


def divided(prompts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Divide a world's canonical prompts into those of training and a tenth that none sees, by hashes."""
    by_hash = sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    held_out = set(by_hash[: round(HELD_OUT_SHARE * len(by_hash))])
    return [p for p in prompts if p not in held_out], [p for p in prompts if p in held_out]


SEEN, HELD_OUT = divided(SPECS)
"""The 1008 canonical prompts of training, and the 112 that are in no training stage."""


def jitter(prompt: str, seed: int | None) -> list[float]:
    """Draw the jitter of x, y and size, each in [-1, 1]; without a seed there is none."""
    if seed is None:
        return [0.0, 0.0, 0.0]
    return (2 * torch.rand(3, generator=keyed_generator("render", prompt, seed)) - 1).tolist()


def inside(shape: str, x_HW: Tensor, y_HW: Tensor) -> Tensor:
    """Return whether each point is in the unit-sized shape centred at the origin (y downwards)."""
    if shape == "circle":
        return x_HW.square() + y_HW.square() < 0.92**2
    if shape == "square":
        return torch.maximum(x_HW.abs(), y_HW.abs()) < 0.96
    if shape == "triangle":
        return (y_HW < 0.95) & (2.0 * x_HW.abs() < 1.0 + 1.08 * y_HW)
    short, long = torch.minimum(x_HW.abs(), y_HW.abs()), torch.maximum(x_HW.abs(), y_HW.abs())
    return (short < 0.32) & (long < 1.08)


def render(prompt: str, seed: int | None = None) -> Tensor:
    """Draw one scene, antialiased.

    Args:
        prompt: a canonical prompt, one of `SPECS`.
        seed: key of the jitter (position +-2 pixels, size +-8 %, uniform); None draws the canonical picture.

    Returns:
        image_CHW, float32 in [0, 1].
    """
    scene = SPECS[prompt]
    dx, dy, dsize = jitter(prompt, seed)
    centre_x, centre_y = CENTRES[scene.place]
    radius_px = SHAPE_RADIUS_PX * (1 + SIZE_JITTER * dsize)
    grid = (torch.arange(IMAGE_SIZE * SUPERSAMPLING) + 0.5) / SUPERSAMPLING
    x_W = (grid - centre_x - POSITION_JITTER_PX * dx) / radius_px
    y_H = (grid - centre_y - POSITION_JITTER_PX * dy) / radius_px
    inside_HW = inside(scene.shape, x_W[None, :], y_H[:, None]).float()
    cover_1HW = torch.nn.functional.avg_pool2d(inside_HW[None], SUPERSAMPLING)
    colour_C11, background_C11 = (
        torch.tensor(COLOURS[c])[:, None, None] for c in (scene.colour, scene.background)
    )
    return cover_1HW * colour_C11 + (1 - cover_1HW) * background_C11


@cache
def canonical_images() -> Tensor:
    """Draw all canonical pictures in the order of `SPECS`: images_NCHW in [0, 1]."""
    return torch.stack([render(prompt) for prompt in SPECS])


def nearest(image_BCHW: Tensor) -> list[str]:
    """Return the prompt whose canonical picture has the least MSE to each image in [0, 1]."""
    candidate_ND = canonical_images().flatten(1)
    image_BD = image_BCHW.detach().float().cpu().flatten(1)
    # |a - b|^2 = |a|^2 - 2 a.b + |b|^2, and |a|^2 does not change which candidate is nearest.
    distance_BN = candidate_ND.square().sum(1) - 2 * image_BD @ candidate_ND.T
    names = list(SPECS)
    return [names[i] for i in distance_BN.argmin(1).tolist()]


def fully_right(image_BCHW: Tensor, prompts: list[str]) -> list[bool]:
    """Return whether each image in [0, 1] has the least MSE, of all canonical pictures, to its prompt's."""
    return [name == prompt for name, prompt in zip(nearest(image_BCHW), prompts, strict=True)]


def mse_to_prompts(image_BCHW: Tensor, prompts: list[str]) -> Tensor:
    """Return mse_B of each image in [0, 1] to the canonical picture of its prompt."""
    expected_BCHW = torch.stack([render(prompt) for prompt in prompts])
    return (image_BCHW.detach().float().cpu() - expected_BCHW).square().flatten(1).mean(1)
