"""Fréchet distances between samples' features, and their 95 % confidence intervals.

N is the number of prompts, D of features, F of vectors that a sample gives: its frames, or 1.
"""

import math

import torch
from torch import Tensor

from wandistiller.evaluation.metrics import Estimate, Z

MOST_GROUPS = 50
"""Distances computed for an interval, at most: of many prompts, several are left out together."""


def frechet_estimate(a_NFD: Tensor, b_NFD: Tensor) -> Estimate:
    """Fréchet distance of samples of the same prompts, and what chance among the prompts does to it.

    The interval is the value and 1.96 standard errors of the delete-one-group jackknife to both sides, cut at
    0; none below three prompts. A prompt is left out with all its frames, on both sides. The bootstrap would
    not do: a prompt drawn twice makes a set vary less, so its distances lie above the value, not around it.
    That any distance of few samples is too large is not in the interval.
    Source: Efron and Tibshirani 1993, ch. 11; groups: Künsch 1989, Annals of Statistics 17:1217.
    """
    value, n = frechet(a_NFD.flatten(0, 1), b_NFD.flatten(0, 1)), len(a_NFD)
    if n < 3 or not math.isfinite(value):
        return Estimate(value)
    groups = min(n, MOST_GROUPS)
    group_N = torch.arange(n) % groups
    without = [[x_NFD[group_N != g].flatten(0, 1) for x_NFD in (a_NFD, b_NFD)] for g in range(groups)]
    distance_G = torch.tensor([frechet(*pair) for pair in without], dtype=torch.float64)
    error = ((groups - 1) * distance_G.var(correction=0)).sqrt().item()
    return Estimate(value, max(0.0, value - Z * error), value + Z * error)


def frechet(a_ND: Tensor, b_ND: Tensor) -> float:
    """Fréchet distance (squared) between the Gaussians fitted to two sets of features, in float64.

    At least 0, where rounding would put it below; NaN if a feature is not finite.
    Too large for finite N, by an amount that depends on N, D and both covariances: a set that varies less is
    punished less.
    Source: Heusel et al. 2017, arXiv:1706.08500; the bias: Chong and Forsyth 2020, arXiv:1911.07023.
    """
    a_ND, b_ND = a_ND.double(), b_ND.double()
    if not (a_ND.isfinite().all() and b_ND.isfinite().all()):
        return math.nan
    return frechet_of_gaussians(a_ND.mean(0), b_ND.mean(0), _root(a_ND), _root(b_ND))


def frechet_of_gaussians(mean_a_D: Tensor, mean_b_D: Tensor, root_a_KD: Tensor, root_b_KD: Tensor) -> float:
    """Compute |mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)) from roots of the covariances, A = root^T root.

    Source: Dowson and Landau 1982, J. Multivariate Analysis 12:450.

    tr (A B)^(1/2) is the sum of the singular values of root_a root_b^T, as A B has their squares as
    eigenvalues: no square root of a matrix that is not symmetric, and none of what is nothing but rounding.
    """
    trace_root = torch.linalg.matrix_norm(root_a_KD @ root_b_KD.T, "nuc")
    distance = (mean_a_D - mean_b_D).square().sum() + root_a_KD.square().sum() + root_b_KD.square().sum()
    return max(0.0, (distance - 2 * trace_root).item())


def _root(x_ND: Tensor) -> Tensor:
    """Root of the covariance with min(N, D) rows, which is small for few samples of many features."""
    return torch.linalg.qr(x_ND - x_ND.mean(0), mode="r").R / math.sqrt(len(x_ND) - 1)
