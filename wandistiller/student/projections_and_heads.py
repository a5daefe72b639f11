"""Parts that training adds to a network: projections of hidden states for feature matching, and heads."""

from collections.abc import Iterable
from functools import partial

from torch import nn

from wandistiller.wan.transformer_config import TransformerConfig

PROJECTIONS = "feature_projections"
"""Attribute with the student's trained projections, by block number; they are not exported."""


def add_projections(model: nn.Module, blocks: Iterable[int], width: int) -> None:
    """Give `model` a projection of these blocks' outputs to the teacher's `width`, equal on every rank.

    A linear map without bias that starts as the truncated identity; without weights if the widths are equal.
    """
    own = TransformerConfig.of(model.config).width
    projection = nn.Identity if own == width else partial(nn.Linear, own, width, bias=False)
    projections = nn.ModuleDict({str(k): projection() for k in blocks})
    for p in projections.parameters():
        nn.init.eye_(p)
    setattr(model, PROJECTIONS, projections)


def add_heads(model: nn.Module) -> None:
    """Give `model` linear heads on normalised outputs, after half, three quarters and all of its blocks.

    Each makes a number for each patch. Its weights start at 0, equal on every rank, and so do its outputs.
    """
    width, layers = TransformerConfig.of(model.config).width, len(model.blocks)
    heads = nn.ModuleDict()
    for k in sorted({max(0, layers * quarters // 4 - 1) for quarters in (2, 3, 4)}):
        heads[str(k)] = nn.Sequential(nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 1))
    for p in heads.parameters():
        nn.init.zeros_(p)
    setattr(model, PROJECTIONS, heads)
