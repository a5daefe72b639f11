"""The schedule against closed forms, and draws that depend on nothing but seed, step and sample index."""

import math
from dataclasses import replace

import pytest
import torch

from wandistiller.batch import Batch, Expert
from wandistiller.flow import (
    FlowSchedule,
    expert_at,
    keyed_generator,
    keyed_normal,
    path,
    timestep,
)

SHIFTS = (0.5, 1.0, 3.0, 5.0, 12.0)
TWO = FlowSchedule(shift=5.0, boundary=0.875, seed=7, global_batch=8)
ONE = replace(TWO, boundary=None)
STEPS = 4000


def some_batch(schedule: FlowSchedule, indices: list[int], step: int = 3) -> Batch:
    """Samples whose x0 is a function of their index alone."""
    x0_BCFHW = torch.stack([keyed_normal((2, 1, 4, 4), "x0", i) for i in indices])
    text_BLD = torch.stack([keyed_normal((5, 3), "text", i) for i in indices])
    return schedule.noised(x0_BCFHW, text_BLD, indices, step)


def rows(batch: Batch) -> list[tuple[torch.Tensor, ...]]:
    return list(
        zip(batch.x0_BCFHW, batch.noise_BCFHW, batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD, strict=True)
    )


@pytest.mark.parametrize("shift", SHIFTS)
def test_unshifted_inverts_shifted(shift: float) -> None:
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    schedule = replace(TWO, shift=shift)
    back = torch.tensor(
        [schedule.unshifted(sigma) for sigma in schedule.shifted(u).tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(back, u, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", SHIFTS)
def test_shift_keeps_the_endpoints(shift: float) -> None:
    assert replace(TWO, shift=shift).shifted(torch.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]


def test_shift_1_changes_nothing_and_shift_3_maps_a_half_to_three_quarters() -> None:
    half = torch.tensor([0.5])
    assert replace(TWO, shift=1.0).shifted(half).item() == 0.5
    assert replace(TWO, shift=3.0).shifted(half).item() == 0.75


@pytest.mark.parametrize("shift", [5.0, 12.0])
def test_experts_are_drawn_as_often_as_the_closed_form_says(shift: float) -> None:
    schedule = replace(TWO, shift=shift)
    high = sum(schedule.draw_expert(step, 0) is Expert.HIGH_NOISE for step in range(STEPS)) / STEPS
    share = schedule.high_noise_share()
    assert abs(high - share) < 3 * math.sqrt(share * (1 - share) / STEPS)


def test_one_expert_has_the_share_1() -> None:
    assert ONE.high_noise_share() == 1.0
    assert {ONE.draw_expert(step, 0) for step in range(100)} == {Expert.HIGH_NOISE}


@pytest.mark.parametrize("expert", list(Expert))
def test_sigma_lies_on_the_expert_s_side_of_the_boundary(expert: Expert) -> None:
    sigmas = [TWO.draw_sigma(expert, step, 8 * step) for step in range(STEPS)]
    assert {expert_at(sigma, TWO.boundary) for sigma in sigmas} == {expert}
    assert 0 < min(sigmas) and max(sigmas) <= 1


@pytest.mark.parametrize(
    "schedule", [ONE, TWO, replace(TWO, shift=12.0)], ids=["one", "two", "two, shift 12"]
)
def test_sigma_over_all_experts_has_the_one_expert_distribution(schedule: FlowSchedule) -> None:
    sigmas = [schedule.draw_sigma(schedule.draw_expert(step, 0), step, 8 * step) for step in range(STEPS)]
    u = torch.tensor(sorted(schedule.unshifted(sigma) for sigma in sigmas), dtype=torch.float64)
    uniform = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    assert (u - uniform).abs().max() < 1.63 / math.sqrt(STEPS)  # Kolmogorov-Smirnov, 1 %


def test_the_boundary_itself_belongs_to_the_high_noise_expert() -> None:
    assert expert_at(0.875, TWO.boundary) is Expert.HIGH_NOISE
    assert expert_at(math.nextafter(0.875, 0), TWO.boundary) is Expert.LOW_NOISE


def test_all_ranks_draw_the_same_expert_for_10000_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        torch.manual_seed(rank)
        drawn.append([TWO.draw_expert(step, 0) for step in range(10000)])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("schedule", [ONE, TWO], ids=["one expert", "two experts"])
@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[7], [2, 1], [0, 6, 5, 4, 3]], [[7, 6, 5, 4, 3, 2, 1, 0]]]
)
def test_other_splits_of_a_step_give_bitwise_the_same_rows(
    schedule: FlowSchedule, split: list[list[int]]
) -> None:
    first = 3 * 8  # of step 3
    whole = some_batch(schedule, [first + i for i in range(8)])
    for part in split:
        batch = some_batch(schedule, [first + i for i in part])
        assert batch.expert is whole.expert
        for row, i in zip(rows(batch), part, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, rows(whole)[i], strict=True))


def test_earlier_draws_and_torch_s_own_seed_change_nothing() -> None:
    before = some_batch(TWO, [24, 25])
    torch.manual_seed(1)
    some_batch(TWO, [80], step=10)
    after = some_batch(TWO, [24, 25])
    assert torch.equal(before.x_t_BCFHW, after.x_t_BCFHW)


@pytest.mark.parametrize("other", [{"seed": 8}, {"step": 4}, {"index": 25}])
def test_noise_changes_with_seed_step_and_sample(other: dict[str, int]) -> None:
    key = {"seed": 7, "step": 3, "index": 24}
    one, two = (
        some_batch(replace(ONE, seed=k["seed"], global_batch=100), [k["index"]], k["step"])
        for k in (key, key | other)
    )
    assert not torch.equal(one.noise_BCFHW, two.noise_BCFHW) and not torch.equal(one.sigma_B, two.sigma_B)


def test_each_block_of_a_step_draws_its_own_expert() -> None:
    schedule = replace(TWO, expert_blocks=2)
    for step in range(50):
        halves = [some_batch(schedule, [8 * step + slot], step).expert for slot in (0, 3, 4, 7)]
        assert halves == [schedule.draw_expert(step, block) for block in (0, 0, 1, 1)]


def test_blocks_of_one_step_draw_independently() -> None:
    pairs = [(TWO.draw_expert(step, 0), TWO.draw_expert(step, 1)) for step in range(STEPS)]
    both = sum(a is b is Expert.HIGH_NOISE for a, b in pairs) / STEPS
    p = TWO.high_noise_share() ** 2
    assert abs(both - p) < 3 * math.sqrt(p * (1 - p) / STEPS)


def test_noise_is_standard_normal() -> None:
    noise = keyed_normal((100_000,), 7, "noise")
    assert abs(noise.mean()) < 3 / math.sqrt(100_000) and abs(noise.std() - 1) < 3 / math.sqrt(200_000)


def test_keys_that_only_look_alike_give_other_draws() -> None:
    keys = [(1, 23), (12, 3), ("1", 23), (1, 2, 3), (123,)]
    assert len({torch.rand((), generator=keyed_generator(*key)).item() for key in keys}) == len(keys)


def test_path_starts_at_the_data_and_ends_at_the_noise() -> None:
    x0, noise = (keyed_normal((2, 3, 1, 4, 4), "path", i) for i in range(2))
    x_t = path(x0, noise, torch.tensor([0.0, 1.0]))
    assert torch.equal(x_t[0], x0[0]) and torch.equal(x_t[1], noise[1])


def test_model_time_is_1000_sigma_in_float32() -> None:
    t_B = timestep(torch.tensor([0.0, 0.5, 1.0], dtype=torch.bfloat16))
    assert t_B.tolist() == [0.0, 500.0, 1000.0] and t_B.dtype is torch.float32
