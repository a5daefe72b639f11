"""Orders of stages, and keys that one of them has alone: a message with what to write, or a sound run."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ranks import ROOT
from recipes import recipe
from slow_cases import slow_but
from styles import style

from wandistiller.config.job import Job
from wandistiller.config.recipe import read_recipe, recipe_of
from wandistiller.config.stages import order_problems, read_jobs
from wandistiller.config.validate import read_job
from wandistiller.objectives.objective import read_objective
from wandistiller.utils.errors import ConfigError

Stage = dict[str, Any]
Problems = Callable[..., list[str]]


def dmd2(expert: str, steps: int = 4, name: str = "", **more: Any) -> Stage:
    objective = {"name": "dmd2", "steps": steps, "expert": f"{expert}_noise"}
    return {"name": name or expert, "objective": objective} | more


MATCH: Stage = {"name": "match", "objective": "velocity"}
BOTH: Stage = {"name": "both", "objective": {"name": "consistency", "edges": 4}}
HIGH, LOW = dmd2("high"), dmd2("low")
LORA = {"lora": {"rank": 4}}
ONE_SAMPLER = "One sampler draws with both: write the same steps, sampler and shift."


@pytest.fixture
def jobs(tmp_path: Path, wan2: Path) -> Callable[..., list[Job]]:
    def of(*stages: Stage, **more: Any) -> list[Job]:
        given = recipe(tmp_path, wan2, output_dir=str(tmp_path / "out"), shift=7.0, stages=[*stages])
        given |= {"student_config": {"experts": "two"}} | more
        return read_jobs(recipe_of(given, {}, "r.json"), 1, here=False)

    return of


@pytest.fixture
def problems(jobs: Callable[..., list[Job]]) -> Problems:
    def of(*stages: Stage, **more: Any) -> list[str]:
        try:
            return jobs(*stages, **more) and []
        except ConfigError as error:
            return [text.replace("stage low: r.json: ", "low: ") for text in error.problems]

    return of


@pytest.fixture
def file(tmp_path: Path, wan2: Path) -> str:
    return str(style(wan2, tmp_path / "style.safetensors", "to_q"))


@pytest.mark.parametrize(
    ("stages", "remedy"),
    [
        ([LOW, HIGH], "Put stage high before this one."),
        ([MATCH, LOW, BOTH], "Put stage both before this one."),
        ([MATCH, LOW], 'Train that first, by "expert": "high_noise".'),
    ],
)
@pytest.mark.parametrize("more", [LORA, {}], ids=["adapters", "whole networks"])
def test_a_low_noise_expert_that_comes_first_is_refused_with_what_to_do(
    problems: Problems, stages: list[Stage], remedy: str, more: dict[str, Any]
) -> None:
    assert problems(*stages, **more) == [
        "low: `objective` trains the low-noise expert, whose samples begin with the high-noise expert, and "
        f"that is not trained for few steps yet. {remedy}"
    ]


def test_a_low_noise_expert_may_come_first_where_the_high_noise_one_begins_as_a_file(
    problems: Problems, file: str
) -> None:
    begun = {"lora": LORA["lora"] | {"start": {"high_noise": file}}}
    assert problems(LOW, HIGH, **begun) == problems(LOW, **begun) == []


def test_a_stage_that_has_begun_goes_on_in_any_order(jobs: Callable[..., list[Job]]) -> None:
    low = jobs(HIGH, LOW)[1]
    low = replace(low, start=None, student=replace(low.student, init="teacher"))
    assert len(order_problems([low])) == 1
    assert order_problems([replace(low, resume_from=Path("step_00000001"))]) == {}


def test_a_stage_for_any_number_of_steps_after_one_for_few_is_refused(problems: Problems) -> None:
    assert problems(HIGH, LOW, MATCH) == [
        "stage match: r.json: `objective` is for any number of sampling steps, and stage high has trained "
        "the student for 4. Put this stage before it."
    ]


def test_experts_of_two_samplers_are_refused_with_both_stages(problems: Problems) -> None:
    for low, its in (
        (dmd2("low", 2), "2 steps (euler, shift 7)"),
        (LOW | {"shift": 8.0}, "4 steps (euler, shift 8)"),
    ):
        assert problems(HIGH, low) == [
            f"low: `objective` trains the low-noise expert for {its}, but stage high the high-noise expert "
            f"for 4 steps (euler, shift 7). {ONE_SAMPLER}"
        ]


def test_the_last_expert_that_is_refined_must_agree_with_the_other_s(problems: Problems) -> None:
    (found,) = problems(HIGH, LOW, dmd2("high", 2, "again"))
    assert found.startswith("stage again: ") and "but stage low the low-noise expert for 4 steps" in found


def test_experts_may_be_refined_for_fewer_steps_one_after_the_other(problems: Problems) -> None:
    high, low = dmd2("high", 2, "high_2"), dmd2("low", 2, "low_2")
    for before in ([MATCH, BOTH], [HIGH], [HIGH, LOW]):
        assert problems(*before, high, low) == []


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (HIGH, LOW, ""),
        (BOTH, LOW, ""),
        (HIGH, dmd2("high", 2), ""),
        (dmd2("high", 2), LOW, "which `init` names, the high-noise expert for 2 steps (euler, shift 7)."),
        (MATCH, LOW, "is not trained for few steps yet. Train that first"),
        (BOTH | LORA, BOTH | LORA | {"teacher_lora": ...}, "Give the teacher of that run."),
    ],
)
def test_a_run_of_its_own_goes_on_from_another_as_a_stage_does(
    before: Stage, after: Stage, message: str, tmp_path: Path, wan2: Path, file: str
) -> None:
    job = None
    for number, stage in enumerate((before, after)):
        given = recipe(tmp_path, wan2, student_config={"experts": "two"}, shift=7.0)
        given |= {key: value for key, value in stage.items() if key != "name"}
        given |= {"teacher_lora": {"file": file, "expert": "high_noise"}} if "teacher_lora" in stage else {}
        given |= {"output_dir": str(tmp_path / f"{number}")}
        given |= {"student_config": {"init": str(job.output)}} if job else {}
        (run,) = recipe_of(given, {}, "r.json").runs.values()
        job = read_job(run, 1, here=False, previous=job)
    found = [*order_problems([replace(job, previous=None)])]
    assert len(found) == bool(message) and message in "".join(found)


def test_a_key_that_would_give_a_stage_another_base_is_named(problems: Problems, file: str) -> None:
    styled = {"teacher_lora": {"file": file, "expert": "high_noise"}}
    found = [
        "low: `teacher_lora` gives another teacher than that of stage high, whose adapters this run begins "
        "with: each role would need a copy of the whole network. Write it once, outside of `stages`."
    ]
    assert problems(HIGH, LOW | styled, **LORA) == problems(HIGH | styled, LOW, **LORA) == found
    assert problems(HIGH, LOW, **LORA, **styled) == problems(HIGH, LOW | styled) == []
    (missing,) = problems(HIGH | LORA, LOW)
    assert missing.startswith("low: `lora` is missing, and stage high trains adapters: this one ")


def test_a_start_of_a_later_stage_alone_is_named(problems: Problems, file: str) -> None:
    begun = {"lora": LORA["lora"] | {"start": {"low_noise": file}}}
    assert problems(HIGH, LOW, **begun) == problems(HIGH | begun, LOW | LORA) == []
    (problem,) = problems(HIGH | LORA, LOW | begun)
    assert problem.startswith("low: `lora.start` is ") and "Write it in the first stage" in problem


def sound(order: tuple[str, ...]) -> bool:
    """Whether a student of two experts learns in this order what it samples by at the end."""
    few = [name in ("both", "high", "low") for name in order]
    ready = all({"both", "high"} & {*order[:n]} for n, name in enumerate(order) if name == "low")
    return ready and few == sorted(few)


@pytest.mark.parametrize("number", slow_but([2], [2, 8]))
def test_any_order_of_stages_with_a_key_in_one_alone_is_a_sound_run_or_a_message_that_names_a_stage(
    number: int, problems: Problems, file: str
) -> None:
    pool, draw = {stage["name"]: stage for stage in (MATCH, BOTH, HIGH, LOW)}, Random(0)
    style_alone = {"teacher_lora": {"file": file, "expert": "high_noise"}}
    start = {"lora": LORA["lora"] | {"start": {"low_noise": file}}}
    orders = [order for length in (1, 2, 3) for order in permutations(pool, length)]
    for order in draw.sample(orders, number):
        for of_all, own in ((LORA, {}), (LORA, style_alone), (LORA, start), ({}, LORA), ({}, style_alone)):
            place = draw.randrange(len(order))
            stages = [pool[name] | (own if n == place else {}) for n, name in enumerate(order)]
            alone = len(order) == 1 or not own or own is start and place == 0
            whole = alone or not of_all and (own is style_alone or place > 0)
            wrong = problems(*stages, **of_all)
            assert bool(wrong) != (sound(order) and whole), (order, of_all, own, place, wrong)
            assert all(re.match(r"(stage \w+|low): ", text) and text.endswith(".") for text in wrong)


def test_the_command_of_the_page_makes_every_stage_of_four_steps_one_of_two(tmp_path: Path) -> None:
    (command,) = re.findall(r"`(sed .*?)`", (ROOT / "docs" / "few_step_student.md").read_text())
    command, _, file = command.partition(" > ")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    (tmp_path / file).write_text(done.stdout)
    runs = read_recipe(str(tmp_path / file), {}).runs
    steps = {name: read_objective(run.objective).sampling_steps for name, run in runs.items()}
    assert steps == {"match": None, "consistency": 2, "high": 2, "low": 2}
