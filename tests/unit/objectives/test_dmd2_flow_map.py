"""dmd2 whose student is a flow map: samples of three jumps at most."""

from dataclasses import replace

import pytest
import torch
from constant_teacher import answered, played
from dmd2_updates import OF_TEACHER, SCHEDULE, gaussian, source
from torch import Tensor

from wandistiller.batch import STUDENT, Prediction, State
from wandistiller.flow import FLOW_MAP, NUMBERS
from wandistiller.network.sampling import few_steps
from wandistiller.objectives.dmd2 import CRITIC, Dmd2
from wandistiller.objectives.objective import read_objective
from wandistiller.objectives.rollout import Rollout, drawn
from wandistiller.objectives.script import TEACHER, Ask, Loss
from wandistiller.planner.passes import passes_of

FOUR = replace(SCHEDULE, few=few_steps(3.0, 4, None, FLOW_MAP))
TERM = Dmd2(sampler=FLOW_MAP, critic_updates=1)
CARRIED = replace(TERM, shared=True, carried=True)
of_critic = gaussian(-0.2, 0.8)
MEAN, DEVIATION = 0.3, 0.5
"""Of the clean latents."""


def mapped(state: State, mean: Tensor | float = MEAN, deviation: Tensor | float = DEVIATION) -> Tensor:
    """The exact mean velocity of a flow that keeps (x_t - its mean) / its deviation."""
    t, r = (level_B.view(-1, 1, 1, 1, 1) for level_B in (state.sigma_B, state.end_B))
    of_t, of_r = ((((1 - s) * deviation) ** 2 + s**2).sqrt() for s in (t, r))
    led = (1 - r) * mean + (state.x_t_BCFHW - (1 - t) * mean) * of_r / of_t
    return (state.x_t_BCFHW - led) / (t - r)


def levels(state: State) -> tuple[float, float]:
    return state.sigma_B[0].item(), state.end_B[0].item()


def sampled(
    term: Dmd2, update: int, role: str = STUDENT, carried: Tensor | None = None
) -> tuple[State, list[tuple[float, float]]]:
    """Where an update learns, and the levels from which and to which the student was asked before."""
    states, asked = term.draw(role, source(FOUR), update, 0), []
    script = term.roll_out(role, states, FOUR, carried)
    made = played(script, lambda ask: asked.append(levels(ask.state)) or Prediction(mapped(ask.state)))
    return made[Dmd2.states], asked


def learned(term: Dmd2, state: Rollout, v_BCFHW: Tensor) -> tuple[Loss, list[tuple[float, float]]]:
    """The losses of the student's update, and the levels of what the student was asked after its pass."""
    asked: list[tuple[float, float]] = []

    def of_student(ask: Ask) -> Prediction:
        asked.append(levels(ask.state))
        return Prediction(mapped(ask.state))

    networks = {
        STUDENT: of_student,
        TEACHER: lambda ask: Prediction(OF_TEACHER(ask.state)),
        CRITIC: lambda ask: Prediction(of_critic(ask.state)),
    }
    losses = answered(
        term.script(STUDENT, {Dmd2.states: state}, FOUR), networks, lambda _: Prediction(v_BCFHW)
    )
    return losses[STUDENT], asked


def test_a_roll_out_has_the_jump_that_learns_and_at_most_one_before_and_after_it() -> None:
    numbers = set()
    for update in range(60):
        state, before = sampled(TERM, update)
        _, after = learned(TERM, state, mapped(state))
        t, r = levels(state)
        assert before == ([] if t == 1 else [(1.0, t)]) and after == ([] if r == 0 else [(r, 0.0)])
        fitting = []
        for number in NUMBERS:
            of_number = [*(FOUR.shifted(1 - k / number) for k in range(number)), 0.0]
            pairs = zip(of_number, of_number[1:], strict=False)
            fitting += [number] * any(pair == pytest.approx((t, r), abs=1e-3) for pair in pairs)
        assert fitting
        numbers |= {fitting[-1]}
    assert numbers == {*NUMBERS}


def test_samples_of_the_exact_map_are_those_of_one_jump_whatever_the_levels() -> None:
    for update in range(20):
        noise_BCFHW = drawn(source(FOUR), update, 0).x_t_BCFHW
        sample, _ = sampled(TERM, update, CRITIC)
        torch.testing.assert_close(sample.x0_BCFHW, MEAN + DEVIATION * noise_BCFHW, rtol=1e-4, atol=1e-4)
        assert sample.end_B is None  # critic and teacher have one time


def test_the_gradient_reaches_the_jump_that_learns_by_its_length_alone() -> None:
    """dx0/dv = r - t: the jump to data is taken as it is."""
    for update in range(6):
        state, _ = sampled(TERM, update)
        (t, r), v_BCFHW = levels(state), mapped(state).requires_grad_()
        loss, _ = learned(TERM, state, v_BCFHW)
        (slope_BCFHW,) = torch.autograd.grad(loss.rows_TB.sum(), v_BCFHW)
        mean = loss.numbers["gradient"] / slope_BCFHW[0].numel()  # of |g| over a sample's elements
        torch.testing.assert_close(slope_BCFHW.abs().flatten(1).mean(1), (t - r) * mean, rtol=1e-4, atol=0)


def test_samples_that_go_on_pass_the_levels_of_its_steps_in_turn() -> None:
    carried, passed = None, []
    for update in range(4):
        state, before = sampled(CARRIED, update, carried=carried)
        loss, after = learned(CARRIED, state, mapped(state))
        passed.append(levels(state))
        assert not before and len(after) == (update < 3)
        carried = loss.carried_BCFHW
    assert carried is None
    assert passed == [pytest.approx(FOUR.few.ends(call)) for call in range(4)]


def test_beside_stage_a_s_loss_all_is_learned_in_one_pass_and_planned() -> None:
    objective = read_objective(["flow_map", {"name": "dmd2", "sampler": "flow_map", "critic_updates": 1}])
    assert objective.few_step_sampler == FLOW_MAP
    for script in passes_of(objective, STUDENT, FOUR):
        assert [rounds.learned[STUDENT] for rounds in script.rounds].count(2) == 1
        assert script.rolled_out <= 1
        assert sum(rounds.asked[STUDENT] for rounds in script.before + script.rounds) <= 3


def test_its_critic_has_one_update_a_step_where_others_have_five() -> None:
    assert Dmd2(sampler=FLOW_MAP) == TERM and str(TERM) == "dmd2(sampler=flow_map, critic_updates=1)"
    assert Dmd2() == Dmd2(critic_updates=5) and str(Dmd2(critic_updates=5)) == "dmd2"
