"""Losses against sums done by hand and closed forms."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from constant_teacher import BATCH, NOISE, Constant, losses
from states import state
from torch import Tensor

from wandistiller.batch import NOISED, PATH, Batch, Conditioning, Prediction, concat_batches, split_prediction
from wandistiller.flow import path
from wandistiller.objectives.base import SIGMA_WEIGHTS, mean_square
from wandistiller.objectives.objective import OBJECTIVES, read_objective
from wandistiller.objectives.velocity import VelocityMatching
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal

NAMES, WEIGHTS = ", ".join(OBJECTIVES), ", ".join(SIGMA_WEIGHTS)


def constant(*values: float) -> Tensor:
    return torch.stack([torch.full((1, 1, 2, 2), v) for v in values])


def velocity_loss(v: Tensor, v_teacher: Tensor, batch: Batch = BATCH, **settings: Any) -> Tensor:
    return VelocityMatching(**settings).loss(Prediction(v), Prediction(v_teacher), batch)


def problems(given: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_objective(given)
    return caught.value.problems


# velocity


def test_the_loss_is_the_mean_square_of_each_sample() -> None:
    assert velocity_loss(constant(3.0, 1.0), constant(1.0, 2.0)).tolist() == [4.0, 1.0]


@pytest.mark.parametrize(("weight", "loss"), [(0.0, 4.0), (0.25, 3.25), (1.0, 1.0)])
def test_data_weight_blends_in_the_distance_to_noise_minus_x0(weight: float, loss: float) -> None:
    # v = 3, teacher 1: square 4; noise - x0 = 2: square 1
    assert velocity_loss(constant(3.0, 3.0), constant(1.0, 1.0), data_weight=weight).tolist() == [loss] * 2


def test_the_loss_is_float32_and_does_not_lose_small_terms_of_bf16_input() -> None:
    difference = torch.ones(1, 1, 1, 100, 100, dtype=torch.bfloat16)
    difference[..., 0, 0] = 101.0  # 10 200 / 10 000; a bf16 sum of ones stops at 256
    loss_B = mean_square(difference)
    assert loss_B.dtype is torch.float32 and loss_B.item() == pytest.approx(2.02)


@pytest.mark.parametrize("name", ["uniform", "logit_normal", "cosmap"])
def test_a_sigma_weight_that_is_a_density_has_the_mean_1(name: str) -> None:
    sigma = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    assert SIGMA_WEIGHTS[name](sigma).mean().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", SIGMA_WEIGHTS)
def test_a_sigma_weight_is_finite_and_not_negative_at_both_ends(name: str) -> None:
    weight = SIGMA_WEIGHTS[name](torch.tensor([0.0, 1e-8, 0.5, 1 - 1e-7, 1.0]))
    assert torch.isfinite(weight).all() and (weight >= 0).all() and weight[2] > 0


@pytest.mark.parametrize(
    ("name", "sigma", "weight"),
    [
        ("logit_normal", 0.5, 4 / math.sqrt(2 * math.pi)),
        ("cosmap", 0.5, 4 / math.pi),
        ("cosmap", 1.0, 2 / math.pi),
        ("min_snr", 0.1, 0.05),
    ],
)
def test_sigma_weights_are_their_closed_forms(name: str, sigma: float, weight: float) -> None:
    assert SIGMA_WEIGHTS[name](torch.tensor([sigma])).item() == pytest.approx(weight, rel=1e-5, abs=1e-7)


def test_min_snr_weighs_the_error_of_x0_by_the_signal_to_noise_ratio() -> None:
    sigma, error = torch.tensor([0.4, 0.7, 0.95]), 3.0  # SNR 2.25 and less, so the limit of 5 is not reached
    snr = ((1 - sigma) / sigma).square()
    torch.testing.assert_close(SIGMA_WEIGHTS["min_snr"](sigma) * error**2, snr * (sigma * error) ** 2)


def test_the_sigma_weight_multiplies_each_sample_s_loss() -> None:
    batch = replace(BATCH, sigma_B=torch.tensor([0.5, 1.0]))
    loss_B = velocity_loss(constant(3.0, 3.0), constant(1.0, 1.0), batch, sigma_weight="cosmap")
    torch.testing.assert_close(loss_B, torch.tensor([16 / math.pi, 8 / math.pi]))


MEAN, DEVIATION, SAMPLES = 0.7, 0.5, 400_000


def gaussian_data(sigma: float) -> Batch:
    """x0 ~ N(MEAN, DEVIATION^2), each sample a number of its own."""
    x0, noise = (keyed_normal((SAMPLES, 1, 1, 1, 1), name) for name in ("x0", "noise"))
    x0 = MEAN + DEVIATION * x0
    sigma_B = torch.full((SAMPLES,), sigma)
    return replace(
        BATCH,
        x0_BCFHW=x0,
        noise_BCFHW=noise,
        x_t_BCFHW=path(x0, noise, sigma_B),
        sigma_B=sigma_B,
        conditioning=Conditioning(torch.zeros(SAMPLES, 1, 1)),
    )


def closed_form(sigma: float) -> tuple[float, float, float]:
    """E[noise - x0 | x_t] = slope x_t + offset, and the variance about it.

    x_t is normal with mean (1 - sigma) MEAN and variance V = (1 - sigma)^2 DEVIATION^2 + sigma^2; noise - x0
    has the covariance sigma - (1 - sigma) DEVIATION^2 with it and the variance 1 + DEVIATION^2.
    """
    variance = ((1 - sigma) * DEVIATION) ** 2 + sigma**2
    covariance = sigma - (1 - sigma) * DEVIATION**2
    slope = covariance / variance
    return slope, -MEAN - slope * (1 - sigma) * MEAN, 1 + DEVIATION**2 - covariance**2 / variance


@pytest.mark.parametrize("sigma", [0.1, 0.5, 0.9])
def test_the_data_term_is_least_at_a_gaussian_data_set_s_closed_form_velocity(sigma: float) -> None:
    batch, (slope, offset, floor) = gaussian_data(sigma), closed_form(sigma)
    coefficients = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def loss(c: Tensor) -> Tensor:
        v = (c[0] * batch.x_t_BCFHW.double() + c[1]).float()
        return VelocityMatching(data_weight=1).loss(Prediction(v), None, batch).double().mean()

    gradient = torch.autograd.functional.jacobian(loss, coefficients)
    curvature = torch.autograd.functional.hessian(loss, coefficients)
    # the loss is a parabola, so one Newton step is its minimum
    least = -torch.linalg.solve(curvature, gradient)
    assert least.tolist() == pytest.approx([slope, offset], abs=6 / math.sqrt(SAMPLES) / sigma)
    assert loss(least).item() == pytest.approx(floor, rel=0.01)


# sums


def test_a_sum_weighs_its_terms() -> None:
    objective = read_objective([{"name": "velocity", "weight": 2}, {"name": "trajectory", "weight": 0.5}])
    states = {NOISED: BATCH, PATH: replace(BATCH)}
    predictions = {NOISED: Prediction(constant(3.0, 1.0)), PATH: Prediction(constant(0.0, 2.0))}
    of_state = {id(state): predictions[kind] for kind, state in states.items()}
    loss_TB = losses(objective, Constant(1.0), lambda state: of_state[id(state)], states)
    assert loss_TB.tolist() == [[4.0, 0.0], [4.0, 0.0]] and objective.total(loss_TB).tolist() == [10.0, 0.0]


def test_split_undoes_join() -> None:
    given = BATCH.conditioning.map(lambda t: t[:1])
    one = state(NOISE[:1], torch.ones(1), given.text_BLD)
    batches = {NOISED: BATCH, PATH: one}
    both = concat_batches(batches)
    parts = split_prediction(Prediction(both.x_t_BCFHW, {0: both.conditioning.text_BLD}), batches)
    for name, batch in batches.items():
        assert torch.equal(parts[name].v_BCFHW, batch.x_t_BCFHW)
        assert torch.equal(parts[name].features[0], batch.conditioning.text_BLD)


def test_the_teacher_is_needed_unless_only_data_or_paths_are_matched() -> None:
    data_alone = {"name": "velocity", "data_weight": 1}
    given = ("velocity", "trajectory", ["trajectory", "feature"], [data_alone, "trajectory"])
    assert [read_objective(g).needs_teacher for g in given] == [True, False, True, False]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("velocity", "velocity"),
        ({"name": "velocity", "data_weight": 0.1}, "velocity(data_weight=0.1)"),
        ({"data_weight": 0.1}, "velocity(data_weight=0.1)"),
        (["velocity"], "velocity"),
        (
            ["velocity", {"name": "feature", "weight": 0.1, "blocks": [1, 3]}, "trajectory"],
            "velocity + 0.1 feature(blocks=[1, 3]) + trajectory",
        ),
    ],
)
def test_an_objective_reads_as_a_sum_of_what_differs_from_the_defaults(given: Any, text: str) -> None:
    assert str(read_objective(given)) == text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_weight": 1.1}, "`objective.data_weight` is 1.1. Write a number less than or equal to 1."),
        (
            {"sigma_weight": "snr"},
            f'`objective.sigma_weight` is "snr". Write one of: {WEIGHTS}. Did you mean `min_snr`?',
        ),
        ({"name": "feature", "blocks": []}, "`objective.blocks` is []. Write a list that is not empty."),
        (
            {"name": "feature", "teacher_blocks": [1]},
            "`objective.teacher_blocks` is [1]. Write as many as there are `blocks`.",
        ),
        (
            ["velocity", {"name": "trajectory", "blocks": [1]}],
            "`objective[1].blocks` is [1]. Unknown key. Known keys: weight.",
        ),
        (
            ["velocity", "trajectori"],
            f'`objective[1]` is "trajectori". Write one of: {NAMES}. Did you mean `trajectory`?',
        ),
        (["velocity", "velocity"], "`objective` names velocity twice. Keep one."),
    ],
)
def test_a_wrong_objective_is_refused_with_a_remedy(given: Any, message: str) -> None:
    assert problems(given) == [f"recipe: {message}"]


def test_all_problems_of_a_sum_are_reported_at_once() -> None:
    assert len(problems([{"data_weight": 2}, {"name": "feature", "weight": -1, "blocks": 1}, "x"])) == 4
