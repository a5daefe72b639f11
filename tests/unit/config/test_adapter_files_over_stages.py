"""Adapters over the stages of a recipe: trained further where both have the same settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recipes import recipe
from styles import style

from wandistiller.config.adapter_files import changed_adapters
from wandistiller.config.job import Job
from wandistiller.config.recipe import recipe_of
from wandistiller.config.stages import read_jobs
from wandistiller.utils.errors import ConfigError


def jobs(folder: Path, wan: Path, *settings: dict[str, Any]) -> list[Job]:
    given = recipe(folder, wan, output_dir=str(folder / "out"), student_config={"experts": "two"})
    given["stages"] = [{"name": f"s{number}", "lora": lora} for number, lora in enumerate(settings)]
    return read_jobs(recipe_of(given, {}, "r.json"), 1, here=False)


def bases(folder: Path, wan: Path, *settings: dict[str, Any]) -> list[int]:
    """The number of networks in each stage that are the teacher's but for their adapters."""
    return [len(job.networks.bases) for job in jobs(folder, wan, *settings)]


@pytest.mark.parametrize(
    "second",
    [
        {"rank": 8, "alpha": 8},
        {"rank": 8, "ranks": {}},
        {"rank": 8, "targets": ["to_q", "to_k", "to_v", "to_out"]},
    ],
    ids=["alpha", "no ranks", "targets"],
)
def test_settings_that_say_the_defaults_are_those_of_the_stage_before(
    second: dict[str, Any], tmp_path: Path, wan2: Path
) -> None:
    assert bases(tmp_path, wan2, {"rank": 8}, second) == [2, 2]


def test_adapters_of_another_rank_are_refused_with_what_they_would_cost(tmp_path: Path, wan2: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        bases(tmp_path, wan2, {"rank": 8}, {"rank": 4})
    assert raised.value.problems == [
        f"stage s1: r.json: `lora` has another rank than the run {tmp_path / 'out' / '1_s0'}, whose "
        "adapters it begins with: they would be merged, and each role need a copy of the whole network. "
        'Write that run\'s {"rank": 8}, or begin anew with its exported file as `lora.start`.'
    ]


def test_adapters_go_on_under_another_name_of_the_same_teacher(tmp_path: Path, wan2: Path) -> None:
    _, later = jobs(tmp_path, wan2, {"rank": 8}, {"rank": 8})
    elsewhere = replace(later.start, facts=replace(later.start.facts, teacher_path="org/wan"))
    assert len(replace(later, start=elsewhere).networks.bases) == 2
    assert replace(later, start=replace(elsewhere, teacher="another's")).networks.bases == {}


def test_what_adapters_begin_with_is_said_once(tmp_path: Path, wan2: Path) -> None:
    file = f"both={style(wan2, tmp_path / 'style.safetensors', 'to_q')}"
    _, later = jobs(tmp_path, wan2, {"rank": 8, "start": file}, {"rank": 8, "start": file})
    assert changed_adapters(later) == []  # they begin with the stage before, and that with the file
    (problem,) = changed_adapters(replace(later, previous=None))
    assert problem.startswith(f"recipe: `lora.start` is {file}, but the student begins with the adapters of")
