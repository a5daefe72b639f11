"""Advice after memory ran out: combinations of shipped JSONs that take less, and standing hints."""

from pathlib import Path
from typing import Any

import pytest
from planned import gpus, published_job
from slow_cases import slow_but

from wandistiller.config.job import Job
from wandistiller.distributed.oom import Spent
from wandistiller.planner.machine import Machine
from wandistiller.planner.oom_advice import SHOWN, advice, needed
from wandistiller.planner.resolve_auto import Choice, choices
from wandistiller.utils.system_memory import GIB

GPUS = gpus(4, 80, 1000)
CPUS = Machine(device_free=None, host_free=200 * GIB, disk_free=500 * GIB, ranks=2, ranks_on_node=2)
STUDENT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 0},
}
"""In float32, without checkpointing or offload: much is left to advise."""
GREEDY = {
    "deepspeed_config": STUDENT,
    "teacher_deepspeed_config": {"zero_optimization": {"stage": 0}},
    "num_frames": 17,
}


def greedy(published: Path, machine: Machine, **more: Any) -> Job:
    return published_job(published, machine, "Wan2.1-T2V-1.3B", max_steps=100, **GREEDY | more)


def named(lines: list[str]) -> list[str]:
    """The lines that name a combination of JSONs."""
    return [line for line in lines if line.startswith("student ")]


CPU_ADAM = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
OFFLOADED = {"deepspeed_config": STUDENT | CPU_ADAM}
RUNS = {
    "GPU": (GPUS, Spent.DEVICE, {}),
    "host of GPUs": (GPUS, Spent.HOST, OFFLOADED),
    "CPUs": (CPUS, Spent.HOST, {}),
}


@pytest.mark.parametrize("run", slow_but([], RUNS))
def test_the_simplest_that_fit_and_take_less_of_what_ran_out_are_named_at_the_run_s_batch(
    published: Path, run: str
) -> None:
    machine, spent, more = RUNS[run]
    job = greedy(published, machine, **more)
    own = needed(job, spent, machine, preparing=False)

    def takes_less(choice: Choice) -> bool:
        return needed(choice.job, spent, machine, preparing=False) < 0.99 * own

    less = [*choices(job, machine, here=True, keeps_sharing=False, suits=takes_less)][:SHOWN]
    lines = named(advice(job, spent, machine))
    assert len(lines) == len(less) == SHOWN
    for line, choice in zip(lines, less, strict=True):
        assert line.startswith(f"{choice} (ds_configs/student/{choice.student}.json")
        assert choice.job.batch.total == job.batch.total


@pytest.mark.slow
def test_where_nothing_fits_only_hints_are_left(published: Path) -> None:
    small = gpus(4, 2, 8)
    lines = advice(greedy(published, small), Spent.DEVICE, small)
    assert lines[0] == "no student and teacher JSON of ds_configs/ take less accelerator memory and fit"
    assert not named(lines)
    assert all(word in "\n".join(lines) for word in ("--num_frames", "--height, --width", "`num_layers`"))


@pytest.mark.slow
def test_only_what_the_run_does_not_have_is_hinted_at(published: Path) -> None:
    frugal = STUDENT | {"activation_checkpointing": {}}
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    before = advice(greedy(published, GPUS, teacher_dtype="float32"), Spent.DEVICE, GPUS)
    job = greedy(published, GPUS, deepspeed_config=frugal, teacher_deepspeed_config=bf16)
    after = advice(job, Spent.DEVICE, GPUS)
    assert {"--gradient_checkpointing", "--teacher_dtype bfloat16"} <= set(before)
    assert not {"--gradient_checkpointing", "--teacher_dtype bfloat16"} & set(after)


def test_while_the_cache_is_filled_hints_are_about_the_teacher(published: Path) -> None:
    lines = advice(greedy(published, GPUS, prepare_batch=4), Spent.DEVICE, GPUS, preparing=True)
    assert "--prepare_batch 1" in lines
    assert "--gradient_checkpointing" not in lines and "fewer layers" not in "\n".join(lines)
