"""Orders of stages, and keys that one of them has alone: a message with what to write, or a sound run."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from recipes import recipe
from styles import style

from wandistiller.config.job import Job
from wandistiller.config.stage_order import order_problems
from wandistiller.config.stages import placing, read_jobs, runs_of
from wandistiller.config.validate import read_job
from wandistiller.utils.errors import ConfigError

Stage = dict[str, Any]
MATCH: Stage = {"name": "match", "objective": "velocity"}
BOTH: Stage = {"name": "both", "objective": {"name": "consistency", "edges": 4}}
HIGH, LOW = (
    {"name": name, "objective": {"name": "dmd2", "steps": 4, "expert": f"{name}_noise"}}
    for name in ("high", "low")
)
LORA = {"lora": {"rank": 4}}
UNTRAINED = (
    "stage low: r.json: `objective` trains the low-noise expert, whose samples begin with the high-noise "
    "expert, and that is not trained for few steps yet. "
)


@pytest.fixture
def jobs(tmp_path: Path, wan2: Path) -> Callable[..., list[Job]]:
    def of(*stages: Stage, **more: Any) -> list[Job]:
        given = recipe(tmp_path, wan2, output_dir=str(tmp_path / "out"), shift=7.0, stages=[*stages])
        given |= {"student_config": {"experts": "two"}} | more
        with placing("r.json", {}):
            return read_jobs(runs_of(given, {}, "r.json", 1), 1, here=False)

    return of


@pytest.fixture
def problems(jobs: Callable[..., list[Job]]) -> Callable[..., list[str]]:
    def of(*stages: Stage, **more: Any) -> list[str]:
        try:
            return jobs(*stages, **more) and []
        except ConfigError as error:
            return error.problems

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
    ids=["low, high", "match, low, both", "match, low"],
)
@pytest.mark.parametrize("more", [LORA, {}], ids=["adapters", "whole networks"])
def test_a_low_noise_expert_that_comes_first_is_refused_with_what_to_do(
    problems: Callable[..., list[str]], stages: list[Stage], remedy: str, more: dict[str, Any]
) -> None:
    assert problems(*stages, **more) == [UNTRAINED + remedy]


def test_a_low_noise_expert_may_come_first_where_the_high_noise_one_begins_as_a_file(
    problems: Callable[..., list[str]], file: str
) -> None:
    begun = {"lora": LORA["lora"] | {"start": {"high_noise": file}}}
    assert problems(LOW, HIGH, **begun) == problems(LOW, **begun) == []


def test_a_stage_that_has_begun_goes_on_in_any_order(jobs: Callable[..., list[Job]]) -> None:
    (low,) = jobs(HIGH, LOW)[1:]
    (problem,) = order_problems(
        [alone := replace(low, start=None, student=replace(low.student, init="teacher"))]
    )
    assert "Train that first" in problem
    assert order_problems([replace(alone, resume_from=Path("step_00000001"))]) == {}


def test_a_stage_for_any_number_of_steps_after_one_for_few_is_refused(
    problems: Callable[..., list[str]],
) -> None:
    assert problems(HIGH, LOW, MATCH) == [
        "stage match: r.json: `objective` is for any number of sampling steps, and stage high has trained "
        "the student for 4. Put this stage before it."
    ]


def test_a_key_that_would_give_a_stage_another_base_is_named(
    problems: Callable[..., list[str]], file: str
) -> None:
    begins = (
        "stage low: r.json: `teacher_lora` gives another teacher than that of stage high, whose adapters "
        "this run begins with: each role would need a copy of the whole network. Write it once, outside of "
        "`stages`."
    )
    styled = {"teacher_lora": {"file": file, "expert": "high_noise"}}
    assert problems(HIGH, LOW | styled, **LORA) == problems(HIGH | styled, LOW, **LORA) == [begins]
    assert problems(HIGH, LOW, **LORA, **styled) == problems(HIGH, LOW | styled) == []
    (missing,) = problems(HIGH | LORA, LOW)
    assert missing.startswith(
        "stage low: r.json: `lora` is missing, and stage high trains adapters: this one "
    )


def test_a_start_of_a_later_stage_alone_is_named(problems: Callable[..., list[str]], file: str) -> None:
    begun = {"lora": LORA["lora"] | {"start": {"low_noise": file}}}
    assert problems(HIGH, LOW, **begun) == problems(HIGH | begun, LOW | LORA) == []
    (problem,) = problems(HIGH | LORA, LOW | begun)
    assert (
        problem.startswith("stage low: r.json: `lora.start` is ") and "Write it in the first stage" in problem
    )


def test_a_run_of_its_own_goes_on_from_adapters_of_the_same_teacher_alone(
    tmp_path: Path, wan2: Path, file: str
) -> None:
    first = recipe(
        tmp_path, wan2, output_dir=str(tmp_path / "a"), shift=7.0, objective=BOTH["objective"], **LORA
    )
    runs = runs_of(first | {"student_config": {"experts": "two"}}, {}, "r.json", 1)
    (before,) = read_jobs(runs, 1, here=False)
    given = first | {"output_dir": str(tmp_path / "b"), "student_config": {"init": str(before.output)}}
    for more, number in (({}, 0), ({"teacher_lora": {"file": file, "expert": "high_noise"}}, 1)):
        (run,) = runs_of(given | more, {}, "r.json", 1).values()
        job = replace(read_job(run, 1, here=False, previous=before), previous=None)
        assert ["Give the teacher of that run" in text for text in order_problems([job])] == [True] * number


def sound(order: tuple[str, ...]) -> bool:
    """Whether a student of two experts learns in this order what it samples by at the end."""
    few = [name in ("both", "high", "low") for name in order]
    ready = all({"both", "high"} & {*order[:n]} for n, name in enumerate(order) if name == "low")
    return ready and few == sorted(few)


def test_any_order_of_stages_with_a_key_in_one_alone_is_a_sound_run_or_a_message_that_names_a_stage(
    problems: Callable[..., list[str]], file: str
) -> None:
    pool, draw = {stage["name"]: stage for stage in (MATCH, BOTH, HIGH, LOW)}, Random(0)
    style_alone = {"teacher_lora": {"file": file, "expert": "high_noise"}}
    start = {"lora": LORA["lora"] | {"start": {"low_noise": file}}}
    orders = [order for number in (1, 2, 3) for order in permutations(pool, number)]
    for order in draw.sample(orders, 8):
        for of_all, own in ((LORA, {}), (LORA, style_alone), (LORA, start), ({}, LORA), ({}, style_alone)):
            place = draw.randrange(len(order))
            stages = [pool[name] | (own if n == place else {}) for n, name in enumerate(order)]
            alone = len(order) == 1 or not own or own is start and place == 0
            whole = alone or not of_all and (own is style_alone or place > 0)
            wrong = problems(*stages, **of_all)
            assert bool(wrong) != (sound(order) and whole), (order, of_all, own, place, wrong)
            assert all(text.startswith("stage ") and text.endswith(".") for text in wrong)
