"""A recipe's stages become runs: keys outside hold for all, a stage's own win, flags win over both."""

from pathlib import Path
from typing import Any

import pytest
from ranks import write_json

from wandistiller.config.recipe import Recipe, read_recipe, recipe_of
from wandistiller.config.run_config import RunConfig
from wandistiller.config.stages import read_jobs
from wandistiller.utils.errors import ConfigError

OUTER = {"teacher_path": "tiny", "data_path": "tiny", "output_dir": "out", "max_steps": 7, "seed": 3}
TWO = [{"name": "match"}, {"name": "few", "objective": "consistency", "max_steps": 5}]


def read(folder: Path, flags: dict[str, Any] | None = None, **values: Any) -> Recipe:
    return read_recipe(str(write_json(folder / "r.json", OUTER | {"stages": TWO} | values)), flags or {})


def runs(folder: Path, flags: dict[str, Any] | None = None, **values: Any) -> dict[str, RunConfig]:
    return read(folder, flags, **values).runs


def error(folder: Path, **given: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        runs(folder, **given)
    return str(raised.value)


def test_keys_outside_hold_for_all_and_a_stage_s_own_win(tmp_path: Path) -> None:
    match, few = runs(tmp_path).values()
    assert (match.max_steps, few.max_steps, match.seed, few.seed) == (7, 5, 3, 3)
    assert (match.objective, few.objective) == ("velocity", "consistency")


def test_stages_have_folders_of_their_own_and_one_cache(tmp_path: Path) -> None:
    match, few = runs(tmp_path).values()
    assert (match.output_dir, few.output_dir) == ("out/1_match", "out/2_few")
    assert match.cache_dir == few.cache_dir == "out/cache"
    assert few.student_config == {"init": "out/1_match"}


def test_flags_win_over_both_and_the_student_s_is_of_the_first_stage(tmp_path: Path) -> None:
    flags = {"max_steps": 2, "output_dir": "there", "student_config": "ds_configs/students/quarter.json"}
    match, few = runs(tmp_path, flags).values()
    assert match.max_steps == few.max_steps == 2 and few.output_dir == "there/2_few"
    assert match.student_config == flags["student_config"] and few.student_config == {"init": "there/1_match"}


@pytest.mark.parametrize(
    ("outer", "own", "expected"),
    [
        ({"max_steps": None, "num_epochs": 2}, {"max_steps": 5}, {"max_steps": 5, "num_epochs": None}),
        ({"teacher_dtype": "float32"}, {"teacher_deepspeed_config": "t.json"}, {"teacher_dtype": None}),
        ({"teacher_dtype": "float32"}, {"teacher_deepspeed_config": "cpu"}, {"teacher_dtype": "float32"}),
    ],
)
def test_a_stage_s_key_replaces_those_that_mean_the_same(
    tmp_path: Path, outer: dict[str, Any], own: dict[str, Any], expected: dict[str, Any]
) -> None:
    outer = {key: value for key, value in (OUTER | outer).items() if value is not None}
    given = outer | {"stages": [{"name": "only"} | own]}
    (run,) = recipe_of(given, {}).runs.values()
    assert {key: getattr(run, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"name": "match"}, "`stages` is"),
        ([], "Write a list of objects"),
        ([{"max_steps": 3}], "`stages, 1: name` is null"),
        ([{"name": "a/b"}], "letters, digits, - and _"),
        ([{"name": "a"}, {"name": "a"}], "Another has it"),
        ([{"name": "a", "output_dir": "x"}], "Write it outside of `stages`"),
        ([{"name": "a"}, {"name": "b", "student_config": {}}], "only the first one has this key"),
    ],
)
def test_a_wrong_list_of_stages_is_named(tmp_path: Path, stages: Any, message: str) -> None:
    assert message in error(tmp_path, stages=stages)


def test_misfits_of_all_stages_with_teacher_and_data_come_at_once(tmp_path: Path) -> None:
    wrong = [
        {"name": "match", "height": 33, "student_config": {"num_layers": 2}},
        {"name": "few", "objective": {"name": "dmd2", "critic_start": "teacher"}, "lora": {"rank": 2}},
        {"name": "last", "shift": 3, "width": 31},
    ]
    with pytest.raises(ConfigError) as raised:
        read_jobs(read(tmp_path, stages=wrong, output_dir=str(tmp_path / "out")), 1)
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["stage match", "stage few", "stage last"]


def test_a_checkpoint_cannot_be_named_for_all_stages(tmp_path: Path) -> None:
    assert "Write auto or never" in error(tmp_path, resume="out/1_match/checkpoints/step_00000003")


def test_problems_of_all_stages_come_at_once_and_the_recipe_s_own_once(tmp_path: Path) -> None:
    wrong = [{"name": "match", "lr": -1}, {"name": "few", "ema": 2}]
    lines = error(tmp_path, stages=wrong, height="tall").splitlines()
    assert len(lines) == 3
    assert sum("r.json: `height`" in line for line in lines) == 1
    assert any(f"stage match: {tmp_path}/r.json: `lr` is -1" in line for line in lines)
    assert any(f"stage few: {tmp_path}/r.json: `ema` is 2" in line for line in lines)


def test_a_recipe_s_own_values_stay_as_they_were_given() -> None:
    stage = {"name": "only", "max_steps": 3, "teacher_deepspeed_config": "gpu"}
    given = OUTER | {"stages": [dict(stage)]}
    (run,) = recipe_of(given, {}).runs.values()
    assert run.max_steps == 3 and given["stages"] == [stage]
