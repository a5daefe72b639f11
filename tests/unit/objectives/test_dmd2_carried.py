"""Samples that go on from update to update: the sampler's own states, with one call of the student each."""

from dataclasses import replace

import pytest
import torch
from constant_teacher import answered, played
from dmd2_updates import OF_TEACHER, SCHEDULE, gaussian, source
from torch import Tensor

from wandistiller.batch import STUDENT, Prediction
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.network.sampling import few_steps
from wandistiller.objectives.dmd2 import CRITIC, Dmd2
from wandistiller.objectives.objective import Objective
from wandistiller.objectives.rollout import Rollout, Turn
from wandistiller.objectives.script import TEACHER, Ask, Loss
from wandistiller.planner.passes import passes_of

S = 0.875
of_student, of_critic = gaussian(0.2, 0.6), gaussian(-0.2, 0.8)
FOUR = replace(SCHEDULE, few=few_steps(3.0, 4, None))
RENOISING = replace(SCHEDULE, few=few_steps(3.0, 4, None, "renoise"))
OF_TWO = replace(SCHEDULE, shift=7.0, boundary=S, handover=S, few=few_steps(7.0, 4, S))
HIGH, LOW = (replace(OF_TWO, trained=expert) for expert in Expert)
CARRIED = Dmd2(steps=4, critic_updates=1, shared=True, carried=True)


def sampled(
    objective: Objective, schedule: FlowSchedule, update: int, carried: Tensor | None = None
) -> tuple[Rollout, list[Ask]]:
    """Where a student's update learns, and what it asked for before."""
    drawn, asked = objective.draw(STUDENT, source(schedule), update, 0), []
    (term,) = objective.terms
    states = played(
        term.roll_out(STUDENT, drawn, schedule, carried),
        lambda ask: asked.append(ask) or Prediction(of_student(ask.state)),
    )
    return states[Dmd2.states], asked


def learned(term: Dmd2, state: Rollout, schedule: FlowSchedule) -> Loss:
    networks = {
        TEACHER: lambda ask: Prediction(OF_TEACHER(ask.state)),
        CRITIC: lambda ask: Prediction(of_critic(ask.state)),
    }
    script = term.script(STUDENT, {Dmd2.states: state}, schedule)
    losses = answered(script, networks, lambda at: Prediction(of_student(at)))
    return losses[STUDENT] if isinstance(losses, dict) else losses


@pytest.mark.parametrize("schedule", [FOUR, RENOISING, HIGH, LOW])
@pytest.mark.parametrize("alone", [0, 2])
def test_samples_that_go_on_are_those_of_a_whole_roll_out_of_a_student_that_does_not_change(
    schedule: FlowSchedule, alone: int
) -> None:
    """From noise, or of a low-noise expert from where the finished one leads, two calls of it."""
    term = replace(CARRIED, critic_updates=1 + alone, sampler=schedule.few.sampler)
    objective, carried, exits = Objective((term,)), None, schedule.exits()
    for step in range(2 * len(exits) + 1):
        update = objective.first_update(step) + alone
        whole, calls = sampled(objective, schedule, update)
        state, asked = sampled(objective, schedule, update, carried)
        assert whole.exit == len(calls) == exits[step % len(exits)]
        assert len(asked) == (0 if step % len(exits) else exits[0])
        for name in ("x_t_BCFHW", "sigma_B"):
            assert torch.equal(getattr(state, name), getattr(whole, name))
        assert state.expert is whole.expert is (schedule.trained or schedule.few.expert(0))
        carried = learned(term, state, schedule).carried_BCFHW
        assert (carried is None) == (state.exit == exits[-1])


def test_prompt_and_first_noise_stay_to_the_end_of_a_roll_out_and_noise_to_compare_is_new() -> None:
    states = [CARRIED.draw(STUDENT, source(FOUR), update, 0)[Dmd2.states] for update in range(8)]
    assert [CARRIED.begun(STUDENT, update, FOUR) for update in range(8)] == [0] * 4 + [4] * 4
    for update, state in enumerate(states):
        assert torch.equal(state.x_t_BCFHW, states[update // 4 * 4].x_t_BCFHW)
    assert not torch.equal(states[0].x_t_BCFHW, states[4].x_t_BCFHW)
    assert len({state.renoise.x_t_BCFHW.sum().item() for state in states}) == 8
    assert len({state.renoise.sigma_B.sum().item() for state in states}) == 8


def test_the_critic_s_own_updates_sample_as_without_it() -> None:
    plain, carried = (
        replace(CARRIED, critic_updates=3, carried=c).draw(CRITIC, source(FOUR), 6, 0)[Dmd2.states]
        for c in (False, True)
    )
    assert plain.exit == carried.exit and torch.equal(plain.x_t_BCFHW, carried.x_t_BCFHW)
    assert CARRIED.begun(CRITIC, 6, FOUR) == 6


def test_of_one_step_nothing_goes_on_and_every_number_is_as_without_it() -> None:
    one, losses = replace(SCHEDULE, few=few_steps(3.0, 1, None)), []
    for term in (replace(CARRIED, steps=1, carried=c) for c in (False, True)):
        state, asked = sampled(Objective((term,)), one, 5)
        losses.append(learned(term, state, one))
        assert not asked and losses[-1].carried_BCFHW is None
    assert torch.equal(losses[0].rows_TB, losses[1].rows_TB)


@pytest.mark.parametrize("critic_updates", [1, 5])
@pytest.mark.parametrize(("schedule", "mean"), [(FOUR, 0), (RENOISING, 0), (HIGH, 0), (LOW, 1)])
def test_only_the_finished_expert_s_calls_are_planned_before_the_one_that_learns(
    schedule: FlowSchedule, mean: float, critic_updates: int
) -> None:
    objective = Objective((replace(CARRIED, critic_updates=critic_updates),))
    plays = passes_of(objective, STUDENT, schedule)
    assert sum(one.rolled_out for one in plays) / len(plays) == mean


def test_levels_come_in_turn_through_all_steps_of_a_run() -> None:
    term = replace(CARRIED, critic_updates=3)
    objective = Objective((term,))
    updates = [objective.first_update(step) + 2 for step in range(6)]
    turns = [Turn(call, updates[step - call]) for step, call in enumerate((0, 1, 2, 3, 0, 1))]
    draws = [objective.draw(STUDENT, source(FOUR), update, 0)[Dmd2.states].exit for update in updates]
    begun = [objective.begun(STUDENT, update, FOUR) for update in updates]
    assert [Turn(*both) for both in zip(draws, begun, strict=True)] == turns
