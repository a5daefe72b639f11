"""Colours that a prompt of the embedded worlds does not ask for: a clean picture has its two and mixtures.

Shape letters: B batch, C colour channels (RGB, in [0, 1]), F frames, H height, W width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from wandistiller.tiny import clips, shapes

WINDOW_PX, FAR = 3, 0.4
"""A window of so many pixels in height and width is a blotch if they are farther than that on average."""
SCENES: dict[str, shapes.Described] = {**shapes.SPECS, **clips.SPECS}
"""Scenes of both worlds by name."""
WORLDS = {
    (1, shapes.IMAGE_SIZE, shapes.IMAGE_SIZE): shapes.SPECS.keys(),
    (clips.FRAMES, clips.CLIP_SIZE, clips.CLIP_SIZE): clips.SPECS.keys(),
}
"""Names of scenes by frames, height and width of their samples."""


def are_scenes(names: Sequence[str], size: tuple[int, int, int]) -> bool:
    """Return whether samples of these names and of this size (frames, height, width) are all of one world."""
    return set(names) <= WORLDS.get(size, set())


def off_colour(pixels_BCFHW: Tensor, names: Sequence[str]) -> Tensor:
    """Return distance_BFHW of each pixel's colour from the line between the two colours of its scene.

    It is Euclidean, in RGB: 0 for the two and for their mixtures, at most 1.74.
    """
    pixels_BFHWC = pixels_BCFHW.detach().float().cpu().movedim(1, -1)
    scenes = [SCENES[name] for name in names]
    colour_BC, background_BC = (
        torch.tensor([shapes.COLOURS[getattr(scene, which)] for scene in scenes])
        for which in ("colour", "background")
    )
    background_B111C = background_BC[:, None, None, None]
    line_B111C = colour_BC[:, None, None, None] - background_B111C
    from_background_BFHWC = pixels_BFHWC - background_B111C
    share_BFHW1 = (from_background_BFHWC * line_B111C).sum(-1, keepdim=True)
    share_BFHW1 = (share_BFHW1 / line_B111C.square().sum(-1, keepdim=True)).clamp(0, 1)
    return (from_background_BFHWC - share_BFHW1 * line_B111C).norm(dim=-1)


def have_blotches(distance_BFHW: Tensor) -> Tensor:
    """Return whether each sample has a blotch in any frame, from its pixels' distances: bool_B."""
    mean_BFHW = torch.nn.functional.avg_pool2d(distance_BFHW, WINDOW_PX, stride=1)
    return (mean_BFHW > FAR).flatten(1).any(1)
