"""Advice after memory ran out: three flags that the run does not have yet, and `plan`."""

from pathlib import Path
from typing import Any

import pytest
from planned import ONE_24, published_job

from wandistiller.cli.failures import PLAN, SHOWN, advice
from wandistiller.cli.parser import read

ENGINE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 0},
}
FRUGAL = ENGINE | {"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {}}
AUTO = "--deepspeed_config auto --teacher_deepspeed_config auto"


def named(folder: Path, *, preparing: bool = False, **given: Any) -> list[str]:
    """The flags that are named."""
    job = published_job(folder, ONE_24, "Wan2.1-T2V-1.3B", **{"deepspeed_config": ENGINE} | given)
    *lines, last = advice(job, preparing)
    assert last == PLAN and len(lines) == SHOWN
    flags = [line.partition(":")[0] for line in lines]
    read(["train", *" ".join(flag for flag in flags if "," not in flag).split()])  # they are flags of train
    return flags


def test_flags_that_cost_least_come_first(published: Path) -> None:
    assert named(published) == ["--gradient_checkpointing", "--batch_size 1", AUTO]


def test_only_what_the_run_does_not_have_is_named(published: Path) -> None:
    flags = named(published, deepspeed_config=FRUGAL)
    assert flags == [AUTO, "--num_frames, --height, --width", "--student_config FILE"]


@pytest.mark.parametrize(("batch", "first"), [(4, "--prepare_batch 1"), (1, AUTO)])
def test_while_the_cache_is_filled_the_flags_are_about_the_teacher(
    published: Path, batch: int, first: str
) -> None:
    flags = named(published, preparing=True, prepare_batch=batch)
    assert flags[0] == first and "--gradient_checkpointing" not in flags
