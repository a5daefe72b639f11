"""A recipe and flags become a run; older flags, what is left open, and the places of settings."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ranks import write_json
from reading import read_run

from wandistiller.cli.main import main
from wandistiller.config.identity import identity, write_settings
from wandistiller.config.recipe import read_recipe, recipe_of
from wandistiller.config.run_config import DEFAULT_ENGINE, DEFAULT_TEACHER, ONLY_FLAGS, RunConfig
from wandistiller.config.stages import read_jobs
from wandistiller.config.validate import read_job
from wandistiller.planner.resolve_auto import resolve_auto
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json, shipped

PATHS = {"teacher_path": "tiny", "data_path": "tiny", "output_dir": "out"}
CPU = "ds_configs/teacher/host_cpu.json"


def run(recipe: dict[str, Any], folder: Path, **flags: Any) -> RunConfig:
    return read_run(str(write_json(folder / "r.json", PATHS | recipe)), flags)


@pytest.mark.parametrize(
    ("values", "flags", "expected"),
    [
        ({"seed": 1, "height": 64}, {"seed": 2}, {"seed": 2, "height": 64}),
        ({"seed": 1}, {"seed": 0}, {"seed": 0}),  # a flag that equals the default wins too
        ({}, {}, {}),
        ({"num_epochs": 2}, {"max_steps": 5}, {"max_steps": 5, "num_epochs": None}),
        ({"max_steps": 5}, {"num_epochs": 2}, {"max_steps": None, "num_epochs": 2}),
    ],
)
def test_a_flag_wins_over_the_recipe_and_the_recipe_over_the_default(
    tmp_path: Path, values: dict[str, Any], flags: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert run(values, tmp_path, **flags) == RunConfig(**PATHS, **expected)


@pytest.mark.parametrize("key", PATHS)
def test_a_missing_path_names_its_flag(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(None, {k: v for k, v in PATHS.items() if k != key})
    assert caught.value.problems == [f"command line: `{key}` is missing. Give --{key} or the recipe key."]


def test_a_config_of_the_current_folder_wins_over_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("ds_configs/student/zero2_offload.json")
    assert shipped(str(own)).is_file() and not own.exists()
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert read_json(str(own)) == {}


def test_a_config_written_out_and_read_again_is_equal(tmp_path: Path) -> None:
    objects = {"student_config": {"init": "random"}, "objective": {"name": "velocity"}}
    config = RunConfig(**PATHS, **objects, seed=3, guidance_scale=4, shift=2.5, sample_prompts=["a", "色"])
    keys = {key: value for key, value in asdict(config).items() if key not in ONLY_FLAGS}
    assert run(keys, tmp_path) == config


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ({"teacher_deepspeed_config": "ds_configs/teacher/owner.json"}, {"teacher_deepspeed_config": "cpu"}),
        (
            {"teacher_deepspeed_config": {"zero_optimization": {"stage": 3}}},
            {"teacher_deepspeed_config": CPU},
        ),
        ({"teacher_dtype": "float32"}, {"teacher_deepspeed_config": CPU}),
    ],
)
def test_a_strategy_or_json_flag_wins_over_the_recipe_s_and_over_its_precision(
    tmp_path: Path, recipe: dict[str, Any], flags: dict[str, Any]
) -> None:
    teacher = read_job(run(recipe, tmp_path, **flags), 1).teacher
    assert (teacher.engine.where, teacher.engine.precision) == (CPU, "bfloat16")


def test_the_resolved_run_gives_the_same_run_again(tmp_path: Path) -> None:
    output = {"output_dir": str(tmp_path / "o")}
    job = read_job(run(output, tmp_path, teacher_deepspeed_config="cpu", teacher_dtype="float32"), 1)
    write_settings(job)
    again = read_job(read_run(str(job.output / "resolved" / "run.json"), {}), 1)
    assert again.teacher == job.teacher and identity(again) == identity(job)


@pytest.mark.slow
def test_flags_that_the_launcher_makes_needless_are_accepted(tmp_path: Path, one_rank: object) -> None:
    paths = ["--teacher_path", "tiny", "--data_path", "tiny", "--output_dir", str(tmp_path)]
    needless = "--distributed --multi_gpu --save_samples --num_workers 4".split()
    assert main(["train", *paths, *needless, "--dry_run"]) == 0


def test_an_interval_in_epochs_is_one_in_steps_and_pictures_go_where_sample_dir_says(tmp_path: Path) -> None:
    job = read_job(run({"sample_interval": 2, "max_steps": 500, "sample_dir": "pictures"}, tmp_path), world=1)
    assert job.run.sample_every == 252 and job.batch.total == 8  # 2 x 1008 prompts
    assert job.samples == Path("pictures")


def precisions(values: dict[str, Any], emulated: bool | None) -> tuple[str, str]:
    """The precisions of the student's and of the teacher's engine."""
    (job,) = read_jobs(recipe_of(PATHS | values, {}), 1, emulated=emulated)
    return job.student_engine.precision, job.teacher.engine.precision


@pytest.mark.parametrize(
    "left_open",
    [
        {},
        {"teacher_deepspeed_config": "gpu"},
        {"deepspeed_config": "auto", "teacher_deepspeed_config": "auto"},
    ],
)
def test_precision_that_is_left_open_is_float32_where_the_cpu_emulates_bf16(
    left_open: dict[str, Any],
) -> None:
    assert precisions(left_open, True) == ("float32", "float32")
    assert precisions(left_open, False) == precisions(left_open, None) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    "chosen",
    [
        {"mixed_precision": "bf16", "teacher_dtype": "bfloat16"},
        {"deepspeed_config": DEFAULT_ENGINE, "teacher_deepspeed_config": DEFAULT_TEACHER},
    ],
)
def test_precision_that_the_user_chose_stays_where_the_cpu_emulates_bf16(chosen: dict[str, Any]) -> None:
    assert precisions(chosen, True) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("begun_in", ["float32", "bfloat16"])
def test_a_run_keeps_the_precision_that_it_has_begun_with(
    tmp_path: Path, emulated: bool, begun_in: str
) -> None:
    (tmp_path / "resolved").mkdir()
    for name in ("student", "teacher"):
        ds = {"bf16": {"enabled": True}} if begun_in == "bfloat16" else {}
        write_json(tmp_path / "resolved" / f"{name}_deepspeed.json", ds)
    output = {"output_dir": str(tmp_path)}
    assert precisions(output, emulated) == (begun_in, begun_in)
    anew = "float32" if emulated else "bfloat16"
    assert precisions(output | {"resume": "never"}, emulated) == (anew, anew)


def test_beside_auto_the_problems_of_a_recipe_s_json_name_its_file(tmp_path: Path) -> None:
    bad = write_json(tmp_path / "bad.json", {"optimizr": {}})
    with pytest.raises(ConfigError, match=f"{bad}: `optimizr` is"):
        read_job(run({"deepspeed_config": str(bad)}, tmp_path, deepspeed_config="auto"), 1)


def test_a_problem_names_the_place_that_its_setting_is_from(tmp_path: Path) -> None:
    file = str(write_json(tmp_path / "r.json", PATHS | {"lora": {"rnk": 4}, "objective": "speed"}))
    flags = {"background": "blu", "objective": "spd", "deepspeed_config": {"optimizr": 1}}
    with pytest.raises(ConfigError) as caught:
        read_jobs(read_recipe(file, flags), 1)
    places = {text.split("`")[1]: text.split(": ")[0] for text in caught.value.problems if "`" in text}
    expected = {"lora.rnk": file} | dict.fromkeys(("background", "objective", "optimizr"), "command line")
    assert expected.items() <= places.items()


def test_a_start_opens_each_json_once(tmp_path: Path) -> None:
    """Those that the recipe names, and the recipe."""
    names = {"student_config": "students/half", "deepspeed_config": "student/zero2"}
    names |= {"teacher_deepspeed_config": "teacher/replicated"}
    values = {
        key: write_json(tmp_path / f"{key}.json", read_json(f"ds_configs/{name}.json"))
        for key, name in names.items()
    }
    values |= {"recipe": write_json(tmp_path / "recipe.json", PATHS | {k: str(v) for k, v in values.items()})}
    opened: list[str] = []
    watched = {str(file): key for key, file in values.items()}

    def count(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]) in watched:
            opened.append(watched[str(arguments[0])])

    sys.addaudithook(count)
    (job,) = read_jobs(read_recipe(str(values["recipe"]), {}), 1)
    resolve_auto(job)
    assert sorted(opened) == sorted(watched.values())
