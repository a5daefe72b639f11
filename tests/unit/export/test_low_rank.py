"""Matrices over the size that is decomposed in full."""

import torch
from torch import Tensor

from wandistiller.export.low_rank import EXACT, in_halves, largest_directions
from wandistiller.utils.keyed_random import keyed_normal

SIZE = EXACT + 88


def with_singular_values(s: Tensor) -> Tensor:
    u, v = (torch.linalg.qr(keyed_normal((SIZE, len(s)), name))[0] for name in "uv")
    return (u * s) @ v.T


def test_a_large_matrix_of_low_rank_is_found_to_rounding() -> None:
    matrix = with_singular_values(torch.tensor([9.0, 5.0, 4.0, 0.5]))
    u, s, v = largest_directions(matrix, 4)
    torch.testing.assert_close(s, torch.tensor([9.0, 5.0, 4.0, 0.5]))
    a, b = in_halves(u, s, v)
    assert a.shape == (4, SIZE) and b.shape == (SIZE, 4)
    torch.testing.assert_close(b @ a, matrix, rtol=1e-5, atol=1e-5)


def test_of_slowly_falling_singular_values_it_has_nearly_the_square_of_the_best() -> None:
    values = torch.arange(1, SIZE + 1).float() ** -0.3
    u, s, v = largest_directions(matrix := with_singular_values(values), 32)
    assert s.square().sum() >= 0.99 * values[:32].square().sum()
    left = (matrix - (u * s) @ v.T).square().sum()
    torch.testing.assert_close(left, matrix.square().sum() - s.square().sum(), rtol=1e-4, atol=0)


def test_it_is_the_same_every_time_and_draws_no_random_numbers_of_others() -> None:
    matrix = with_singular_values(torch.arange(1, SIZE + 1).float() ** -1.0)
    before = torch.get_rng_state()
    first, second = (largest_directions(matrix, 8) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
