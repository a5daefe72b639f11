"""Fréchet distances and their intervals on values known beforehand: closed forms and counted coverage."""

import math

import pytest
import torch

from wandistiller.evaluation.metrics import (
    MOST_GROUPS,
    Estimate,
    Z,
    frechet,
    frechet_estimate,
    frechet_of_gaussians,
)

DOUBLE = torch.float64


def normal(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def test_gaussians_with_diagonal_covariances_have_the_closed_distance() -> None:
    a, b = torch.tensor([4.0, 9.0, 0.0], dtype=DOUBLE), torch.tensor([1.0, 1.0, 0.25], dtype=DOUBLE)
    shift = torch.tensor([1.0, -2.0, 0.0], dtype=DOUBLE)
    # |shift|^2 + sum (sqrt a - sqrt b)^2 = 5 + 1 + 4 + 0.25
    roots = a.sqrt().diag(), b.sqrt().diag()
    assert frechet_of_gaussians(shift, 0 * shift, *roots) == pytest.approx(10.25)


def test_covariances_that_do_not_commute_have_the_distance_of_their_matrix_root() -> None:
    root_a, root_b = (normal(4, 4, seed) for seed in (1, 2))
    a, b = root_a.T @ root_a, root_b.T @ root_b
    trace_root = torch.linalg.eigvals(a @ b).real.sqrt().sum()  # tr (A B)^(1/2), from A B itself
    zero = torch.zeros(4, dtype=DOUBLE)
    assert frechet_of_gaussians(zero, zero, root_a, root_b) == pytest.approx(
        (a.trace() + b.trace() - 2 * trace_root).item()
    )


def test_equal_samples_have_distance_zero_with_more_features_than_samples_too() -> None:
    for n, d in ((50, 8), (8, 50), (30, 1)):
        x_ND = normal(n, d, 0)
        assert frechet(x_ND, x_ND) < 1e-10


@pytest.mark.parametrize("n", [2, 3, 40])
def test_a_distance_that_rounding_puts_below_0_is_0(n: int) -> None:
    x_ND = 1e6 + normal(n, 8, 0)
    assert 0.0 <= frechet(x_ND, x_ND.flip(0)) < 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_that_are_not_finite_have_no_distance(value: float) -> None:
    x_ND = normal(9, 3, 0)
    broken_ND = x_ND.index_fill(1, torch.tensor([1]), value)
    assert Estimate(frechet(broken_ND, x_ND)).as_dict()["value"] is None


def pairs(count: int) -> list[Estimate]:
    """Estimates between N(0, 1) and N(1, 4) of two numbers, of 60 prompts each: 2 (1 + 1) = 4 in truth."""
    draws = [(normal(60, 2, 2 * t), 1 + 2 * normal(60, 2, 2 * t + 1)) for t in range(count)]
    return [frechet_estimate(a_ND, b_ND) for a_ND, b_ND in draws]


@pytest.mark.slow
def test_the_interval_covers_the_distance_of_the_gaussians() -> None:
    assert 0.88 < sum(e.low <= 4 <= e.high for e in pairs(200)) / 200 < 0.99


def test_the_interval_of_a_shifted_set_is_a_point_as_no_prompt_changes_the_distance() -> None:
    a_ND = normal(20, 3, 0)
    e = frechet_estimate(a_ND, a_ND + 2)
    assert (e.value, e.low, e.high) == pytest.approx((12, 12, 12))


def test_the_interval_of_two_means_is_that_of_their_standard_error() -> None:
    """Of a shift that is large the distance is nearly (mean a)^2."""
    a_N, far = normal(40, 1, 0), 1e4
    e = frechet_estimate(a_N + far, torch.zeros(40, 1, dtype=DOUBLE))
    error = 2 * (a_N.mean() + far) * a_N.std() / math.sqrt(40)
    assert (e.high - e.value) / Z == pytest.approx(error.item(), rel=1e-3)


def test_two_prompts_have_a_distance_without_an_interval() -> None:
    e = frechet_estimate(normal(2, 1, 0), normal(2, 1, 1))
    assert (e.low, e.high) == (None, None) and e.value > 0


def test_many_prompts_are_left_out_in_groups_with_the_same_interval() -> None:
    n = 20 * MOST_GROUPS
    a_ND, b_ND = normal(n, 1, 0), 5 + normal(n, 1, 1)
    e = frechet_estimate(a_ND, b_ND)
    error = 2 * 5 * math.sqrt(2 / n)  # of the square of a difference of means
    assert (e.high - e.value) / Z == pytest.approx(error, rel=0.3)
