"""The schedule against closed forms, and draws that depend on nothing but seed, step and sample index."""

import math
from dataclasses import replace

import pytest
import torch

from wandistiller.batch import Batch, Conditioning
from wandistiller.experts import Expert, expert_at
from wandistiller.flow import FlowSchedule, path
from wandistiller.utils.keyed_random import keyed_generator, keyed_normal

TWO = FlowSchedule(shift=5.0, boundary=0.875, seed=7)
ONE = replace(TWO, boundary=None)
STEPS = 4000


def some_batch(schedule: FlowSchedule, indices: list[int], step: int = 3) -> Batch:
    """Samples whose x0 is a function of their index alone."""
    x0_BCFHW = torch.stack([keyed_normal((2, 1, 4, 4), "x0", i) for i in indices])
    text_BLD = torch.stack([keyed_normal((5, 3), "text", i) for i in indices])
    return schedule.noised(x0_BCFHW, Conditioning(text_BLD), indices, step)


def rows(batch: Batch) -> list[tuple[torch.Tensor, ...]]:
    b = batch
    return list(zip(b.x0_BCFHW, b.noise_BCFHW, b.x_t_BCFHW, b.sigma_B, b.conditioning.text_BLD, strict=True))


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 5.0, 12.0])
def test_the_shift_keeps_the_endpoints_and_is_inverted_by_unshifted(shift: float) -> None:
    schedule, u = replace(TWO, shift=shift), [i / 100 for i in range(101)]
    assert (schedule.shifted(0.0), schedule.shifted(1.0)) == (0.0, 1.0)
    assert [schedule.unshifted(schedule.shifted(n)) for n in u] == pytest.approx(u, rel=0, abs=1e-12)


def test_shift_1_changes_nothing_and_shift_3_maps_a_half_to_three_quarters() -> None:
    assert [replace(TWO, shift=shift).shifted(0.5) for shift in (1.0, 3.0)] == [0.5, 0.75]


def test_one_expert_has_the_share_1() -> None:
    assert ONE.high_noise_share() == 1.0
    assert {ONE.draw_expert(step) for step in range(100)} == {Expert.HIGH_NOISE}


@pytest.mark.parametrize("expert", list(Expert))
def test_sigma_lies_on_the_expert_s_side_of_the_boundary(expert: Expert) -> None:
    sigmas = [TWO.draw_sigma(expert, step, 8 * step) for step in range(STEPS)]
    assert {expert_at(sigma, TWO.boundary) for sigma in sigmas} == {expert}
    assert 0 < min(sigmas) and max(sigmas) <= 1


@pytest.mark.parametrize(
    "schedule", [ONE, TWO, replace(TWO, shift=12.0)], ids=["one", "two", "two, shift 12"]
)
def test_sigma_over_both_experts_has_the_distribution_of_one_expert(schedule: FlowSchedule) -> None:
    sigmas = [schedule.draw_sigma(schedule.draw_expert(step), step, 8 * step) for step in range(STEPS)]
    u = torch.tensor(sorted(schedule.unshifted(sigma) for sigma in sigmas), dtype=torch.float64)
    uniform = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    assert (u - uniform).abs().max() < 1.63 / math.sqrt(STEPS)  # Kolmogorov-Smirnov, 1 %


def test_the_boundary_itself_belongs_to_the_high_noise_expert() -> None:
    assert expert_at(0.875, TWO.boundary) is Expert.HIGH_NOISE
    assert expert_at(math.nextafter(0.875, 0), TWO.boundary) is Expert.LOW_NOISE


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


def test_draws_depend_on_no_rank_no_earlier_draw_and_not_on_torch_s_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        torch.manual_seed(rank)
        batches.append([some_batch(TWO, [8 * step, 8 * step + 1], step) for step in range(100)])
        some_batch(TWO, [800], step=100)
    for first, second in zip(*batches, strict=True):
        assert first.expert is second.expert and torch.equal(first.x_t_BCFHW, second.x_t_BCFHW)


@pytest.mark.parametrize("other", [{"seed": 8}, {"step": 4}, {"index": 25}])
def test_noise_changes_with_seed_step_and_sample(other: dict[str, int]) -> None:
    key = {"seed": 7, "step": 3, "index": 24}
    one, two = (some_batch(replace(ONE, seed=k["seed"]), [k["index"]], k["step"]) for k in (key, key | other))
    assert not torch.equal(one.noise_BCFHW, two.noise_BCFHW) and not torch.equal(one.sigma_B, two.sigma_B)


def test_keys_that_only_look_alike_give_other_draws() -> None:
    keys = [(1, 23), (12, 3), ("1", 23), (1, 2, 3), (123,)]
    assert len({torch.rand((), generator=keyed_generator(*key)).item() for key in keys}) == len(keys)


def test_path_starts_at_the_data_and_ends_at_the_noise() -> None:
    x0, noise = (keyed_normal((2, 3, 1, 4, 4), "path", i) for i in range(2))
    x_t = path(x0, noise, torch.tensor([0.0, 1.0]))
    assert torch.equal(x_t[0], x0[0]) and torch.equal(x_t[1], noise[1])
