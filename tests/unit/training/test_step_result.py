"""The result of an optimizer step, and the activities whose time it reports."""

import math
from dataclasses import fields, replace

import pytest
import torch

from wandistiller.batch import STUDENT
from wandistiller.experts import Expert
from wandistiller.objectives.objective import read_objective
from wandistiller.training.step_result import READING, MicroStepResult, Over, StepResult, reduce_over_ranks
from wandistiller.utils.logging import activity, begin_step, current

UNUSED = {"ranks", "loss_scale", "skipped", "watched", "others"}


def micro_step(losses: list[list[float]], sigmas: list[float]) -> MicroStepResult:
    return MicroStepResult(torch.tensor(losses), torch.tensor(sigmas), Expert.LOW_NOISE)


@pytest.fixture
def result(one_rank: torch.device) -> StepResult:
    """Two micro-steps of two samples, under a sum of two terms, the second of weight 0.5."""
    begin_step(1)
    with activity(READING):
        pass
    objective = read_objective(["velocity", {"name": "trajectory", "weight": 0.5}])
    first, second = ([[1.0, 2.0], [4.0, 4.0]], [0.1, 0.3]), ([[3.0, 6.0], [8.0, 8.0]], [0.1, 1.0])
    return reduce_over_ranks([micro_step(*first), micro_step(*second)], objective, STUDENT, Over())


def test_losses_are_means_over_all_micro_steps_and_their_weighted_sum(result: StepResult) -> None:
    assert result.losses == {"velocity": 3.0, "trajectory": 6.0} and result.loss == 3.0 + 0.5 * 6.0


def test_the_loss_of_each_band_of_sigma_is_that_of_the_states_there(result: StepResult) -> None:
    """The states of the trajectory have a sigma of their own."""
    assert result.loss_by_sigma == {"0-0.2": (1 + 3) / 2, "0.2-0.4": 2, "0.8-1": 6}


def test_every_field_but_the_ranks_is_logged_by_its_name(result: StepResult) -> None:
    logged = result.metrics()
    assert {f.name for f in fields(StepResult)} - logged.keys() == UNUSED
    assert (logged["loss"], logged["grad_norm"], logged["expert"]) == (6.0, None, "transformer_2")


def test_what_does_not_apply_is_not_logged() -> None:
    plain = StepResult(loss=math.nan, expert=Expert.HIGH_NOISE, loss_by_sigma={}, ranks=[])
    optional = {f.name for f in fields(StepResult) if f.metadata.get("optional")}
    assert plain.metrics().keys() == {f.name for f in fields(StepResult)} - optional - {"ranks", "others"}
    skipped = replace(plain, loss_scale=8.0, skipped=True)
    assert skipped.metrics().keys() - plain.metrics().keys() == {"loss_scale", "skipped"}


def test_the_seconds_of_an_activity_add_up_within_a_step_only() -> None:
    for step in (1, 2):
        begin_step(step)
        for _ in range(3):
            with activity("a"):
                before = current.seconds.get("a", 0.0)
        assert current.activity == f"step {step}, a" and before < current.seconds["a"] < 1
        assert current.seconds.keys() == {"a"}
