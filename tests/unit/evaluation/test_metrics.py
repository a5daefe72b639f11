"""Intervals and distances on values known beforehand: closed forms, textbook figures, counted coverage."""

import math

import pytest
import torch

from wandistiller.evaluation.metrics import (
    METRICS,
    Estimate,
    frechet,
    frechet_of_gaussians,
    ratio_of_sums,
    wilson,
)

DOUBLE = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=generator(seed), dtype=DOUBLE)


@pytest.mark.parametrize(  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
    ("hits", "of", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_s_interval_is_the_textbook_s(hits: int, of: int, low: float, high: float) -> None:
    actual = wilson(hits, of)
    assert (actual.low, actual.high) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(of - hits, of)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((actual.low, actual.high))


def test_no_hit_of_the_teacher_gives_no_ratio() -> None:
    for metric in (m for m in METRICS if m.name == "fully_right"):
        assert metric.ratio(torch.tensor([1.0, 0.0]), torch.zeros(2), seed=0) is None


def test_the_bootstrap_s_interval_of_a_mean_covers_it() -> None:
    draws_TN = torch.empty(200, 60, dtype=DOUBLE).exponential_(generator=generator())  # mean 1, and skew
    actual = [ratio_of_sums(x_N, torch.ones(60), seed=t) for t, x_N in enumerate(draws_TN)]
    assert 0.88 < sum(e.low <= 1 <= e.high for e in actual) / 200 < 0.99


def test_the_bootstrap_is_keyed_by_its_seed() -> None:
    x_N, y_N = normal(20, 2, 0).square().T
    assert (
        ratio_of_sums(x_N, y_N, seed=3) == ratio_of_sums(x_N, y_N, seed=3) != ratio_of_sums(x_N, y_N, seed=4)
    )


def test_proportional_numbers_have_one_ratio_without_doubt() -> None:
    x_N = normal(9, 1, 0).square()[:, 0]
    actual = ratio_of_sums(3 * x_N, x_N, seed=0)
    assert (actual.value, actual.low, actual.high) == pytest.approx((3, 3, 3))


def test_one_sample_gives_a_value_and_no_interval() -> None:
    assert ratio_of_sums(torch.tensor([2.0]), torch.tensor([4.0]), seed=0) == Estimate(0.5)


def test_gaussians_with_diagonal_covariances_have_the_closed_distance() -> None:
    a, b = torch.tensor([4.0, 9.0, 0.0], dtype=DOUBLE), torch.tensor([1.0, 1.0, 0.25], dtype=DOUBLE)
    shift = torch.tensor([1.0, -2.0, 0.0], dtype=DOUBLE)
    # |shift|^2 + sum (sqrt a - sqrt b)^2 = 5 + 1 + 4 + 0.25
    assert frechet_of_gaussians(shift, 0 * shift, a.diag(), b.diag()) == pytest.approx(10.25)


def test_covariances_that_do_not_commute_have_the_distance_of_their_matrix_root() -> None:
    root_a, root_b = (normal(4, 4, seed) for seed in (1, 2))
    a, b = root_a @ root_a.T, root_b @ root_b.T
    trace_root = torch.linalg.eigvals(a @ b).real.sqrt().sum()  # tr (A B)^(1/2), from A B itself
    zero = torch.zeros(4, dtype=DOUBLE)
    assert frechet_of_gaussians(zero, zero, a, b) == pytest.approx(
        (a.trace() + b.trace() - 2 * trace_root).item()
    )


def test_equal_samples_have_distance_zero_with_more_features_than_samples_too() -> None:
    for n, d in ((50, 8), (8, 50), (30, 1)):
        x_ND = normal(n, d, 0)
        assert frechet(x_ND, x_ND) < 1e-10


def test_samples_on_lines_at_right_angles_have_the_sum_of_their_variances() -> None:
    x_N, flat_N = normal(9, 1, 0)[:, 0], torch.zeros(9, dtype=DOUBLE)
    x_N = x_N - x_N.mean()
    across, along = torch.stack([x_N, flat_N], dim=1), torch.stack([flat_N, x_N], dim=1)
    assert frechet(across, along) == pytest.approx(2 * x_N.var().item())


def test_the_distance_does_not_change_when_both_sides_turn_and_grows_as_the_square_of_a_scale() -> None:
    x_ND, y_ND = normal(40, 5, 0), 2 * normal(40, 5, 1) + 1
    turned, _ = torch.linalg.qr(normal(5, 5, 2))
    assert frechet(x_ND @ turned, y_ND @ turned) == pytest.approx(frechet(x_ND, y_ND))
    assert frechet(3 * x_ND, 3 * y_ND) == pytest.approx(9 * frechet(x_ND, y_ND))


def test_the_distance_of_many_samples_is_that_of_their_gaussians() -> None:
    x_ND, y_ND = normal(20_000, 3, 0), 2 * normal(20_000, 3, 1) + torch.tensor([3.0, 0, 0])
    assert frechet(x_ND, y_ND) == pytest.approx(9 + 3, rel=0.02)


def test_fewer_samples_of_one_source_lie_further_apart() -> None:
    few, many = (frechet(normal(n, 8, 0), normal(n, 8, 1)) for n in (20, 2000))
    assert few > 20 * many > 0


@pytest.mark.parametrize("n", [2, 3, 40])
def test_a_distance_that_rounding_puts_below_0_is_0(n: int) -> None:
    x_ND = 1e6 + normal(n, 8, 0)
    assert 0.0 <= frechet(x_ND, x_ND.flip(0)) < 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_that_are_not_finite_have_no_distance(value: float) -> None:
    x_ND = normal(9, 3, 0)
    broken_ND = x_ND.index_fill(1, torch.tensor([1]), value)
    assert Estimate(frechet(broken_ND, x_ND)).as_dict()["value"] is None
