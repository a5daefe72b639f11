"""The best approximation of a matrix by two of low rank: its largest singular directions."""

import torch
from torch import Tensor

EXACT = 512
"""Most rows or columns of a matrix that is decomposed in full; a larger one by iteration."""
TURNS = 8


def largest_directions(matrix: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return left vectors, singular values and right vectors, the largest first, at most `most` of them.

    Source: Eckart and Young 1936; for large matrices Halko et al. 2011, arXiv:0909.4061.
    """
    if min(matrix.shape) <= max(EXACT, most):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :most], s[:most], vh[:most].T
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.svd_lowrank(matrix, most, TURNS)


def in_halves(u: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [rank, in] and b [out, rank] with b a = u diag(s) v^T.

    The root of each singular value is in both, so that neither is too small for half precision.
    """
    root = s.sqrt()
    return (v * root).T.contiguous(), (u * root).contiguous()
