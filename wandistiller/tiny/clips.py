"""The toy world of the embedded video teacher: coloured shapes that stand still, move, grow, shrink or turn.

A prompt such as "a red circle on a blue background, moving left" names one of 930 scenes (6 colours, 5 other
background colours, 4 shapes, 8 motions, without the turning circle, which cannot be seen to turn). `render`
draws its clip, at any speed, with small keyed jitter of position and size so that a scene is a distribution
and not one clip. The middle frame is the same for all motions: half of each lies before it and half behind
it, so jitter of position and size does not look like speed. A tenth of the scenes is held out.

Shape letters: C colour channels (RGB, in [0, 1]), F frames, H height, W width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from wandistiller.tiny.shapes import COLOURS, SHAPES, SUPERSAMPLING, Described, divided, inside, jitter

FRAMES = 9
"""Frames of every clip."""
CLIP_SIZE = 48
"""Height and width of every frame, in pixels."""
SHAPE_RADIUS_PX = 10.0
POSITION_JITTER_PX = 1.5
SIZE_JITTER = 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """Changes from the first to the last frame of a clip, evenly, at speed 1."""

    x_px: float = 0.0
    """Way to the right, in pixels."""
    y_px: float = 0.0
    """Way down, in pixels."""
    growth: float = 0.0
    """Growth of the radius, as a share of the middle frame's."""
    turn_degrees: float = 0.0
    """Turn clockwise."""


BEGUN = 0.75
"""Share of a motion in a clip that begins where other clips have their middle frame."""
WAY_PX, GROWTH, TURN_DEGREES = 16.0, 0.8, 60.0
MOTIONS = {
    "standing still": Motion(),
    "moving left": Motion(x_px=-WAY_PX),
    "moving right": Motion(x_px=WAY_PX),
    "moving up": Motion(y_px=-WAY_PX),
    "moving down": Motion(y_px=WAY_PX),
    "growing": Motion(growth=GROWTH),
    "shrinking": Motion(growth=-GROWTH),
    "turning": Motion(turn_degrees=TURN_DEGREES),
}
STILL = "standing still"
CLIP_COLOURS = ("red", "green", "blue", "yellow", "white", "black")
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "colour": CLIP_COLOURS,
    "shape": SHAPES,
    "background": CLIP_COLOURS,
    "motion": tuple(MOTIONS),
}
TEMPLATES = (
    "a {colour} {shape} on a {background} background, {motion}",
    "{colour} {shape}, {background} background, {motion}",
    "a {colour} {shape} {motion} on a {background} background",
    "on a {background} background there is a {colour} {shape} {motion}",
    "{motion}: a {colour} {shape} on {background}",
    "a {background} background with a {colour} {shape} {motion}",
    "A {colour} {shape} on a {background} background, {motion}.",
)
"""The canonical wording first, then the paraphrases that the text encoder is also trained on."""


@dataclass(frozen=True)
class ClipScene(Described):
    """One clip."""

    templates = TEMPLATES
    motion: str


_SCENES = (ClipScene(*names) for names in product(*ATTRIBUTES.values()))
SPECS = {
    str(scene): scene
    for scene in _SCENES
    if scene.colour != scene.background and (scene.shape, scene.motion) != ("circle", "turning")
}
"""All 930 scenes by canonical prompt, in a fixed order."""
SEEN, HELD_OUT = divided(SPECS)
"""The 837 canonical prompts of training, and the 93 that are in no training stage."""


def cover(
    shape: str, motion: str, *, speed: float = 1.0, moved: Sequence[float] = (0, 0, 0), begins: bool = False
) -> Tensor:
    """Draw how much of each pixel the shape covers: cover_FHW in [0, 1], antialiased.

    Args:
        speed: 1 is the motion's own.
        moved: jitter of x, y and size, each in [-1, 1].
        begins: the first frame is the same for all motions, not the middle one.
    """
    way, (dx, dy, dsize) = MOTIONS[motion], moved
    first, last = (0.0, BEGUN) if begins else (-0.5, 0.5)
    time_F11 = speed * torch.linspace(first, last, FRAMES)[:, None, None]
    grid = (torch.arange(CLIP_SIZE * SUPERSAMPLING) + 0.5) / SUPERSAMPLING - CLIP_SIZE / 2
    radius_F11 = SHAPE_RADIUS_PX * (1 + SIZE_JITTER * dsize) * (1 + way.growth * time_F11)
    x_F1W = (grid - POSITION_JITTER_PX * dx - way.x_px * time_F11) / radius_F11
    y_FH1 = (grid[:, None] - POSITION_JITTER_PX * dy - way.y_px * time_F11) / radius_F11
    angle_F11 = math.radians(way.turn_degrees) * time_F11
    cos_F11, sin_F11 = angle_F11.cos(), angle_F11.sin()  # y grows downwards: a positive angle is clockwise
    turned_x_FHW = cos_F11 * x_F1W + sin_F11 * y_FH1
    turned_y_FHW = cos_F11 * y_FH1 - sin_F11 * x_F1W
    inside_FHW = inside(shape, turned_x_FHW, turned_y_FHW).float()
    return torch.nn.functional.avg_pool2d(inside_FHW, SUPERSAMPLING)


def colours(scene: ClipScene) -> tuple[Tensor, Tensor]:
    """Return the shape's and the background's colour, each as colour_C111."""
    shape, background = (torch.tensor(COLOURS[c]).view(3, 1, 1, 1) for c in (scene.colour, scene.background))
    return shape, background


def render(prompt: str, seed: int | None = None, *, speed: float = 1.0, begins: bool = False) -> Tensor:
    """Draw one clip.

    Args:
        prompt: a canonical prompt, one of `SPECS`.
        seed: key of the jitter (position +-1.5 pixels, size +-8 %, uniform); None draws the canonical clip.
        speed: of the motion; 1 is the prompt's own.
        begins: the first frame is the same for all motions, not the middle one.

    Returns:
        clip_CFHW, float32 in [0, 1].
    """
    scene = SPECS[prompt]
    moved = jitter(prompt, seed)
    cover_FHW = cover(scene.shape, scene.motion, speed=speed, moved=moved, begins=begins)
    colour_C111, background_C111 = colours(scene)
    return cover_FHW * colour_C111 + (1 - cover_FHW) * background_C111
