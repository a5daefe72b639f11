"""Checkpoints that are loaded into an engine of other settings."""

from pathlib import Path

import pytest
import torch
from engines import engine, learner_of
from rates import Rates
from small_wan import small_transformer
from states import state

from wandistiller.batch import STUDENT
from wandistiller.checkpoint.checkpointer import Checkpointer
from wandistiller.checkpoint.loading import load
from wandistiller.experts import Expert


@pytest.mark.usefixtures("one_rank")
def test_a_schedule_that_is_added_goes_on_at_the_run_s_step(tmp_path: Path) -> None:
    decay = {"warmup_max_lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": 10}
    scheduled = engine(scheduler={"type": "WarmupDecayLR", "params": decay})
    before, after = (learner_of(small_transformer(0, 1), config) for config in (engine(), scheduled))
    checkpointer = Checkpointer(tmp_path, 1)
    folder = checkpointer.save({STUDENT: before}, 5, {})
    checkpointer.finish()
    load({STUDENT: after}, folder, {"scheduler"})
    (rate,) = after.engine(Expert.HIGH_NOISE).get_lr()
    assert rate == pytest.approx(1e-3 * (10 - 4) / (10 - 2)) == Rates(scheduled).at(6)


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_adam_goes_on_without_the_state_of_muon_which_has_no_moments_for_matrices(tmp_path: Path) -> None:
    muon = engine(optimizer={"type": "Muon", "params": {"lr": 1e-3}})
    before, after = (learner_of(small_transformer(0, 1), c) for c in (muon, engine()))
    x_t_BCFHW, text_BLD = torch.randn(2, 16, 1, 4, 4), torch.randn(2, 7, 32)
    before.backward(
        Expert.HIGH_NOISE, before.velocity(state(x_t_BCFHW, torch.rand(2), text_BLD)).square().mean()
    )
    before.step(Expert.HIGH_NOISE)
    checkpointer = Checkpointer(tmp_path, 1)
    folder = checkpointer.save({STUDENT: before}, 1, {})
    checkpointer.finish()
    load({STUDENT: after}, folder, {"optimizer"})
    assert after.trained[Expert.HIGH_NOISE].steps() is None


@pytest.mark.usefixtures("one_rank")
def test_an_amsgrad_that_is_new_begins_with_no_greatest_moment() -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "amsgrad": True}}
    student = learner_of(small_transformer(0, 1), engine(optimizer=adam))
    trained = student.trained[Expert.HIGH_NOISE]
    trained.make_state(trained.flats[0], ["exp_avg", "exp_avg_sq"], 3)
    assert not trained.tensors(trained.flats[0])["max_exp_avg_sq"].any()
