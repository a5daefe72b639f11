"""Short flags and the value "auto" in the student's JSON."""

from pathlib import Path
from typing import Any

from ranks import write_json
from reading import read_run

from wandistiller.config.identity import write_settings
from wandistiller.config.job import Job
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_schema import BATCH_KEYS

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
    assert ds["optimizer"]["params"] == {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert (ds["gradient_clipping"], ds["bf16"], ds["zero_optimization"]["stage"]) == (
        1,
        {"enabled": True},
        3,
    )


def test_the_length_of_a_schedule_follows_from_epochs(tmp_path: Path) -> None:
    ds = job(tmp_path, AUTO, num_epochs=2).student_engine.raw
    assert ds["scheduler"]["params"]["total_num_steps"] == 2 * 1008 // 8


def test_the_resolved_json_has_the_flags_written_in(tmp_path: Path) -> None:
    first = job(tmp_path, batch_size=4, lr=3e-4, mixed_precision="no")
    write_settings(first)
    again = read_job(read_run(str(first.output / "resolved" / "run.json"), {}), 1)
    assert again.student_engine == first.student_engine and again.run.lr is None
