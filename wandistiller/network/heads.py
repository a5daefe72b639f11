"""Parts that training adds to a network: projections of hidden states for feature matching, and heads."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from wandistiller.batch import State
from wandistiller.distributed.sequence_parallel import Ranks

PROJECTIONS = "feature_projections"
"""Attribute with the student's trained projections, by block number; they are not exported."""


def add_projections(model: nn.Module, blocks: Iterable[int], width: int) -> None:
    """Give `model` a projection of these blocks' outputs to the teacher's `width`, equal on every rank.

    A linear map without bias that starts as the truncated identity; without weights if the widths are equal.
    """
    inputs = _width(model)
    projection = nn.Identity if inputs == width else partial(nn.Linear, inputs, width, bias=False)
    projections = nn.ModuleDict({str(k): projection() for k in blocks})
    for p in projections.parameters():
        nn.init.eye_(p)
    setattr(model, PROJECTIONS, projections)


def add_heads(model: nn.Module) -> None:
    """Give `model` linear heads on normalised outputs, after half, three quarters and all of its blocks.

    Each makes a number for each patch. Its weights start at 0, equal on every rank, and so do its outputs.
    """
    width, layers = _width(model), len(model.blocks)
    heads = nn.ModuleDict()
    for k in sorted({max(0, layers * quarters // 4 - 1) for quarters in (2, 3, 4)}):
        heads[str(k)] = nn.Sequential(nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 1))
    for p in heads.parameters():
        nn.init.zeros_(p)
    setattr(model, PROJECTIONS, heads)


def _width(model: nn.Module) -> int:
    return model.config.num_attention_heads * model.config.attention_head_dim


def of_made_patches(logits: dict[int, Tensor], batch: State, ranks: Ranks) -> dict[int, Tensor]:
    """Weight the outputs of heads so that their mean is that of the patches which a network makes.

    Those of a given first frame, which is the same in a student's sample and in cached latents, count 0, and
    those of the F - 1 others F / (F - 1): the ranks that share a sample average equal numbers of patches.

    Args:
        logits: logit_BS1 of this rank's patches, by block number.
    """
    if batch.conditioning.first_BCFHW is None:
        return logits
    frames = batch.x_t_BCFHW.shape[2]

    def weighted(logit_BS1: Tensor) -> Tensor:
        weight_F = torch.full((frames,), frames / (frames - 1), device=logit_BS1.device)
        weight_F[0] = 0
        weight_S = weight_F.repeat_interleave(logit_BS1.shape[1] * ranks.degree // frames)
        return logit_BS1 * ranks.part(weight_S[None, :, None])

    return {k: weighted(logit_BS1) for k, logit_BS1 in logits.items()}
