"""How near two sets of samples are, and how sure one can be of a figure: distances and 95 % confidence intervals.

N is the number of prompts (or samples), which are the independent units of every interval; D the number of features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wandistiller.noise import keyed_generator

Z = 1.959963984540054  # the normal distribution's 97.5 % point
RESAMPLES = 2000
JACKKNIFE_GROUPS = 32


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the ends of its 95 % confidence interval; None where there are too few samples for one."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, six digits."""
        six = {k: getattr(self, k) for k in ("value", "low", "high")}
        return {k: None if v is None or not math.isfinite(v) else float(f"{v:.6g}") for k, v in six.items()}


def wilson(hits: int, of: int, z: float = Z) -> Estimate:
    """The share hits / of in [0, 1]. Source: Wilson 1927, JASA 22:209; it keeps its coverage at 0 and at 1."""
    middle = (hits + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * math.sqrt(hits * (of - hits) / of + z * z / 4)
    return Estimate(hits / of, middle - half if hits else 0.0, middle + half if hits < of else 1.0)


def paired_share_ratio(first_N: list[bool], second_N: list[bool]) -> Estimate | None:
    """Share of hits in `second` over that in `first`, on the same prompts; None if neither or `first` has no hit.

    A closed form and no bootstrap: where both hit everything, every resample does, and the interval would be [1, 1].
    Source: Bonett and Price 2006, Statistics in Medicine 25:3039: Wilson's interval of either share, at a z that is
    shrunk by what the pairing saves, and the ratio of their opposite ends.
    """
    both = list(zip(first_N, second_N, strict=True))
    either, unequal = sum(a or b for a, b in both), sum(a != b for a, b in both)
    x1, x2 = sum(first_N), sum(second_N)
    if not x1:
        return None
    s1, s2 = (math.sqrt((1 - (x + 1) / (either + 2)) / (x + 1)) for x in (x1, x2))
    z = Z * math.sqrt((unequal + 2) / ((x1 + 1) * (x2 + 1))) / (s1 + s2)
    one, two = wilson(x1, either, z), wilson(x2, either, z)
    return Estimate(x2 / x1, two.low / one.high, two.high / one.low)


def ratio_of_sums(top_N: Tensor, bottom_N: Tensor, seed: int) -> Estimate:
    """sum(top) / sum(bottom) of paired numbers; with ones below, the mean.

    The interval is the percentile bootstrap's over the N pairs, keyed by `seed`. Source: Efron and Tibshirani 1993, ch. 13.
    """
    top_N, bottom_N = top_N.double(), bottom_N.double()
    value = (top_N.sum() / bottom_N.sum()).item()
    if len(top_N) < 2:
        return Estimate(value)
    drawn_RN = torch.randint(len(top_N), (RESAMPLES, len(top_N)), generator=keyed_generator(seed, "bootstrap"))
    ratio_R = top_N[drawn_RN].sum(1) / bottom_N[drawn_RN].sum(1)
    low, high = ratio_R.quantile(ratio_R.new_tensor([0.025, 0.975])).tolist()
    return Estimate(value, low, high)


def jackknife(statistic: Callable[[Tensor], float], n: int) -> Estimate:
    """`statistic` of the samples whose indices it is given, of all n, freed of its bias of order 1 / n; a normal interval.

    Bias and standard error come from leaving out one of up to 32 groups at a time. No bootstrap: samples that are drawn twice
    make covariances too small, and a Fréchet distance too large. Source: Efron and Tibshirani 1993, ch. 10 and 11.
    """
    everything, groups = torch.arange(n), min(n, JACKKNIFE_GROUPS)
    without = torch.tensor([statistic(everything[everything % groups != g]) for g in range(groups)], dtype=torch.float64)
    value = groups * statistic(everything) - (groups - 1) * without.mean().item()
    half = Z * math.sqrt((groups - 1) * (without - without.mean()).square().mean().item())
    return Estimate(value, value - half, value + half)


def principal(sets: list[Tensor]) -> list[Tensor]:
    """Each set of features in the N / 2 directions in which all of them together vary most; unchanged if there are no more.

    A covariance needs more samples than features, and `jackknife` frees a distance of its bias only then.
    """
    n, d = sets[0].shape
    if d <= n // 2:
        return sets
    pooled_MD = torch.cat(sets).double()
    basis_KD = torch.linalg.svd(pooled_MD - pooled_MD.mean(0), full_matrices=False)[2][: n // 2]
    return [features_ND.double() @ basis_KD.T for features_ND in sets]


def frechet(a_ND: Tensor, b_ND: Tensor) -> float:
    """Fréchet distance (squared) between the Gaussians fitted to two sets of features, in float64.

    Too large for finite N, by an amount that depends on N, D and both covariances: a set that varies less is punished less.
    Source: Heusel et al. 2017, arXiv:1706.08500; the bias: Chong and Forsyth 2020, arXiv:1911.07023.
    """
    a_ND, b_ND = a_ND.double(), b_ND.double()
    covariances = (torch.atleast_2d(x_ND.T.cov()) for x_ND in (a_ND, b_ND))
    return frechet_of_gaussians(a_ND.mean(0), b_ND.mean(0), *covariances)


def frechet_estimate(a_ND: Tensor, b_ND: Tensor) -> Estimate:
    """`frechet` of samples that belong together in pairs, such as by their prompts, freed of its bias: around 0, and as often
    below, for two sets of one source. D must not be over N / 2; see `principal`."""
    return jackknife(lambda kept: frechet(a_ND[kept], b_ND[kept]), len(a_ND))


def frechet_of_gaussians(mean_a_D: Tensor, mean_b_D: Tensor, a_DD: Tensor, b_DD: Tensor) -> float:
    """|mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)). Source: Dowson and Landau 1982, J. Multivariate Analysis 12:450.

    tr (A B)^(1/2) is the sum of the singular values of A^(1/2) B^(1/2): no square root of a matrix that is not symmetric,
    and none of eigenvalues that are nothing but rounding.
    """
    trace_root = torch.linalg.matrix_norm(_root(a_DD) @ _root(b_DD), "nuc")
    distance = (mean_a_D - mean_b_D).square().sum() + a_DD.trace() + b_DD.trace() - 2 * trace_root
    return max(0.0, distance.item())


def _root(covariance_DD: Tensor) -> Tensor:
    """The symmetric square root; eigenvalues below zero are rounding."""
    values_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    return vectors_DD * values_D.clamp(min=0).sqrt() @ vectors_DD.T
