"""The critic's learning rate over a run: the student's schedule at the critic's rate and updates."""

from pathlib import Path
from typing import Any

import pytest
from ranks import write_json
from rates import Rates
from reading import read_run

from wandistiller.config.validate import read_job
from wandistiller.engine.engine_config import EngineConfig

ENGINE = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
WARMUP = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "warmup_type": "linear"}


def critic(folder: Path, kind: str, params: dict[str, Any], **objective: Any) -> EngineConfig:
    """The engine of a critic with five updates before each of the student's."""
    given = {"teacher_path": "tiny", "data_path": "tiny", "output_dir": str(folder / "out"), "max_steps": 100}
    given["deepspeed_config"] = ENGINE | {"scheduler": {"type": kind, "params": params}}
    given["objective"] = {"name": "dmd2", "critic_updates": 5} | objective
    job = read_job(read_run(str(write_json(folder / "recipe.json", given)), {}), 1)
    return job.networks.others["critic"].engine


def test_a_critic_s_schedule_is_as_long_as_the_student_s(tmp_path: Path) -> None:
    given = WARMUP | {"total_num_steps": 100}
    params = critic(tmp_path, "WarmupDecayLR", given).section("scheduler.params")
    assert params == given | {"total_num_steps": 500}


def test_a_critic_at_a_rate_of_its_own_rises_from_the_same_share_of_it(tmp_path: Path) -> None:
    params = critic(tmp_path, "WarmupLR", WARMUP, critic_lr=1e-6).section("scheduler.params")
    assert [params["warmup_min_lr"], params["warmup_max_lr"]] == pytest.approx([1e-7, 1e-6])


def test_a_critic_whose_rate_is_below_the_student_s_lowest_warms_up(tmp_path: Path) -> None:
    rates = Rates(critic(tmp_path, "WarmupLR", WARMUP, critic_lr=1e-6))
    curve = [rates.at(update) for update in range(1, 15)]
    assert curve == sorted(curve) and curve[-1] == pytest.approx(1e-6)
