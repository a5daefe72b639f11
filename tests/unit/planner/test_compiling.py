"""The choice of compiled blocks where JSONs leave it at "auto": of all networks of a run together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import gpus
from planned import published_job as job
from shipped import placement

from wandistiller.config.job import Job
from wandistiller.objectives.dmd2 import CRITIC
from wandistiller.planner.compiling import why_eager, with_kernels
from wandistiller.planner.machine import Machine
from wandistiller.planner.resolve_auto import Choice
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB

GPU, CPU = gpus(1, 24, 128), Machine(None, 128 * GIB, 1000 * GIB, 1, 1)
DMD2 = {"name": "dmd2", "steps": 4, "critic_updates": 5, "critic_lr": 2e-5}


GOOD = {"bf16_gpu": True, "compiler": True, "whole": True, "teacher": True, "hours": 11.0}


def test_nothing_speaks_against_compiled_blocks_of_a_long_run_on_a_gpu_with_triton() -> None:
    assert why_eager(**GOOD) == ""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"bf16_gpu": False}, "no GPU"),
        ({"compiler": False}, "apt install g++ python3-dev"),
        ({"whole": False}, "ZeRO-3, and recomputing parts of blocks"),
        ({"teacher": False}, "the teacher's JSON"),
        ({"hours": 0.2}, "about 12 minutes of steps do not pay for it"),
    ],
)
def test_each_reason_for_eager_blocks_is_named(other: dict[str, Any], why: str) -> None:
    assert why in why_eager(**GOOD | other)


def run(published: Path, *, teacher: Any = "ds_configs/teacher/streamed.json", **block: Any) -> Job:
    """The 14B's adapters as the shipped recipe trains them, with other keys in the student's block."""
    engine = read_json("ds_configs/student/lora_wan.json")
    engine["wandistiller"] |= block
    more = {"deepspeed_config": engine, "teacher_deepspeed_config": teacher, "objective": DMD2}
    return job(published, GPU, lora={"rank": 64}, lr=1e-4, max_steps=2000, **more)


def choices(job: Job) -> list[bool]:
    """Whether the blocks of student, critic and teacher are compiled."""
    table = job.networks
    rows = [table.first, table.others[CRITIC]]
    return [*(row.engine.kernels.compile for row in rows), job.teacher.compile]


def test_a_long_run_on_a_gpu_compiles_student_critic_and_teacher(published: Path) -> None:
    left_open = run(published)
    decided, lines = with_kernels(left_open, GPU, here=False)
    assert choices(left_open) == [False] * 3 and choices(decided) == [True] * 3
    assert lines == ["chosen    torch.compile"]


def test_here_without_a_gpu_all_stay_eager_and_a_line_says_why(published: Path) -> None:
    decided, (line,) = with_kernels(run(published), CPU, here=True)
    assert choices(decided) == [False] * 3
    assert line == "chosen    no torch.compile: there is no GPU that computes in bf16"


def test_a_run_of_a_few_steps_stays_eager(published: Path) -> None:
    short = run(published)
    short = replace(short, run=replace(short.run, max_steps=3))
    decided, (line,) = with_kernels(short, GPU, here=False)
    assert choices(decided) == [False] * 3 and "do not pay" in line


@pytest.mark.parametrize("teacher", [{"wandistiller": {"placement": "streamed"}}, "files", "balanced"])
def test_beside_a_teacher_that_stays_eager_the_student_does_too(published: Path, teacher: Any) -> None:
    decided, (line,) = with_kernels(run(published, teacher=teacher), GPU, here=False)
    assert choices(decided) == [False] * 3 and "the teacher's JSON" in line


def test_a_teacher_that_leaves_it_open_follows_what_the_student_s_json_says(published: Path) -> None:
    for fixed in (True, False):
        decided, lines = with_kernels(run(published, compile=fixed), CPU, here=True)
        assert choices(decided) == [fixed] * 3 and lines == []


def test_a_recommended_recipe_leaves_it_open(published: Path) -> None:
    settings = Choice("zero2_offload", "streamed", run(published), []).settings
    assert settings["deepspeed_config"]["wandistiller"]["compile"] == "auto"
    assert settings["teacher_deepspeed_config"] == "ds_configs/teacher/streamed.json"


def test_elsewhere_than_in_training_auto_is_eager() -> None:
    """As `sample` and `evaluate` read a teacher's JSON."""
    read = placement("streamed")
    assert read.compile is False and read.engine.is_compile_open
