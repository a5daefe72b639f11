"""The best approximation of a matrix by two of low rank: its largest singular directions."""

import torch
from torch import Tensor
from torch.linalg import qr, svd

EXACT = 512
"""Most rows or columns of a matrix that is decomposed in full; a larger one by iteration."""
TURNS, MORE = 4, 16
"""Turns of the iteration, and directions beside those that are wanted: they then have 0.99 of the square
that the exact ones have even if singular values fall as slowly as k^-0.3."""


def largest_directions(matrix: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return left vectors, singular values and right vectors, the largest first, at most `most` of them.

    Source: Eckart and Young 1936; for large matrices Halko et al. 2011, arXiv:0909.4061, algorithm 4.4.
    """
    basis = None
    if min(matrix.shape) > max(EXACT, most + MORE):
        first = torch.randn(matrix.shape[1], most + MORE, generator=torch.Generator().manual_seed(0))
        basis = qr(matrix @ first.to(matrix))[0]
        for _ in range(TURNS):
            basis = qr(matrix @ qr(matrix.T @ basis)[0])[0]
    u, s, vh = svd(matrix if basis is None else basis.T @ matrix, full_matrices=False)
    u = u if basis is None else basis @ u
    return u[:, :most], s[:most], vh[:most].T


def in_halves(u: Tensor, s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [rank, in] and b [out, rank] with b a = u diag(s) v^T.

    The root of each singular value is in both, so that neither is too small for half precision.
    """
    root = s.sqrt()
    return (v * root).T.contiguous(), (u * root).contiguous()
