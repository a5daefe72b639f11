"""Velocities of a teacher's cached path, against straight lines and a parabola."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wandistiller.batch import Batch, Conditioning
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule, States
from wandistiller.utils.keyed_random import keyed_normal

STEPS_DOWN = torch.tensor([1.0, 0.9, 0.6, 0.2, 0.0])
SCHEDULE = FlowSchedule(shift=5.0, boundary=0.875, seed=7)


def states(v: Tensor, x0: Tensor) -> Tensor:
    """x_BSCFHW of the straight line with velocity v that ends at x0."""
    return torch.stack([x0 + sigma * v for sigma in STEPS_DOWN], dim=1)


def on_path(x_BSCFHW: Tensor, step: int = 0, schedule: FlowSchedule = SCHEDULE) -> Batch:
    indices = [4 * step + i for i in range(4)]
    return schedule.on_path(
        STEPS_DOWN, states_of(x_BSCFHW), Conditioning(torch.zeros(4, 1, 1)), indices, step
    )


def states_of(x_BSCFHW: Tensor) -> States:
    return lambda state_B: x_BSCFHW[torch.arange(len(state_B)), state_B]


@pytest.fixture(scope="module")
def line() -> tuple[Tensor, Tensor]:
    return keyed_normal((4, 2, 1, 4, 4), "v"), keyed_normal((4, 2, 1, 4, 4), "end")


@pytest.mark.parametrize("step", range(4))
def test_the_target_on_a_straight_path_is_its_velocity(line: tuple[Tensor, Tensor], step: int) -> None:
    batch = on_path(states(*line), step)
    torch.testing.assert_close(batch.v_BCFHW, line[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(batch.x0_BCFHW, line[1], rtol=0, atol=5e-6)


def test_the_target_on_a_bent_path_is_the_segment_s_own_slope() -> None:
    x_BSCFHW = STEPS_DOWN.square().view(1, -1, 1, 1, 1, 1).expand(4, -1, 1, 1, 2, 2)
    below = dict(zip(STEPS_DOWN.tolist(), STEPS_DOWN[1:].tolist(), strict=False))
    for step in range(10):
        batch = on_path(x_BSCFHW, step)
        for sigma, v in zip(batch.sigma_B.tolist(), batch.v_BCFHW, strict=True):
            torch.testing.assert_close(v, torch.full_like(v, sigma + below[sigma]))  # (s^2 - e^2) / (s - e)


def test_a_sample_on_a_path_stands_at_the_start_of_its_segment(line: tuple[Tensor, Tensor]) -> None:
    x_BSCFHW = states(*line)
    batch = on_path(x_BSCFHW)
    for i, sigma in enumerate(batch.sigma_B):
        assert torch.equal(batch.x_t_BCFHW[i], x_BSCFHW[i, STEPS_DOWN.tolist().index(sigma.item())])


def test_a_path_s_segments_are_split_at_the_boundary() -> None:
    assert SCHEDULE.segments(Expert.HIGH_NOISE, STEPS_DOWN.tolist()) == [0, 1]
    assert SCHEDULE.segments(Expert.LOW_NOISE, STEPS_DOWN.tolist()) == [2, 3]
    assert replace(SCHEDULE, boundary=None).segments(Expert.HIGH_NOISE, STEPS_DOWN.tolist()) == [0, 1, 2, 3]


def test_noised_and_path_states_of_a_step_are_of_the_same_expert(line: tuple[Tensor, Tensor]) -> None:
    for step in range(50):
        noised = SCHEDULE.noised(
            line[1], Conditioning(torch.zeros(4, 1, 1)), [4 * step + i for i in range(4)], step
        )
        batch = on_path(states(*line), step)
        assert batch.expert is noised.expert
        assert ((batch.sigma_B >= 0.875) == (batch.expert is Expert.HIGH_NOISE)).all()


def test_every_segment_is_drawn_as_often_as_its_expert_s_others(line: tuple[Tensor, Tensor]) -> None:
    one = replace(SCHEDULE, boundary=None)
    drawn = torch.cat([on_path(states(*line), step, one).sigma_B for step in range(400)])
    counts = [(drawn == sigma).sum().item() for sigma in STEPS_DOWN[:-1]]
    assert sum(counts) == 1600 and all(abs(c - 400) < 4 * math.sqrt(1600 * 0.25 * 0.75) for c in counts)


def test_a_segment_depends_on_seed_step_and_sample_index_alone(line: tuple[Tensor, Tensor]) -> None:
    whole, x_BSCFHW = on_path(states(*line), 3), states(*line)
    torch.manual_seed(5)
    for i in (3, 1, 0, 2):
        alone = SCHEDULE.on_path(
            STEPS_DOWN, states_of(x_BSCFHW[i : i + 1]), Conditioning(torch.zeros(1, 1, 1)), [12 + i], 3
        )
        assert alone.sigma_B[0] == whole.sigma_B[i] and torch.equal(alone.x_t_BCFHW[0], whole.x_t_BCFHW[i])
