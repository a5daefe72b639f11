"""Short flags and the value "auto" in the student's JSON."""

import copy
from pathlib import Path
from typing import Any

import pytest
from ranks import write_json
from reading import read_run
from transformers import PretrainedConfig, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from wandistiller.config.identity import write_resolved
from wandistiller.config.job import Job
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_config import load
from wandistiller.engine.ds_overrides import fill_auto, fill_steps
from wandistiller.engine.ds_schema import BATCH_KEYS
from wandistiller.utils.errors import ConfigError

SCHEDULE = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
AUTO: dict[str, Any] = {  # the ZeRO-3 example of transformers' documentation, as far as it has auto
    **dict.fromkeys((*BATCH_KEYS, "gradient_clipping"), "auto"),
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupDecayLR", "params": SCHEDULE},
    "zero_optimization": {"stage": 3} | dict.fromkeys(BUCKETS, "auto"),
}
PATHS = {"teacher_path": "tiny", "data_path": "tiny"}
FIXED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


class Model:
    """All that transformers reads of a model."""

    config = PretrainedConfig(hidden_size=96)


def test_auto_is_filled_as_transformers_fills_it(tmp_path: Path) -> None:
    theirs = HfTrainerDeepSpeedConfig(copy.deepcopy(AUTO))
    arguments = TrainingArguments(str(tmp_path), bf16=True, use_cpu=True)
    theirs.trainer_config_process(arguments)
    theirs.trainer_config_finalize(arguments, Model(), 700)
    ours = fill_steps(fill_auto(load(AUTO), 96), 700).raw
    # left open here, solved with the number of ranks
    batch = {"gradient_accumulation_steps": 1, "train_batch_size": 8}
    assert ours | batch == theirs.config


def job(folder: Path, ds: dict[str, Any] | None = None, world: int = 1, **settings: Any) -> Job:
    given = PATHS | {"output_dir": str(folder / "out")} | settings
    if ds is not None:
        given["deepspeed_config"] = str(write_json(folder / "ds.json", ds))
    return read_job(read_run(str(write_json(folder / "recipe.json", given)), {}), world)


def test_a_json_full_of_auto_runs_unchanged(tmp_path: Path) -> None:
    ds = job(tmp_path, AUTO, world=2, max_steps=300).student_engine.raw
    assert (ds["train_batch_size"], ds["gradient_accumulation_steps"]) == (16, 1)
    assert ds["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 5e-5,
        "warmup_num_steps": 1,
        "total_num_steps": 300,
    }
    assert ds["zero_optimization"]["reduce_bucket_size"] == 128 * 128  # the embedded teacher's width, squared


def test_the_length_of_a_schedule_follows_from_epochs(tmp_path: Path) -> None:
    ds = job(tmp_path, AUTO, num_epochs=2).student_engine.raw
    assert ds["scheduler"]["params"]["total_num_steps"] == 2 * 1008 // 8


def test_auto_where_nothing_is_known_to_fill_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='`log_level` is "auto". Write the value itself.'):
        job(tmp_path, FIXED | {"log_level": "auto"})


def test_the_resolved_json_has_the_flags_written_in(tmp_path: Path) -> None:
    first = job(tmp_path, batch_size=4, lr=3e-4, mixed_precision="no")
    write_resolved(first)
    again = read_job(read_run(str(first.output / "resolved" / "run.json"), {}), 1)
    assert again.student_engine == first.student_engine and again.run.lr is None
