"""Losses against sums done by hand."""

import pytest
import torch
from torch import Tensor

from wandistiller.batch import Batch, Expert
from wandistiller.objectives import OBJECTIVES, VelocityMatching, mean_square, objective_keys

X0, NOISE = torch.zeros(2, 1, 1, 2, 2), torch.full((2, 1, 1, 2, 2), 2.0)
BATCH = Batch(X0, NOISE, X0, torch.tensor([0.5, 0.5]), torch.zeros(2, 1, 1), Expert.HIGH_NOISE)


class Constant:
    """A teacher whose velocity is one number everywhere."""

    def __init__(self, value: float):
        self.value = value

    def velocity(self, batch: Batch) -> Tensor:
        return torch.full_like(batch.x_t_BCFHW, self.value)


def constant(*values: float) -> Tensor:
    return torch.stack([torch.full((1, 1, 2, 2), v) for v in values])


def test_the_target_is_the_teacher_s_velocity() -> None:
    assert torch.equal(VelocityMatching().target(Constant(3.0), BATCH), constant(3.0, 3.0))


def test_equal_velocities_have_no_loss() -> None:
    assert VelocityMatching().loss(constant(3.0, 1.0), constant(3.0, 1.0), BATCH).tolist() == [0.0, 0.0]


def test_the_loss_is_the_mean_square_of_each_sample() -> None:
    assert VelocityMatching().loss(constant(3.0, 1.0), constant(1.0, 2.0), BATCH).tolist() == [4.0, 1.0]


@pytest.mark.parametrize(("weight", "loss"), [(0.0, 4.0), (0.25, 3.25), (1.0, 1.0)])
def test_data_weight_blends_in_the_distance_to_noise_minus_x0(weight: float, loss: float) -> None:
    # v = 3, teacher 1: square 4; noise - x0 = 2: square 1
    assert (
        VelocityMatching(data_weight=weight).loss(constant(3.0, 3.0), constant(1.0, 1.0), BATCH).tolist() == [loss] * 2
    )


def test_the_loss_is_float32_and_does_not_lose_small_terms_of_bf16_input() -> None:
    difference = torch.ones(1, 1, 1, 100, 100, dtype=torch.bfloat16)
    difference[..., 0, 0] = 101.0  # 10 200 / 10 000; a bf16 sum of ones stops at 256
    loss_B = mean_square(difference)
    assert loss_B.dtype is torch.float32 and loss_B.item() == pytest.approx(2.02)


def test_gradient_reaches_the_student_only() -> None:
    v = constant(3.0, 1.0).requires_grad_()
    VelocityMatching().loss(v, constant(1.0, 1.0), BATCH).sum().backward()
    assert torch.equal(v.grad, constant(1.0, 0.0))  # 2 (v - v*) / 4 elements


@pytest.mark.parametrize("weight", [-0.1, 1.1])
def test_a_data_weight_out_of_range_is_a_problem(weight: float) -> None:
    assert len(VelocityMatching(data_weight=weight).problems()) == 1


@pytest.mark.parametrize("weight", [0.0, 0.1, 1.0])
def test_a_data_weight_in_range_is_none(weight: float) -> None:
    assert VelocityMatching(data_weight=weight).problems() == []


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_works_with_its_defaults(name: str) -> None:
    objective = OBJECTIVES[name]()
    loss_B = objective.loss(constant(3.0, 1.0), objective.target(Constant(1.0), BATCH), BATCH)
    assert objective.problems() == [] and loss_B.shape == (2,) and torch.isfinite(loss_B).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_setting_of_an_objective_can_be_given_by_name(name: str) -> None:
    defaults = {key: getattr(OBJECTIVES[name](), key) for key in objective_keys(name)}
    assert OBJECTIVES[name](**defaults) == OBJECTIVES[name]()
