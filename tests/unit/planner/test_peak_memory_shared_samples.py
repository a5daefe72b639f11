"""Plans of ranks that compute each sample together: memory, arithmetic, choices."""

from pathlib import Path
from typing import Any

import pytest
from planned import EIGHT_80, RATES
from planned import published_job as job

from wandistiller.config.job import Job
from wandistiller.planner.machine import Machine, demands, moments
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.resolve_auto import chosen
from wandistiller.planner.time import Times

SMALL, LARGE = "Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B"
VIDEO = {"num_frames": 81, "deepspeed_config": "ds_configs/student/zero2.json"}


def video(folder: Path, sharers: int, machine: Machine = EIGHT_80, wan: str = LARGE, **more: Any) -> Job:
    return job(folder, machine, wan, context_parallel=sharers, **VIDEO | more)


# Memory


@pytest.mark.slow
def test_a_14b_and_its_half_beside_it_need_several_ranks_a_clip(published: Path) -> None:
    taken = []
    for sharers in (1, 8):
        run = video(published, sharers, teacher_deepspeed_config="gpu")
        taken.append([d.is_met for d in demands(moments(plan(run, EIGHT_80)), EIGHT_80)])
    assert taken == [[False, True, True], [True, True, True]]


def parts(run: Job, phase: str, turn: str) -> dict[str, int]:
    return {
        use: b.transient for use, b in plan(run, EIGHT_80, coding=False)[phase].alternatives[turn].items()
    }


@pytest.mark.parametrize(
    ("phase", "turn", "use"),
    [("train", "student", "student's activations"), ("train", "teacher", "a call of the teacher")],
)
def test_activations_of_two_ranks_are_half_but_for_the_ends(
    published: Path, phase: str, turn: str, use: str
) -> None:
    one, two = (parts(video(published, n), phase, turn)[use] for n in (1, 2))
    assert 0.5 < two / one < 0.8  # queries, keys and values are joined to be exchanged


def test_an_owner_s_rank_computes_whole_samples(published: Path) -> None:
    owner = {"teacher_deepspeed_config": "ds_configs/teacher/owner.json"}
    one, two = (
        parts(video(published, n, **owner), "train", "teacher")["a call of the teacher"] for n in (1, 2)
    )
    assert one == two


@pytest.mark.slow
def test_a_teacher_that_is_measured_computes_whole_samples(published: Path) -> None:
    narrow = {"student_config": {"num_attention_heads": 0.4}}
    one, eight = (parts(video(published, n, **narrow), "load", "calibration") for n in (1, 8))
    whole = parts(video(published, 8, **narrow), "load", "measuring")
    assert whole["a call of the teacher"] == one["a call of the teacher"] > eight["a call of the teacher"]


# Time


@pytest.mark.parametrize("role", ["teacher", "student"])
def test_each_rank_of_a_sample_computes_its_share(published: Path, role: str) -> None:
    one, eight = (Times(video(published, n), EIGHT_80, RATES).call(role, 1) for n in (1, 8))
    assert one == pytest.approx(8 * eight)


# Choices


@pytest.mark.slow
def test_auto_keeps_the_recipe_s_number_of_ranks_a_sample(published: Path) -> None:
    teacher = "ds_configs/teacher/auto.json"
    run = video(published, 4, wan=SMALL, deepspeed_config="auto", teacher_deepspeed_config=teacher)
    best = chosen(run, EIGHT_80)
    assert best.job.run.context_parallel == 4
