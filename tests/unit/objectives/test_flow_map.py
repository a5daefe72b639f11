"""Flow maps against a plain loop, and against the exact map of a Gaussian."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from constant_teacher import answered
from states import state
from torch import Tensor

from wandistiller.batch import NOISED, STUDENT, Batch, Prediction, State
from wandistiller.flow import FlowSchedule, with_noise
from wandistiller.objectives.base import RunFacts
from wandistiller.objectives.flow_map import STEP, FlowMap
from wandistiller.objectives.objective import read_objective
from wandistiller.objectives.script import TEACHER
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal

SCHEDULE = FlowSchedule(shift=3, boundary=None, seed=0)
SHAPE = 2, 1, 2, 2
MEAN, DEVIATION = 0.3, 0.5
"""Of the clean latents."""
Map = Callable[[Tensor, Tensor, Tensor], Tensor]


def noised(samples: int, step: int = 0) -> Batch:
    """Return such latents with noise, as a run of a flow map is given them."""
    index_B = [step * samples + i for i in range(samples)]
    x0_BCFHW = MEAN + DEVIATION * keyed_normal((samples, *SHAPE), "x0", step)
    conditioning = state(x0_BCFHW, torch.ones(samples), torch.zeros(samples, 1, 1)).conditioning
    batch = SCHEDULE.noised(x0_BCFHW, conditioning, index_B, step)
    return replace(batch, end_B=SCHEDULE.ends(batch.sigma_B, index_B, step))


def loss(student: Map, batch: Batch, path: Callable[[Tensor, Tensor], Tensor], **settings: float) -> Tensor:
    """loss_B of a map u(x, t, r) on a path of the teacher's velocity v(x, t)."""

    def of_student(given: State) -> Prediction:
        levels = (level_B.view(-1, 1, 1, 1, 1) for level_B in (given.sigma_B, given.end_B))
        return Prediction(student(given.x_t_BCFHW, *levels))

    def of_teacher(given: State) -> Prediction:
        return Prediction(path(given.x_t_BCFHW, given.sigma_B.view(-1, 1, 1, 1, 1)))

    networks = {TEACHER: lambda ask: of_teacher(ask.state), STUDENT: lambda ask: of_student(ask.state)}
    script = FlowMap(**settings).script(STUDENT, {NOISED: batch}, SCHEDULE)
    return answered(script, networks, of_student).rows_TB[0]


def moments(t: Tensor | float) -> tuple[Tensor | float, Tensor | float]:
    """Mean and deviation of x_t."""
    return (1 - t) * MEAN, (((1 - t) * DEVIATION) ** 2 + t**2) ** 0.5


def velocity(x: Tensor, t: Tensor) -> Tensor:
    """E[noise - x0 | x_t]; its flow keeps (x_t - mean) / deviation."""
    mean, deviation = moments(t)
    return (x - mean) * (t - (1 - t) * DEVIATION**2) / deviation**2 - MEAN


def exact(x: Tensor, t: Tensor, r: Tensor) -> Tensor:
    """The mean velocity of that flow from t to r."""
    (mean, deviation), (mean_r, deviation_r) = moments(t), moments(r)
    led = mean_r + (x - mean) * deviation_r / deviation
    return torch.where(t > r, (x - led) / (t - r).clamp(min=1e-9), velocity(x, t))


def some_map(x: Tensor, t: Tensor, r: Tensor) -> Tensor:
    return torch.sin(3 * x + t) * (1 + r) + t * x - r


@pytest.mark.parametrize("data_weight", [0.0, 0.3, 1.0])
def test_the_loss_is_that_of_a_plain_loop(data_weight: float) -> None:
    batch, expected = noised(16), []
    ends = {"at t": 0, "at 0": 0, "between": 0}
    for i in range(16):
        x, t, r = batch.x_t_BCFHW[i], batch.sigma_B[i], batch.end_B[i]
        ends["at t" if r == t else "between" if r > 0 else "at 0"] += 1
        v = (1 - data_weight) * velocity(x, t) + data_weight * (batch.noise_BCFHW[i] - batch.x0_BCFHW[i])
        later, earlier = min(t + STEP, torch.tensor(1.0)), max(t - STEP, r)
        up = some_map(x + (later - t) * v, later, r)
        down = some_map(x + (earlier - t) * v, earlier, r)
        change = (t - r) * (up - down) / (later - earlier)
        weight = (v**2).mean() / ((v**2).mean() + (change**2).mean())
        expected.append(weight * ((some_map(x, t, r) - (v - change)) ** 2).mean())
    assert min(ends.values()) > 0
    ours = loss(some_map, batch, velocity, data_weight=data_weight)
    torch.testing.assert_close(ours, torch.stack(expected), rtol=1e-6, atol=1e-6)


def test_at_r_equal_to_t_it_is_velocity_matching_and_at_pure_noise_finite() -> None:
    batch = noised(8)
    batch = replace(batch, sigma_B=torch.ones(8), end_B=torch.ones(8))
    plain = (some_map(batch.x_t_BCFHW, torch.ones(()), torch.ones(())) - velocity(batch.x_t_BCFHW, 1.0)) ** 2
    torch.testing.assert_close(loss(some_map, batch, velocity), plain.flatten(1).mean(1))


def test_the_exact_map_of_a_gaussian_is_the_fixed_point() -> None:
    batch = noised(64)
    inside = (batch.sigma_B < 1 - STEP) & (batch.sigma_B - batch.end_B > STEP)
    errors = loss(exact, batch, velocity)[inside | (batch.end_B == batch.sigma_B)]
    assert len(errors) > 40 and errors.max() < 1e-6
    assert loss(lambda x, t, r: velocity(x, t), batch, velocity)[inside].mean() > 0.01


def test_half_of_the_samples_end_where_they_begin_and_a_quarter_at_data() -> None:
    sigma_B, index_B = torch.full((4000,), 0.8), list(range(4000))
    end_B = SCHEDULE.ends(sigma_B, index_B, 3)
    assert (end_B == 0.8).float().mean() == pytest.approx(0.5, abs=0.03)
    assert (end_B == 0).float().mean() == pytest.approx(0.25, abs=0.03)
    assert ((end_B >= 0) & (end_B <= 0.8)).all()
    free = SCHEDULE.unshifted(end_B[(end_B > 0) & (end_B < 0.8)]) / SCHEDULE.unshifted(torch.tensor(0.8))
    assert free.quantile(0.5).item() == pytest.approx(0.5, abs=0.05)


def test_ends_are_keyed_by_seed_step_and_sample_whatever_rank_has_it() -> None:
    sigma_B, index_B = torch.linspace(0.1, 1, 64), list(range(64))
    whole = SCHEDULE.ends(sigma_B, index_B, 3)
    parts = [SCHEDULE.ends(sigma_B[at], index_B[at], 3) for at in (slice(0, 10), slice(10, 64))]
    assert torch.equal(whole, torch.cat(parts))
    others = SCHEDULE.ends(sigma_B, index_B, 4), replace(SCHEDULE, seed=1).ends(sigma_B, index_B, 3)
    assert not any(torch.equal(whole, other) for other in others)


def test_what_diffusers_cannot_draw_with_is_refused_before_hours_are_lost() -> None:
    dmd2 = {"name": "dmd2", "sampler": "flow_map", "critic_updates": 1}
    objective, usual = read_objective(["flow_map", dmd2]), {"layers": 2, "teacher_layers": 2}
    assert objective.combined_problems(RunFacts(**usual)) == []
    texts = {
        "has_two_experts": "must lead from noise to data",
        "teaches_flow_map": "is a flow map already",
        "joins_frames": "AnyFlowPipeline",
    }
    for fact, text in texts.items():
        problem = objective.combined_problems(RunFacts(**usual, **{fact: True}))[-1]
        assert text in problem


def test_it_is_not_summed_with_what_leads_elsewhere() -> None:
    with pytest.raises(ConfigError, match="flow_map, which leads to every lower noise level"):
        read_objective(["flow_map", "velocity"])


def test_with_noise_alone_a_state_has_no_end() -> None:
    batch = noised(2)
    keys = [(0, "n", 0), (0, "n", 1)]
    made = with_noise(batch.x0_BCFHW, batch.conditioning, batch.expert, [0.5, 0.5], keys)
    assert made.end_B is None and len(made.tensors()) + 1 == len(batch.tensors())
    again = batch.with_tensors([t + 1 for t in batch.tensors()])
    assert torch.equal(again.end_B, batch.end_B + 1)
