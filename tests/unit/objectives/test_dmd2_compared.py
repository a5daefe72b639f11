"""Where dmd2 compares samples, and the part of its gradient along the critic's own error."""

from dataclasses import replace

import pytest
import torch
from dmd2_updates import OF_TEACHER, SCHEDULE, SHAPE, Texts, gaussian, source, start, update_of_student

from wandistiller.batch import STUDENT
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.engine.batch_size import BatchSize
from wandistiller.experts import Expert, expert_at
from wandistiller.network.sampling import few_steps
from wandistiller.objectives.dmd2 import CRITIC, Dmd2
from wandistiller.objectives.rollout import MIXED, ON_PATH, drawn, renoised
from wandistiller.utils.keyed_random import keyed_normal

HIGH, LOW = Expert
S = 0.875


def test_a_projected_update_is_that_of_a_loop_whose_gradient_is_orthogonal_to_the_critic_s_residual() -> None:
    batch, v = start(), keyed_normal((4, *SHAPE), "v").requires_grad_()
    of_critic = gaussian(-0.2, 0.8)
    loss_B = update_of_student(Dmd2(projected=True), batch, v, of_critic).rows_TB[0]
    loss_B.sum().backward()
    at = renoised(batch, v.detach())
    for b, (x_t, t) in enumerate(zip(at.x_t_BCFHW.double(), at.sigma_B.double(), strict=True)):
        x0_teacher, x0_critic = (x_t - t * of_all[b] for of_all in (OF_TEACHER(at), of_critic(at)))
        residual, gradient = at.x0_BCFHW[b] - x0_critic, x0_critic - x0_teacher
        gradient -= (gradient * residual).sum() / residual.square().sum() * residual
        gradient /= (at.x0_BCFHW[b] - x0_teacher).abs().mean()  # as without projection
        assert (gradient * residual).sum().abs() < 1e-9
        assert loss_B[b].item() == pytest.approx((gradient.square().mean() / 2).item(), rel=1e-4)
        expected = (-batch.sigma_B[b] * gradient / gradient.numel()).float()
        torch.testing.assert_close(v.grad[b], expected, rtol=1e-3, atol=1e-6)


def test_a_projected_update_is_the_plain_one_where_the_critic_has_no_error_at_the_sample() -> None:
    batch, v = start(), keyed_normal((4, *SHAPE), "v")
    plain, projected = (
        update_of_student(Dmd2(projected=projected), batch, v, lambda sample: sample.target_BCFHW)
        for projected in (False, True)
    )
    assert plain.rows_TB.min() > 0 and torch.equal(plain.rows_TB, projected.rows_TB)


@pytest.mark.parametrize("step", range(3))
def test_a_sample_on_the_path_is_where_the_student_s_euler_step_passes_its_noise_level(step: int) -> None:
    """A share r of the way from x_k to the sampler's next state; the path's velocity is the student's."""
    batch, v = drawn(source(SCHEDULE), step, 0, ON_PATH), keyed_normal((4, *SHAPE), "v")
    levels = (*SCHEDULE.few.sigmas, 0.0)[batch.exit : batch.exit + 2]
    x_k = keyed_normal((4, *SHAPE), "before the call")
    following = SCHEDULE.few.following(batch.exit, x_k, v, None)
    at = renoised(replace(batch, x_t_BCFHW=x_k, sigma_B=torch.full((4,), levels[0])), v)
    r = ((levels[0] - at.sigma_B) / (levels[0] - levels[1])).view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(at.x_t_BCFHW, (1 - r) * x_k + r * following, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at.x0_BCFHW, x_k - levels[0] * v)
    assert torch.equal(at.target_BCFHW, v)


def test_one_of_two_samples_is_on_the_path_and_the_other_as_without_it_whatever_divides_them() -> None:
    for step in range(20):
        plain, mixed = start(step), drawn(source(SCHEDULE), step, 0, MIXED)
        parts = [drawn(source(SCHEDULE, 2), step, micro, MIXED) for micro in (0, 1)]
        assert torch.equal(mixed.on_path_B, torch.cat([part.on_path_B for part in parts]))
        assert torch.equal(mixed.renoise.sigma_B, torch.cat([part.renoise.sigma_B for part in parts]))
        assert mixed.on_path_B.view(2, 2).sum(1).tolist() == [1, 1] and not plain.on_path_B.any()
        by_noise = ~mixed.on_path_B
        assert torch.equal(mixed.renoise.sigma_B[by_noise], plain.renoise.sigma_B[by_noise])
        assert torch.equal(mixed.x_t_BCFHW, plain.x_t_BCFHW) and mixed.exit == plain.exit


def test_guidance_counts_twice_for_every_second_sample_whatever_divides_them() -> None:
    seen = set()
    for update in range(20):
        (whole,), parts = (
            [
                Dmd2(guidance_share=0.5).draw(STUDENT, source(SCHEDULE, n), update, m)[Dmd2.states].renoise
                for m in range(8 // n)
            ]
            for n in (8, 1)
        )
        assert whole.guided_B.tolist() in ([0, 2] * 4, [2, 0] * 4)
        assert torch.equal(whole.guided_B, torch.cat([part.guided_B for part in parts]))
        seen.add(whole.guided_B[0].item())
    assert seen == {0, 2}


def test_guidance_of_a_third_of_the_samples_is_that_of_all_in_the_mean_over_many_updates() -> None:
    term, texts = Dmd2(guidance_share=1 / 3), source(SCHEDULE)
    means = [
        renoised(batch, torch.zeros_like(batch.x_t_BCFHW)).guided_B.mean()
        for update in range(300)
        for batch in [term.draw(STUDENT, texts, update, 0)[Dmd2.states]]
    ]
    assert sum(means) / len(means) == pytest.approx(1, abs=0.05)
    assert term.draw(CRITIC, texts, 0, 0)[Dmd2.states].renoise.guided_B is None


def test_of_one_sample_an_update_about_half_are_on_the_path() -> None:
    """The student's updates, each sixth, have odd indices alone."""
    alone = MicroBatches(Texts(), SCHEDULE, BatchSize(1, 1, 1), SHAPE)
    assert 60 < sum(drawn(alone, update, 0, MIXED).on_path_B.item() for update in range(5, 1205, 6)) < 140


@pytest.mark.parametrize("trained", [None, *Expert])
def test_levels_on_the_path_are_of_the_call_and_of_the_expert_that_judges_there(
    trained: Expert | None,
) -> None:
    few = few_steps(7.0, 4, S if trained else None)
    schedule = replace(SCHEDULE, shift=7.0, boundary=S, handover=S if trained else None, few=few)
    schedule, experts = replace(schedule, trained=trained), set()
    for update in range(60):
        batch = drawn(source(schedule), update, 0, ON_PATH)
        sigma_B, (begin, end) = batch.renoise.sigma_B, few.ends(batch.exit)
        assert end - 1e-6 <= sigma_B.min() and sigma_B.max() <= begin + 1e-6
        assert {expert_at(sigma, S - 1e-6) for sigma in sigma_B.tolist()} == {batch.renoise.expert}
        experts.add((batch.exit, batch.renoise.expert))
    of_exits = {(0, HIGH), (1, HIGH), (2, LOW), (3, LOW)}  # the second call leads to the boundary
    assert experts == {(exit_, e) for exit_, e in of_exits if trained in (None, e)}


def test_the_critic_alone_learns_with_new_noise() -> None:
    term = Dmd2(projected=True, compare=MIXED)
    states = {role: term.draw(role, source(SCHEDULE), 0, 0)[Dmd2.states] for role in (CRITIC, STUDENT)}
    assert states[STUDENT].on_path_B.any() and not states[CRITIC].on_path_B.any()
