"""DMD2 against scores of Gaussians, sums done by hand, and the sampler that the student is used with."""

import math
import statistics
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from constant_teacher import answered, played
from diffusers import WanTransformer3DModel
from dmd2_updates import OF_TEACHER, SCHEDULE, SHAPE, Texts, gaussian, source, start, update_of_student
from engines import batch_for, loaded
from small_wan import small_transformer
from states import state
from torch import Tensor

from wandistiller.batch import STUDENT, Prediction, State
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.engine.batch_size import BatchSize
from wandistiller.engine.engine_config import CheckpointPolicy
from wandistiller.experts import Expert
from wandistiller.flow import FewSteps, FlowSchedule, clean
from wandistiller.network.blocks import Blocks
from wandistiller.network.sampling import denoise, few_steps
from wandistiller.objectives.dmd2 import CRITIC, Dmd2, heads_loss, towards_teacher
from wandistiller.objectives.objective import Objective
from wandistiller.objectives.rollout import RENOISED, Renoised, Rollout, drawn, renoised
from wandistiller.objectives.script import TEACHER, Ask, Slope
from wandistiller.planner.passes import passes_of
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan import transformer
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.structure import PARTS


def gradient_at(at: Renoised, critic: Callable[[State], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient at samples, where the teacher is `OF_TEACHER`, and its numbers."""
    return towards_teacher(at, OF_TEACHER(at), critic(at))


def score(batch: State, mean: float, deviation: float) -> Tensor:
    t, x = batch.sigma_B.view(-1, 1, 1, 1, 1), batch.x_t_BCFHW
    return -(x - (1 - t) * mean) / ((1 - t) ** 2 * deviation**2 + t**2)


def test_the_gradient_of_gaussians_is_the_difference_of_their_scores() -> None:
    """x0 = (x + t^2 score) / (1 - t), so x0_critic - x0_teacher is t^2 / (1 - t) times the difference."""
    at = renoised(start(), keyed_normal((4, *SHAPE), "v"))
    gradient, _ = gradient_at(at, gaussian(-0.2, 0.8))
    t = at.sigma_B.view(-1, 1, 1, 1, 1)
    difference = t**2 / (1 - t) * (score(at, -0.2, 0.8) - score(at, 0.5, 0.3))
    away = at.x0_BCFHW - (at.x_t_BCFHW + t**2 * score(at, 0.5, 0.3)) / (1 - t)
    expected = difference / away.abs().mean((1, 2, 3, 4), keepdim=True)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_where_critic_and_teacher_agree_there_is_nothing_to_learn() -> None:
    loss = update_of_student(Dmd2(), start(), keyed_normal((4, *SHAPE), "v"), OF_TEACHER)
    assert loss.rows_TB.abs().max() == 0
    assert loss.numbers["cosine"].tolist() == pytest.approx([1.0] * 4)
    assert loss.numbers["gap"].max() == 0 and loss.numbers["critic_lag"].abs().max() == 0


def test_a_longer_critic_is_apart_in_length_alone_and_a_perpendicular_one_has_no_cosine() -> None:
    at = renoised(start(), keyed_normal((4, *SHAPE), "v"))
    signs = torch.tensor([1.0, -1.0]).repeat(at.x_t_BCFHW.numel() // 2).view_as(at.x_t_BCFHW)
    for critic, cosine, gap in ((1.5, 1.0, 0.5), (-1.0, -1.0, 2.0), (signs, 0.0, math.sqrt(2))):
        teacher_BCFHW = torch.full_like(signs, 3.0)
        _, numbers = towards_teacher(at, teacher_BCFHW, teacher_BCFHW * critic)
        assert numbers["cosine"].tolist() == pytest.approx([cosine] * 4, abs=1e-6)
        assert numbers["gap"].tolist() == pytest.approx([gap] * 4)


def test_the_loss_passes_the_difference_of_scores_to_the_samples() -> None:
    batch, v = start(), keyed_normal((4, *SHAPE), "v").requires_grad_()
    critic = gaussian(-0.2, 0.8)
    update_of_student(Dmd2(), batch, v, critic).rows_TB.sum().backward()
    gradient, _ = gradient_at(renoised(batch, v.detach()), critic)
    numel = v[0].numel()  # x0 = x - sigma v, and the loss is a mean over a sample
    expected = -batch.sigma_B.view(-1, 1, 1, 1, 1) * gradient / numel
    torch.testing.assert_close(v.grad, expected)


def test_a_shared_update_has_the_losses_of_the_student_s_and_the_critic_s_own_at_the_same_samples() -> None:
    batch, v = start(), keyed_normal((4, *SHAPE), "v")
    critic = gaussian(-0.2, 0.8)
    networks = {
        TEACHER: lambda q: Prediction(OF_TEACHER(q.state)),
        CRITIC: lambda q: Prediction(critic(q.state)),
    }
    both = answered(
        Dmd2(shared=True).script(STUDENT, {Dmd2.states: batch}, SCHEDULE), networks, lambda _: Prediction(v)
    )
    sample = {Dmd2.states: renoised(batch, v)}
    alone = answered(Dmd2().script(CRITIC, sample, SCHEDULE), networks, lambda _: Prediction(v))
    assert torch.equal(both[CRITIC].rows_TB, alone.rows_TB)
    assert torch.equal(both[STUDENT].rows_TB, update_of_student(Dmd2(), batch, v, critic).rows_TB)


def test_each_loss_of_a_shared_update_teaches_its_own_network_alone() -> None:
    batch, v = start(), keyed_normal((4, *SHAPE), "v").requires_grad_()
    of_critic = keyed_normal((4, *SHAPE), "critic").requires_grad_()
    networks = {TEACHER: lambda q: Prediction(OF_TEACHER(q.state)), CRITIC: lambda _: Prediction(of_critic)}
    script = Dmd2(shared=True).script(STUDENT, {Dmd2.states: batch}, SCHEDULE)
    losses = answered(script, networks, lambda _: Prediction(v))
    for role, learns, other in ((STUDENT, v, of_critic), (CRITIC, of_critic, v)):
        of_both = torch.autograd.grad(losses[role].rows_TB.sum(), (learns, other), allow_unused=True)
        assert of_both[0].abs().max() > 0 and of_both[1] is None


def test_a_subclass_may_sample_otherwise() -> None:
    """From noise to half of it along the student's velocity, in one call."""

    class Halfway(Dmd2):
        def simulated(self, batch: Rollout) -> Generator[Ask, Prediction, Rollout]:
            student = yield Ask(STUDENT, batch)
            return replace(batch, x_t_BCFHW=batch.x_t_BCFHW - student.v_BCFHW / 2, sigma_B=batch.sigma_B / 2)

    batch = start()
    rolled_out = Halfway().roll_out(CRITIC, {Dmd2.states: batch}, SCHEDULE)
    asked: list[Ask] = []
    states = played(rolled_out, lambda ask: asked.append(ask) or Prediction(torch.ones_like(batch.x_t_BCFHW)))
    assert [ask.state.sigma_B[0].item() for ask in asked] == [1.0, 0.5]
    torch.testing.assert_close(states[Dmd2.states].x0_BCFHW, batch.x_t_BCFHW - 1)


@pytest.mark.parametrize(("steps", "sampler"), [(1, "euler"), (2, "euler"), (4, "euler"), (4, "renoise")])
@torch.no_grad()
def test_simulated_states_are_those_of_the_sampler(wan1: Path, steps: int, sampler: str) -> None:
    model, few = loaded(wan1 / "transformer").eval(), few_steps(3.0, steps, None, sampler)
    schedule = FlowSchedule(3.0, None, 0, few=few)
    text_LD = batch_for(model).conditioning.text_BLD[0]
    texts = MicroBatches(Texts(text_LD), schedule, BatchSize(2, 1, 2), (16, 1, 4, 4))

    def velocity(batch: State) -> Tensor:
        return transformer.velocity(model, batch)

    exits = set()
    for step in range(12):
        batch = drawn(texts, step, 0)
        exits.add(batch.exit)
        state = played(Dmd2().simulated(batch), lambda ask: Prediction(velocity(ask.state)))
        new_noise = [keyed_normal((2, 16, 1, 4, 4), "after the exit")] * steps
        new_noise[: len(batch.new_noise)] = batch.new_noise
        given = batch.x_t_BCFHW, batch.conditioning, 40, few, new_noise.__getitem__
        x0, path = denoise(velocity, open_wan(str(wan1)), 3.0, *given)
        sigma, x_BCFHW = path[batch.exit]
        assert state.sigma_B.tolist() == pytest.approx([sigma] * 2)
        torch.testing.assert_close(state.x_t_BCFHW, x_BCFHW)
        if batch.exit == steps - 1:
            torch.testing.assert_close(clean(state.x_t_BCFHW, velocity(state), state.sigma_B), x0)
    assert exits == set(range(steps))


def test_draws_depend_on_update_and_sample_alone_and_samples_are_renoised_within_limits() -> None:
    one, parts = start(3), [drawn(source(SCHEDULE, 2), 3, micro) for micro in (0, 1)]
    for name in ("x_t_BCFHW", "sigma_B"):
        for whole, halves in ((one, parts), (one.renoise, [p.renoise for p in parts])):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(p, name) for p in halves]))
    assert {p.exit for p in parts} == {one.exit} and {p.renoise.expert for p in parts} == {Expert.HIGH_NOISE}
    sigma_N = torch.cat([start(step).renoise.sigma_B for step in range(100)])
    assert sigma_N.min() >= RENOISED[0] and sigma_N.max() <= 0.9801
    assert not torch.equal(one.x_t_BCFHW, start(4).x_t_BCFHW)


S = 0.875
ONE_EXPERT = replace(SCHEDULE, boundary=S, handover=S, trained=Expert.HIGH_NOISE)


def phased(step: int, shape: tuple[int, ...] = SHAPE) -> Rollout:
    schedule = replace(ONE_EXPERT, few=few_steps(7.0, 4, S))
    return drawn(source(schedule, shape=shape), step, 0)


def test_samples_of_the_high_noise_expert_are_renoised_above_the_hand_over_alone() -> None:
    sigma_N = torch.cat([phased(step).renoise.sigma_B for step in range(100)])
    assert sigma_N.min() >= S + RENOISED[0] - 1e-6 and sigma_N.max() <= RENOISED[1] + 1e-6
    assert {phased(step).exit for step in range(50)} == {0, 1} and phased(0).end == S


def test_a_state_at_the_hand_over_has_the_noise_of_the_path_at_every_level_above_it() -> None:
    """x_s = (1 - s) x0 + s e gives x_t = (1 - t) x0 + noise of variance t^2."""
    batch = phased(0)
    x0, e = torch.full_like(batch.x_t_BCFHW, 2.0), keyed_normal(batch.x_t_BCFHW.shape, "e")
    x_s = (1 - S) * x0 + S * e
    to_s = replace(batch, x_t_BCFHW=x_s, sigma_B=torch.full((4,), S))  # a step of length 0
    found, t = renoised(to_s, e - x0), batch.renoise.sigma_B.view(-1, 1, 1, 1, 1)
    a = (1 - t) / (1 - S)
    noise = (found.x_t_BCFHW - (1 - t) * x0 - a * S * e) / (t**2 - (a * S) ** 2).sqrt()
    torch.testing.assert_close(noise, batch.renoise.x_t_BCFHW, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.x0_BCFHW, x0, rtol=1e-4, atol=1e-4)


def test_the_critic_s_target_is_the_derivative_of_the_path_in_t() -> None:
    batch, v = phased(1), keyed_normal((4, *SHAPE), "v")
    double = {name: getattr(batch, name).double() for name in ("x_t_BCFHW", "sigma_B")}

    def at(t_B: torch.Tensor) -> Renoised:
        where = replace(batch.renoise, sigma_B=t_B, x_t_BCFHW=batch.renoise.x_t_BCFHW.double())
        return renoised(replace(batch, renoise=where, **double), v.double())

    t_B, h = batch.renoise.sigma_B.double(), 1e-6
    slope = (at(t_B + h).x_t_BCFHW - at(t_B - h).x_t_BCFHW) / (2 * h)
    torch.testing.assert_close(at(t_B).target_BCFHW, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lag", [0.0, 0.5, -1.0])
def test_a_critic_s_lag_is_its_share_of_what_it_differs_from_the_teacher_whatever_the_noise_of_its_target(
    lag: float,
) -> None:
    """Samples are N(-0.2, 0.8), and the critic is where (1 - lag) critic + lag teacher is exact."""
    batch = phased(0, (4, 1, 128, 128))
    x0 = 0.8 * keyed_normal(batch.x_t_BCFHW.shape, "x0") - 0.2
    at = renoised(batch, batch.x_t_BCFHW - x0)
    exact, teacher = gaussian(-0.2, 0.8)(at), OF_TEACHER(at)
    assert (at.target_BCFHW - exact).square().mean() > 100 * (exact - teacher).square().mean()
    _, numbers = gradient_at(at, lambda _: (exact - lag * teacher) / (1 - lag))
    assert numbers["critic_lag"].mean().item() == pytest.approx(lag, abs=0.1)


def test_a_hand_over_at_0_gives_the_plain_path_and_target() -> None:
    batch, v = start(2), keyed_normal((4, *SHAPE), "v")
    plain, nearly = renoised(batch, v), renoised(replace(batch, end=1e-9), v)
    torch.testing.assert_close(nearly.x_t_BCFHW, plain.x_t_BCFHW)
    torch.testing.assert_close(nearly.target_BCFHW, plain.target_BCFHW)


def test_the_adversarial_gradient_is_that_of_softplus_by_autograd() -> None:
    """D(x_t) = mean of a x_t; the loss of a sample is gan softplus(-D), and ours a mean over its elements."""
    a, batch, v = 3.0, start(), keyed_normal((4, *SHAPE), "v").requires_grad_()

    def slope(asked: Slope) -> Tensor:
        x = asked.state.x_t_BCFHW.detach().requires_grad_()
        logits = {0: (a * x).flatten(1)[..., None]}
        return torch.autograd.grad(asked.value(Prediction(x, logits)), x)[0]

    update_of_student(Dmd2(gan=0.03), batch, v, OF_TEACHER, slope).rows_TB.sum().backward()
    x0 = renoised(batch, v.detach()).x0_BCFHW.requires_grad_()
    t = batch.renoise.sigma_B.view(-1, 1, 1, 1, 1)
    logit_B = a * ((1 - t) * x0 + t * batch.renoise.x_t_BCFHW).flatten(1).mean(1)
    (wanted,) = torch.autograd.grad(torch.nn.functional.softplus(-logit_B).sum(), x0)
    # x0 = x - sigma v; our loss is a mean over a sample's elements, which the gradient is times
    torch.testing.assert_close(
        v.grad, -batch.sigma_B.view(-1, 1, 1, 1, 1) * 0.03 * wanted, rtol=1e-4, atol=1e-8
    )


def test_the_heads_loss_of_a_blind_critic_is_two_log_two_and_falls_where_it_sees() -> None:
    def seen(logit: float) -> Prediction:
        return Prediction(torch.zeros(2), {0: torch.full((2, 5, 1), logit), 1: torch.full((2, 5, 1), logit)})

    assert heads_loss(seen(0.0), seen(0.0)).tolist() == pytest.approx([2 * math.log(2)] * 2)
    expected = 2 * math.log1p(math.exp(-1.0))
    assert heads_loss(seen(-1.0), seen(1.0)).tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    ("trained", "mean_exit"), [(None, 1.5), (Expert.HIGH_NOISE, 0.5), (Expert.LOW_NOISE, 2.5)]
)
def test_calls_without_gradient_are_those_before_the_exits_of_the_trained_expert(
    trained: Expert | None, mean_exit: float
) -> None:
    few = FewSteps((1.0, 0.95, 0.875, 0.7), 0.91)
    schedule = FlowSchedule(7.0, 0.875, 0, handover=0.875, few=few, trained=trained)
    objective = Objective((Dmd2(),))
    student, critic = (
        statistics.mean(one.rolled_out for one in passes_of(objective, role, schedule))
        for role in (STUDENT, CRITIC)
    )
    assert (student, critic) == (mean_exit, mean_exit + 1)


def test_a_shared_update_is_counted_once_in_a_step_and_as_one_of_the_critic_s() -> None:
    objective = Objective((Dmd2(critic_updates=3, shared=True),))
    assert objective.updates == (CRITIC, CRITIC, STUDENT) and objective.others[CRITIC].updates == 3
    assert Objective((Dmd2(critic_updates=1, shared=True),)).updates == (STUDENT,)


def test_a_step_s_updates_are_the_critic_s_and_then_the_student_s() -> None:
    objective = Objective((Dmd2(critic_updates=2),))
    assert [*map(objective.role_of, range(6))] == [CRITIC, CRITIC, STUDENT] * 2
    assert [objective.first_update(step) for step in range(3)] == [0, 3, 6]


@pytest.mark.parametrize("checkpoint", ["blocks", "attention", "feed_forward"])
def test_the_gradient_of_a_network_s_input_does_not_depend_on_what_is_checkpointed(checkpoint: str) -> None:
    x_BCFHW, text_BLD = keyed_normal((2, 16, 1, 4, 4), "x").requires_grad_(), keyed_normal((2, 9, 32), "text")

    def gradient(model: WanTransformer3DModel) -> Tensor:
        v_BCFHW = transformer.velocity(model, state(x_BCFHW, torch.tensor([0.3, 0.9]), text_BLD))
        return torch.autograd.grad(v_BCFHW.square().sum(), x_BCFHW)[0]

    plain, model = small_transformer(0), small_transformer(0)
    with Blocks(model, PARTS, CheckpointPolicy(checkpoint=checkpoint)).stored():
        assert torch.equal(gradient(model), gradient(plain))
