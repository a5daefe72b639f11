"""Intervals on values known beforehand: textbook figures, counted coverage."""

import pytest
import torch

from wandistiller.evaluation.metrics import Estimate, ratio_of_sums, wilson
from wandistiller.evaluation.report import cell

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


def test_the_bootstrap_s_interval_of_a_mean_covers_it() -> None:
    draws_TN = torch.empty(200, 60, dtype=DOUBLE).exponential_(generator=generator())  # mean 1, and skew
    actual = [ratio_of_sums(x_N, torch.ones(60), seed=t) for t, x_N in enumerate(draws_TN)]
    assert 0.88 < sum(e.low <= 1 <= e.high for e in actual) / 200 < 0.99


def test_proportional_numbers_have_one_ratio_without_doubt() -> None:
    x_N = normal(9, 1, 0).square()[:, 0]
    actual = ratio_of_sums(3 * x_N, x_N, seed=0)
    assert (actual.value, actual.low, actual.high) == pytest.approx((3, 3, 3))


def test_one_sample_gives_a_value_and_no_interval() -> None:
    assert ratio_of_sums(torch.tensor([2.0]), torch.tensor([4.0]), seed=0) == Estimate(0.5)


def test_a_ratio_to_what_may_be_zero_has_an_interval_without_end_in_the_table() -> None:
    ratio = ratio_of_sums(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0]), seed=0).as_dict()
    assert ratio["high"] is None and cell(ratio) == "2 (1 to inf)"
