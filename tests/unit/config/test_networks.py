"""The table of a run's networks: whose weights each has, and what of it learns."""

from pathlib import Path
from typing import Any

import pytest
from recipes import recipe

from wandistiller.config.job import Job
from wandistiller.config.networks import COPY, NEW, SHARED
from wandistiller.config.run_config import RunConfig
from wandistiller.config.summary import summary
from wandistiller.config.validate import read_job
from wandistiller.experts import Expert

HIGH, LOW = Expert
STREAMED = {"teacher_deepspeed_config": {"wandistiller": {"placement": "streamed"}}}
LORA = {"lora": {"rank": 2}, "student_config": {"experts": "two"}, **STREAMED}
DMD2 = {"name": "dmd2", "steps": 2, "critic_updates": 3}
LOW_ALONE = {"objective": DMD2 | {"expert": "low_noise"}, "guidance_scale": 4.0, "shift": 7.0}


def job_of(folder: Path, wan: Path, **more: Any) -> Job:
    return read_job(RunConfig(**recipe(folder, wan, **more)), 1, here=False)


def rows(job: Job) -> list[tuple[str, Expert, str, bool]]:
    return [
        (row.role, row.expert, row.weights, row.learns) for row in job.networks.rows if row.role != "teacher"
    ]


def test_a_student_of_its_own_has_new_weights(tmp_path: Path, wan2: Path) -> None:
    assert rows(job_of(tmp_path, wan2)) == [("student", HIGH, NEW, True)]


@pytest.mark.parametrize(
    ("teacher", "weights"), [(STREAMED, SHARED), ({}, SHARED), ({"teacher_dtype": "bfloat16"}, COPY)]
)
def test_adapters_share_the_teacher_s_weights_where_both_have_its_precision(
    teacher: dict[str, Any], weights: str, tmp_path: Path, wan2: Path
) -> None:
    job = job_of(tmp_path, wan2, **{**LORA, "teacher_deepspeed_config": {}} | teacher)
    assert rows(job) == [("student", HIGH, weights, True), ("student", LOW, weights, True)]
    assert job.networks.bases == {HIGH: HIGH, LOW: LOW}
    assert bool(job.networks.copies_because) == (weights == COPY)


def test_of_two_experts_the_one_that_is_not_trained_is_called_and_has_no_critic(
    tmp_path: Path, wan2: Path
) -> None:
    job = job_of(tmp_path, wan2, **LORA | LOW_ALONE)
    assert rows(job) == [
        ("student", HIGH, SHARED, False),
        ("student", LOW, SHARED, True),
        ("critic", LOW, SHARED, True),
    ]
    assert job.networks.student[HIGH].is_called and job.networks.others["critic"].setting.updates == 3
    assert [*job.networks.teacher] == [HIGH, LOW]  # whose weights they have


def test_a_critic_from_the_teacher_is_a_copy_of_it_beside_a_student_of_another_shape(
    tmp_path: Path, wan2: Path
) -> None:
    objective = {"objective": DMD2 | {"critic_start": "teacher"}, "student_config": {"num_layers": 1}}
    job = job_of(tmp_path, wan2, guidance_scale=4.0, **objective)
    critic = job.networks.others["critic"]
    assert (critic.weights, critic.copied, critic.config) == (COPY, LOW, job.folder.config)
    assert critic.parameters.frozen == {} and job.networks.first.config.num_layers == 1


@pytest.mark.parametrize(("dtype", "weights", "notes"), [("float32", SHARED, 0), ("bfloat16", COPY, 1)])
def test_the_log_shows_whose_weights_each_network_has(
    dtype: str, weights: str, notes: int, tmp_path: Path, wan2: Path
) -> None:
    lines = summary(job_of(tmp_path, wan2, **LORA | LOW_ALONE | {"teacher_dtype": dtype}))
    first = next(number for number, line in enumerate(lines) if line.startswith("networks  teacher"))
    critic = next(line for line in lines[first:] if line.startswith("          critic"))
    assert f"  {weights}  " in critic and "3 updates a step" in critic
    assert sum("copies of the weights for each role, as its JSON has" in one for one in lines) == notes
