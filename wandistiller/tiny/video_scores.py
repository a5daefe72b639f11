"""The judge of the video teacher's clips, a program without a network: content, motion, speed and flicker.

Every judgement compares a clip with rendered ones. `fully_right` asks which of all 930 canonical clips is the
nearest, so shape, both colours and motion must be right. `speeds` fits the speed of the prompt's own motion,
and `flicker` is the change from frame to frame that this fitted clip does not have. With `begins` clips are
of `first_frames`, whose motions begin in the first frame; prompts are then the names of scenes.

Shape letters: B batch, K speeds, N all canonical scenes, M pairs of shape and motion, C channels, F frames,
H height, W width, P all pixels of a clip.
"""

from functools import cache

import torch
from torch import Tensor

from wandistiller.tiny import clips

SPEEDS = tuple(k / 20 for k in range(31))
"""The speeds that are tried, as shares of the prompt's own: 0 to 1.5."""


@cache
def _forms(begins: bool) -> tuple[list[tuple[str, str]], Tensor]:
    """Draw the cover of each pair of shape and motion at canonical place and size: pairs and cover_MP."""
    pairs = list(dict.fromkeys((scene.shape, scene.motion) for scene in clips.SPECS.values()))
    return pairs, torch.stack([clips.cover(*pair, begins=begins).flatten() for pair in pairs])


def squared_distances(clip_BCFHW: Tensor, *, begins: bool = False) -> Tensor:
    """Compute the squared distance of clips in [0, 1] to all canonical clips: distance_BN, as in `SPECS`.

    A canonical clip is background b + cover m times (colour c - b), so |x - b - m (c - b)|^2 needs only the
    sums of x, x^2, m x, m and m^2 over the pixels, and no scene but its cover is ever rendered.
    """
    pairs, cover_MP = _forms(begins)
    clip_BCP = clip_BCFHW.detach().float().cpu().flatten(2).double()
    cover_MP = cover_MP.double()
    sum_BC, square_B1 = clip_BCP.sum(2), clip_BCP.square().sum((1, 2))[:, None]
    covered_BCM = clip_BCP @ cover_MP.T
    form_N = torch.tensor([pairs.index((scene.shape, scene.motion)) for scene in clips.SPECS.values()])
    colour_NC, background_NC = (
        torch.cat([pair[k].view(1, 3) for pair in map(clips.colours, clips.SPECS.values())]).double()
        for k in (0, 1)
    )
    change_NC = colour_NC - background_NC
    pixels = cover_MP.shape[1]
    ground_BN = square_B1 - 2 * sum_BC @ background_NC.T + pixels * background_NC.square().sum(1)
    products_BN = (covered_BCM[:, :, form_N] * change_NC.T).sum(1)
    products_BN -= cover_MP.sum(1)[form_N] * (background_NC * change_NC).sum(1)
    return ground_BN - 2 * products_BN + cover_MP.square().sum(1)[form_N] * change_NC.square().sum(1)


def nearest(clip_BCFHW: Tensor, *, begins: bool = False) -> list[str]:
    """Return the prompt of the canonical clip with the least squared distance to each clip in [0, 1]."""
    names = list(clips.SPECS)
    return [names[n] for n in squared_distances(clip_BCFHW, begins=begins).argmin(1).tolist()]


def fully_right(clip_BCFHW: Tensor, prompts: list[str], *, begins: bool = False) -> list[bool]:
    """Return whether the nearest canonical clip of each clip in [0, 1] is its prompt's."""
    names = nearest(clip_BCFHW, begins=begins)
    return [name == prompt for name, prompt in zip(names, prompts, strict=True)]


def mse_to_prompts(clip_BCFHW: Tensor, prompts: list[str], *, begins: bool = False) -> Tensor:
    """Return mse_B of each clip in [0, 1] to the canonical clip of its prompt."""
    expected_BCFHW = torch.stack([clips.render(prompt, begins=begins) for prompt in prompts])
    return (clip_BCFHW.detach().float().cpu() - expected_BCFHW).square().flatten(1).mean(1)


def _fitted(clip_CFHW: Tensor, prompt: str, begins: bool) -> tuple[float, Tensor]:
    """Find the speed at which the prompt's canonical clip has the least squared distance, and that clip."""
    tried_KCFHW = torch.stack([clips.render(prompt, speed=speed, begins=begins) for speed in SPEEDS])
    best = (tried_KCFHW - clip_CFHW).square().flatten(1).sum(1).argmin().item()
    return SPEEDS[best], tried_KCFHW[best]


def speeds(clip_BCFHW: Tensor, prompts: list[str], *, begins: bool = False) -> Tensor:
    """Fit the speed of each prompt's motion to its clip in [0, 1]: speed_B, as a share of the true one.

    It is the ratio of ways in pixels for a move, of changes of size for a growth, of angles for a turn. NaN
    for a scene that stands still, which has no speed.
    """
    moves = [clips.SPECS[prompt].motion != clips.STILL for prompt in prompts]
    clip_BCFHW = clip_BCFHW.detach().float().cpu()
    fitted = (_fitted(clip, prompt, begins)[0] for clip, prompt in zip(clip_BCFHW, prompts, strict=True))
    return torch.tensor(list(fitted)).where(torch.tensor(moves), torch.nan)


def flicker(clip_BCFHW: Tensor, prompts: list[str], *, begins: bool = False) -> Tensor:
    """Measure the change between neighbouring frames of clips in [0, 1] that no motion explains: flicker_B.

    It is the mean absolute value, over pixels, colours and pairs of frames, of the change of what is left of
    a clip after the prompt's clip at the fitted speed is subtracted. 0 for a rendered canonical clip.
    """
    left = [
        clip - _fitted(clip, prompt, begins)[1]
        for clip, prompt in zip(clip_BCFHW.detach().float().cpu(), prompts, strict=True)
    ]
    return torch.stack(left).diff(dim=2).abs().flatten(1).mean(1)
