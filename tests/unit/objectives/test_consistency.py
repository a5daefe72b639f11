"""Consistency against exact flow maps, sums done by hand, and plain autograd in every ZeRO stage."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from constant_teacher import BATCH, answered, losses, played
from deepspeed.utils import safe_get_full_grad
from engines import batch_for, engine, learner_of, teacher_of
from small_wan import small_transformer
from states import state
from torch import Tensor

from wandistiller.batch import NOISED, STUDENT, Batch, Prediction
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.consistency import Consistency
from wandistiller.objectives.objective import Objective
from wandistiller.objectives.script import TEACHER, Ask
from wandistiller.objectives.velocity import VelocityMatching
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan import transformer

SCHEDULE = FlowSchedule(shift=1, boundary=None, seed=0)
SIGMA_B = torch.tensor([1.0, 0.75, 0.4, 0.05])
Velocity = Callable[[Tensor, Tensor], Tensor]


def states(sigma_B: Tensor = SIGMA_B, expert: Expert = Expert.HIGH_NOISE) -> Batch:
    x_BCFHW = keyed_normal((len(sigma_B), 2, 1, 4, 4), "x").double()
    return state(x_BCFHW, sigma_B, torch.zeros(len(sigma_B), 1, 1), expert)


def loss(teacher: Velocity, student: Velocity, schedule: FlowSchedule = SCHEDULE, **settings: Any) -> Tensor:
    """loss_B of functions of x and sigma."""
    batch, term = states(), Consistency(**settings)

    def of(velocity: Velocity, given: Batch) -> Tensor:
        return velocity(given.x_t_BCFHW, given.sigma_B.double().view(-1, 1, 1, 1, 1))

    velocities = {TEACHER: teacher, STUDENT: student}
    networks = {role: lambda ask: Prediction(of(velocities[ask.role], ask.state)) for role in velocities}
    script = term.script(STUDENT, {NOISED: batch}, schedule)
    return answered(script, networks, lambda given: Prediction(of(student, given))).rows_TB[0]


POINT = 0.3
"""The only clean latent there is: all paths are straight, and every velocity is (x - POINT) / sigma."""


@pytest.mark.parametrize("settings", [{}, {"intervals": 3}, {"edges": 2}, {"intervals": "continuous"}])
def test_straight_paths_are_a_fixed_point_with_any_settings(settings: dict[str, Any]) -> None:
    def straight(x: Tensor, sigma: Tensor) -> Tensor:
        return (x - POINT) / sigma.clamp(min=1e-9)  # at 0 it has no weight

    assert loss(straight, straight, **settings).max() < 1e-9


DEVIATION = 0.5


def spread(sigma: Tensor | float) -> Tensor:
    """The deviation of x_t, whose clean latents have the mean 0 and DEVIATION."""
    return (((1 - sigma) * DEVIATION) ** 2 + sigma**2) ** 0.5


def guided(x: Tensor, sigma: Tensor) -> Tensor:
    """E[noise - x0 | x_t] of these latents; its flow keeps x_t / spread(t)."""
    return x * (sigma - (1 - sigma) * DEVIATION**2) / spread(sigma) ** 2


def exact(x: Tensor, sigma: Tensor, ends: Callable[[Tensor], Tensor] = torch.zeros_like) -> Tensor:
    """The average velocity of that flow from sigma to the end of its segment."""
    end = ends(sigma)
    mean = x * (1 - spread(end) / spread(sigma)) / (sigma - end).clamp(min=1e-12)
    return torch.where(sigma > end, mean, guided(x, sigma))


@pytest.mark.parametrize("edges", [None, 2, 4])
def test_the_flow_map_of_a_gaussian_is_the_fixed_point_up_to_the_square_of_the_teacher_s_step(
    edges: int | None,
) -> None:
    def ends(sigma: Tensor) -> Tensor:
        return SCHEDULE.segment_end(sigma.flatten(), edges, Expert.HIGH_NOISE).view_as(sigma)

    few, many = (
        loss(guided, lambda x, sigma: exact(x, sigma, ends), intervals=n, edges=edges).sqrt()
        for n in (200, 400)
    )
    # an Euler step of length d ends d^2 beside the flow; the target is off by that over the segment's length
    torch.testing.assert_close(many, few / 4, rtol=0.1, atol=1e-9)
    assert (few < loss(guided, guided, intervals=200).sqrt() / 10).all()


def test_the_target_is_the_mean_of_the_teacher_s_step_and_the_student_s_rest_of_the_segment() -> None:
    batch = replace(BATCH, x_t_BCFHW=torch.ones_like(BATCH.x_t_BCFHW), sigma_B=torch.tensor([0.75, 0.2]))
    asked, velocities = [], {TEACHER: 1.0, STUDENT: 4.0}

    def answer(ask: Ask) -> Prediction:
        asked.append(ask.state)
        return Prediction(torch.full_like(BATCH.x_t_BCFHW, velocities[ask.role]))

    target = played(Consistency(intervals=4).target(batch, SCHEDULE), answer)
    # from 0.75 to 0.5, a third of the way to 0: 1/3 + 2/3 x 4; from 0.2 to 0: the teacher's alone
    assert target[0][:, 0, 0, 0, 0].tolist() == pytest.approx([3.0, 1.0])
    assert asked[1].x_t_BCFHW[:, 0, 0, 0, 0].tolist() == pytest.approx([0.75, 0.8])
    assert asked[0] is batch and asked[1].sigma_B.tolist() == [0.5, 0.0]


def test_segments_end_at_the_next_noise_level_of_the_sampler_and_at_the_hand_over() -> None:
    shifted = replace(SCHEDULE, shift=5.0)
    assert shifted.steps(4) == pytest.approx([1, 0.9375, 0.8333, 0.625], abs=1e-4)
    sigma_B = torch.tensor([1.0, 0.9375, 0.9, 0.3])
    high, low = Expert.HIGH_NOISE, Expert.LOW_NOISE
    ends = [0.9375, 0.8333, 0.8333, 0]
    assert shifted.segment_end(sigma_B, 4, high).tolist() == pytest.approx(ends, abs=1e-4)
    assert shifted.segment_end(sigma_B, None, high).tolist() == [0, 0, 0, 0]
    two = replace(shifted, boundary=0.875, handover=0.875)
    assert two.segment_end(sigma_B[:3], 4, high).tolist() == pytest.approx([0.9375, 0.875, 0.875])
    assert two.segment_end(sigma_B[2:], 4, low).tolist() == pytest.approx(ends[2:], abs=1e-4)


def test_continuous_divides_the_gradient_by_its_size() -> None:
    """The residual is 3 everywhere, the share of the step a = 0.01 / 0.5: 2 x 3 / (3 + 0.1 a) / elements."""
    batch, term = states(torch.tensor([0.5])), Consistency(intervals="continuous")
    zero = torch.zeros_like(batch.x_t_BCFHW)
    target = played(term.target(batch, SCHEDULE), lambda _: Prediction(zero))
    v = torch.full_like(zero, 3.0).requires_grad_()
    (loss_1,) = term.loss(Prediction(v), target, batch)
    (gradient,) = torch.autograd.grad(loss_1, v)
    assert gradient.flatten().tolist() == pytest.approx([6 / (3 + 0.002) / v.numel()] * v.numel())


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.usefixtures("one_rank")
def test_gradients_are_those_of_plain_autograd_in_every_stage(wan1: Path, stage: int) -> None:
    teacher, model = teacher_of(wan1), small_transformer(5, 2)
    objective = Objective((VelocityMatching(), Consistency(intervals=5, edges=2)))
    batch = batch_for(model)

    def plain(given: Batch) -> Tensor:
        return transformer.velocity(model, given)

    def total(student: Callable[[Batch], Tensor]) -> Tensor:
        networks = lambda given: Prediction(student(given)), torch.no_grad()(student)
        loss_TB = losses(objective, teacher, networks[0], {NOISED: batch}, SCHEDULE, networks[1])
        return objective.total(loss_TB).mean()

    total(plain).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    student = learner_of(small_transformer(5, 2), engine(zero_optimization=zero))
    student.backward(Expert.HIGH_NOISE, total(student.velocity))
    for name, p in student.engine(Expert.HIGH_NOISE).module.named_parameters():
        torch.testing.assert_close(safe_get_full_grad(p), expected[name], rtol=1e-4, atol=1e-7)
