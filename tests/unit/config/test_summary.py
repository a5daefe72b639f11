"""Warnings among the lines with which a run begins."""

from pathlib import Path

import pytest
from recipes import recipe, student_engine

from wandistiller.config.run_config import RunConfig
from wandistiller.config.summary import summary
from wandistiller.config.validate import read_job


@pytest.mark.parametrize(("length", "warned"), [(10, True), (100, False), ("auto", False)])
def test_a_schedule_that_ends_before_the_run_is_a_warning(
    length: object, warned: bool, wan1: Path, tmp_path: Path
) -> None:
    params = {"warmup_max_lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": length}
    ds = student_engine(1) | {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    job = read_job(RunConfig(**recipe(tmp_path, wan1, max_steps=100, deepspeed_config=ds)), 1)
    told = "warning   the schedule ends at step 10 (`total_num_steps`) of 100; "
    assert (told in "\n".join(summary(job))) is warned
