"""Short flags of older command lines become the settings that they stand for."""

from pathlib import Path
from typing import Any

import pytest
from ranks import write_json
from reading import read_run

from wandistiller.cli.main import main
from wandistiller.config.identity import identity, write_resolved
from wandistiller.config.run_config import RunConfig
from wandistiller.config.shorthands import merged
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_config import load
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import ConfigError

PATHS = {"teacher_path": "tiny", "data_path": "tiny", "output_dir": "out"}
CPU = "ds_configs/teacher/host_cpu.json"


def run(recipe: dict[str, Any], folder: Path, **flags: Any) -> RunConfig:
    return read_run(str(write_json(folder / "r.json", PATHS | recipe)), flags)


@pytest.mark.parametrize(("strategy", "name"), strategies().items())
def test_a_strategy_is_its_teacher_json(tmp_path: Path, strategy: str, name: str) -> None:
    for key in ("teacher_device_strategy", "teacher_deepspeed_config"):
        config = run({}, tmp_path, **{key: strategy})
        assert config.teacher_deepspeed_config == f"ds_configs/teacher/{name}.json"


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ({}, {"teacher_on_cpu": True}),
        ({}, {"teacher_device_strategy": "cpu", "teacher_deepspeed_config": CPU}),
        ({"teacher_deepspeed_config": "ds_configs/teacher/owner.json"}, {"teacher_device_strategy": "cpu"}),
        ({"teacher_device_strategy": "gpu0"}, {"teacher_deepspeed_config": CPU}),
        ({"teacher_deepspeed_config": {"zero_optimization": {"stage": 3}}}, {"teacher_on_cpu": True}),
        ({"teacher_dtype": "float32"}, {"teacher_deepspeed_config": CPU}),
    ],
)
def test_a_strategy_or_json_flag_wins_over_the_recipe_s_and_over_its_precision(
    tmp_path: Path, recipe: dict[str, Any], flags: dict[str, Any]
) -> None:
    config = run(recipe, tmp_path, **flags)
    assert config.teacher_deepspeed_config == CPU
    assert read_job(config, 1).teacher.engine.precision == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "sections"),
    [("float32", {}), ("bfloat16", {"bf16": {"enabled": True}}), ("float16", {"fp16": {"enabled": True}})],
)
def test_teacher_dtype_sets_the_precision_of_a_json_that_was_not_named(
    tmp_path: Path, dtype: str, sections: dict
) -> None:
    shipped = load({"bf16": {"enabled": True}})
    assert shipped.in_precision(run({}, tmp_path, teacher_dtype=dtype).teacher_dtype).raw == sections


def test_the_resolved_run_gives_the_same_run_again(tmp_path: Path) -> None:
    output = {"output_dir": str(tmp_path / "o")}
    job = read_job(run(output, tmp_path, teacher_on_cpu=True, teacher_dtype="float32"), 1)
    write_resolved(job)
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


def test_precision_that_is_left_open_is_float32_where_the_cpu_emulates_bf16() -> None:
    run = merged({}, PATHS, None, emulated=True)
    assert (run.mixed_precision, run.teacher_dtype) == ("no", "float32")
    run = merged({}, PATHS | {"teacher_device_strategy": "gpu"}, None, emulated=True)
    assert (run.mixed_precision, run.teacher_dtype) == ("no", "float32")
    for emulated in (False, None):
        run = merged({}, PATHS, None, emulated=emulated)
        assert (run.mixed_precision, run.teacher_dtype) == (None, None)


def test_precision_that_the_user_chose_stays_where_the_cpu_emulates_bf16() -> None:
    chosen = {"mixed_precision": "bf16", "teacher_dtype": "bfloat16"}
    run = merged(chosen, PATHS, None, emulated=True)
    assert (run.mixed_precision, run.teacher_dtype) == ("bf16", "bfloat16")
    named = {
        "deepspeed_config": "ds_configs/student/zero2.json",
        "teacher_deepspeed_config": "ds_configs/teacher/replicated.json",
    }
    run = merged(named, PATHS, None, emulated=True)
    assert (run.mixed_precision, run.teacher_dtype) == (None, None)


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("begun_in", ["float32", "bfloat16"])
def test_a_run_keeps_the_precision_that_it_has_begun_with(
    tmp_path: Path, emulated: bool, begun_in: str
) -> None:
    (tmp_path / "resolved").mkdir()
    for name in ("student", "teacher"):
        ds = {"bf16": {"enabled": True}} if begun_in == "bfloat16" else {}
        write_json(tmp_path / "resolved" / f"{name}_deepspeed.json", ds)
    paths = PATHS | {"output_dir": str(tmp_path)}
    run = merged({}, paths, None, emulated=emulated)
    assert run.mixed_precision == ("no" if begun_in == "float32" else None)
    assert run.teacher_dtype == ("float32" if begun_in == "float32" else None)
    anew = merged({}, paths | {"resume": "never"}, None, emulated=emulated)
    assert anew.mixed_precision == ("no" if emulated else None)


def test_beside_auto_the_problems_of_a_recipe_s_json_name_its_file(tmp_path: Path) -> None:
    bad = write_json(tmp_path / "bad.json", {"optimizr": {}})
    with pytest.raises(ConfigError, match=f"{bad}: `optimizr` is"):
        run({"deepspeed_config": str(bad)}, tmp_path, deepspeed_config="auto")
