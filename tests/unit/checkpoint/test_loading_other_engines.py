"""Checkpoints that are loaded into an engine of other settings."""

from pathlib import Path

import pytest
from engines import engine, learner_of
from rates import Rates
from small_wan import small_transformer

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
