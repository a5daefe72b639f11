"""Times of rollouts, measurements and pictures of published Wans, against sums done by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import EIGHT_80, ONE_24, RATES
from planned import published_job as job

from wandistiller.cli.plan_report import duration, other_lines
from wandistiller.config.job import Job
from wandistiller.planner.other_work import before_the_steps, pictures, whole_run
from wandistiller.planner.step_time import StepTime
from wandistiller.wan.flops import forward_flops

IMPORTANT = {"student_config": {"num_layers": 20, "keep_layers": "importance"}}
NARROW = {"student_config": {"num_attention_heads": 0.5}}
GPU = {"teacher_device_strategy": "gpu"}
"""A teacher whose calls wait for nothing."""


def call(run: Any) -> float:
    """Seconds of the teacher's call on one image without guidance."""
    return forward_flops(run.folder.config, (16, 1, 60, 104)) / 1e12 / RATES.tflops


def seconds(run: Any) -> dict[str, float]:
    return {work.what: work.seconds for work in before_the_steps(run, ONE_24, RATES)}


def test_importance_is_the_teacher_without_each_block_left_on_21_images(published: Path) -> None:
    """30 to 20 layers: 2^15 / 1560 patches are 21 images; rounds of blocks left by `blocks_left`."""
    run = job(published, ONE_24, "Wan2.1-T2V-1.3B", **IMPORTANT, **GPU)
    found = seconds(run)["the importance of blocks"] / (21 * call(run))
    # more than one call for each of the 30 blocks less itself, less than as if nothing were skipped
    assert 30 * 29 / 30 < found < 1 + 30 + 29 + 28 + 27 + 26 + 25 + 24 + 23 + 22 + 21


@pytest.mark.parametrize(("more", "has"), [({}, False), (NARROW, True)])
def test_only_a_narrower_student_needs_activations_of_the_teacher(
    published: Path, more: dict[str, Any], *, has: bool
) -> None:
    run = job(published, ONE_24, "Wan2.1-T2V-1.3B", **more, **GPU)
    found = seconds(run)
    assert ("activations of the teacher" in found) is has
    if has:
        assert found["activations of the teacher"] == pytest.approx(21 * call(run))


def test_the_error_before_training_is_a_call_of_teacher_and_student_for_each_image(published: Path) -> None:
    run = job(published, ONE_24, "Wan2.1-T2V-1.3B", **GPU)
    own = forward_flops(run.student_transformer, (16, 1, 60, 104)) / 1e12 / RATES.tflops
    assert seconds(run)["the error before training"] == pytest.approx(21 * (call(run) + own))


def test_pictures_are_guided_calls_of_the_teacher_once_and_the_student_s_each_time(published: Path) -> None:
    more = {"sample_prompts": list("abcdefghij"), "sample_steps": 30, "max_steps": 1200, "sample_every": 500}
    run = job(published, EIGHT_80, "Wan2.1-T2V-1.3B", **more, **GPU)
    teacher, student, times = pictures(run, EIGHT_80, RATES)
    own = forward_flops(run.student_transformer, (16, 1, 60, 104)) / 1e12 / RATES.tflops
    assert times == 3  # after 500, 1000 and 1200 steps; 10 prompts on 8 ranks are 2 on each
    assert (teacher, student) == pytest.approx((30 * 2 * 2 * call(run), 30 * 2 * own))


def test_pictures_by_the_clock_take_a_twentieth_of_the_time_at_most(published: Path) -> None:
    run = job(published, ONE_24, "Wan2.1-T2V-14B", max_steps=5000, sample_every=5000, **GPU)
    steps = 5000 * StepTime(run, ONE_24, RATES).floor()
    _, student, times = pictures(run, ONE_24, RATES)
    assert times == int(steps / max(20 * 60, 19 * student)) > 1
    rare = job(published, ONE_24, "Wan2.1-T2V-14B", max_steps=5000, sample_minutes=10**9, **GPU)
    assert pictures(rare, ONE_24, RATES)[2] == 10


def test_the_parts_before_step_1_are_named_with_their_times(published: Path) -> None:
    run = job(published, ONE_24, "Wan2.1-T2V-1.3B", **IMPORTANT, **GPU)
    early, drawn = other_lines(run, ONE_24, RATES)
    assert early.startswith("before step 1, with an empty cache: at least ")
    assert " without encoding the data; " in early
    assert " for the teacher's rollouts, " in early and " for the importance of blocks, " in early
    assert drawn.startswith("pictures: at least ") and "0.0 h" not in early + drawn


def test_a_duration_is_in_the_unit_that_shows_it() -> None:
    assert [duration(s) for s in (0.3, 61, 90, 3000, 5400, 360_000)] == [
        *("0.3 s", "61 s", "2 min", "50 min", "1.5 h", "100.0 h")
    ]


FEW = {"objective": {"name": "consistency", "edges": 4}}


def stages(published: Path, *later: dict[str, Any], **first: Any) -> list[Job]:
    """Runs of a 1.3B that follow each other, with one cache: 8 prompts, 10 rollouts of each."""
    found: list[Job] = []
    for more in ({}, *later):
        usual = {
            "max_steps": 100,
            "rollouts_per_prompt": 10,
            "sample_prompts": ["a cat"],
            "cache_dir": "cache",
        }
        run = job(published, ONE_24, "Wan2.1-T2V-1.3B", **usual | first | more, **GPU)
        found.append(replace(run, previous=found[-1] if found else None))
    return found


def test_rollouts_that_an_earlier_stage_made_are_not_counted_again(published: Path) -> None:
    """Of 80 samples 5 steps of 8 take 40."""
    runs = stages(published, {"max_steps": 100}, {"guidance_scale": 2.0}, {"seed": 1}, {}, max_steps=5)
    first, *later = (seconds(run).get("the teacher's rollouts", 0.0) for run in runs)
    assert first > 0 and later == pytest.approx([first, first, first, 0])


def test_of_more_rollouts_of_each_prompt_those_of_an_earlier_stage_are_there(published: Path) -> None:
    first, later = stages(published, {"rollouts_per_prompt": 20}, max_steps=1000)
    found = [seconds(run)["the teacher's rollouts"] for run in (first, later)]
    assert found[0] > 0 and found[1] == pytest.approx(found[0])


def test_of_a_sum_with_dmd2_the_rollouts_of_the_student_s_updates_alone_are_made(published: Path) -> None:
    """5 steps of 8 samples read 40 of the 120 that 15 updates draw; the first 80 of those are there."""
    joint = [{"name": "dmd2", "sampler": "renoise", "critic_updates": 2}, {"name": "consistency"}]
    plain = {"objective": {"name": "consistency", "steps": 4}}
    more = {"rollouts_per_prompt": 100, "max_steps": 5}
    first, later = stages(published, more | {"objective": joint}, **plain | more | {"max_steps": 10})
    (alone,) = stages(published, **more | {"objective": joint})
    made = [seconds(run)["the teacher's rollouts"] for run in (first, alone, later)]
    assert made == pytest.approx([made[0], made[0] / 2, made[0] / 2 / 3])


def test_the_teacher_s_pictures_of_an_earlier_stage_are_not_counted_again(published: Path) -> None:
    """Of few steps there are two of each prompt."""
    runs = stages(published, {}, FEW, FEW, {"sample_steps": 20})
    first, *later = (pictures(run, ONE_24, RATES)[0] for run in runs)
    assert first > 0 and later == pytest.approx([0, first, 0, first / 2])


@pytest.mark.parametrize(
    ("expert", "given", "draws"),
    [
        ("high_noise", {}, False),
        ("low_noise", {}, False),
        ("high_noise", {"lora": {}}, False),
        ("low_noise", {"lora": {}}, True),  # its samples begin with the other expert, which is there too
    ],
)
def test_a_teacher_of_whose_experts_one_is_there_draws_no_pictures(
    published: Path, expert: str, given: dict[str, Any], *, draws: bool
) -> None:
    given = given | {"student_config": {"experts": "all"}, "shift": 7}
    objective = {"name": "dmd2", "steps": 4, "expert": expert}
    run = job(published, EIGHT_80, "Wan2.2-T2V-A14B", **given, objective=objective, **GPU)
    assert (pictures(run, EIGHT_80, RATES)[0] > 0) is draws


def test_a_run_takes_its_steps_the_work_before_them_and_pictures(published: Path) -> None:
    run = job(published, ONE_24, "Wan2.1-T2V-1.3B", **IMPORTANT, **GPU)
    teacher, student, times = pictures(run, ONE_24, RATES)
    expected = StepTime(run, ONE_24, RATES).steps() + sum(seconds(run).values()) + teacher + times * student
    assert whole_run(run, ONE_24, RATES) == pytest.approx(expected)
