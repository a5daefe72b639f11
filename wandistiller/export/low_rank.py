"""Low-rank adapters of the difference between two networks of one shape: its largest singular directions."""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

EXACT = 512
"""Most rows or columns of a matrix that is decomposed in full; a larger one by iteration."""
TURNS, OVERSAMPLED = 4, 16
"""Turns of the iteration, and directions beside those that are wanted: they then have 0.99 of the square
that the exact ones have even if singular values fall as slowly as k^-0.3."""


def largest_directions(matrix: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return left vectors, singular values and right vectors, the largest first, at most `most` of them.

    Source: Eckart and Young 1936; for large matrices Halko et al. 2011, arXiv:0909.4061, algorithm 4.4.
    """
    if min(matrix.shape) > max(EXACT, most + OVERSAMPLED):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(matrix, most + OVERSAMPLED, TURNS)
    else:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        v = vh.T
    return u[:, :most], s[:most], v[:, :most]


def in_halves(u: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [rank, in] and b [out, rank] with b a = u diag(s) v^T.

    The root of each singular value is in both, so that neither is too small for half precision.
    """
    root = s.sqrt()
    return (v * root).T.contiguous(), (u * root).contiguous()


A, B = ".lora_A.weight", ".lora_B.weight"


class Adapter(NamedTuple):
    """Weights for W + (alpha / rank) B A, by diffusers' names of the layers."""

    state: dict[str, Tensor]
    """NAME.lora_A.weight [rank, in] and NAME.lora_B.weight [out, rank]."""
    alpha: float
    rank: int
    config: dict[str, Any] | None = None
    """peft's; None: alpha is the rank."""
    note: str = ""
    """What a reader of the card must know besides the rank."""
    factors: Mapping[str, float] = MappingProxyType({})
    """alpha / rank of layers."""

    def factor(self, layer: str) -> float:
        return self.factors.get(layer, self.alpha / self.rank)


class Extracted(NamedTuple):
    """An adapter cut out of a difference, and its share of that difference."""

    adapter: Adapter
    share: float
    """Of the squared difference of its layers, what the adapter has."""
    outside: float
    """Share of all squared difference that is elsewhere."""


def extract(
    layers: Collection[str], differences: Iterable[tuple[str, Tensor]], energy: float, most: int
) -> Extracted:
    """Find the LoRA of least rank that keeps `energy` of the squared difference, one rank for all layers.

    Each layer's part is the best of its rank: the largest singular directions.

    Args:
        layers: linear layers that get one.
        differences: name and change of each parameter, float32, of which one is held at a time.
        energy: over 0, up to 1.
    """
    linear = {f"{layer}.weight" for layer in layers}
    factors: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    inside = outside = 0.0
    squares = torch.zeros(most, dtype=torch.float64)
    for name, difference in differences:
        square = difference.double().square().sum().item()
        if name not in linear:
            outside += square
            continue
        inside += square
        factors[name.removesuffix(".weight")] = u, s, v = largest_directions(difference, most)
        squares[: len(s)] += s.double().square()
    reached = squares.cumsum(0) / (inside or 1.0)
    rank = min(int((reached < energy * (1 - 1e-9)).sum()) + 1, most) if inside else 1
    state: dict[str, Tensor] = {}
    for name, (u, s, v) in factors.items():
        state[name + A], state[name + B] = in_halves(u[:, :rank], s[:rank], v[:, :rank])
    share = min(reached[rank - 1].item(), 1.0) if inside else 1.0
    return Extracted(Adapter(state, rank, rank), share, outside / (inside + outside or 1.0))
