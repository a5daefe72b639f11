"""Two settings for one thing: a flag replaces the recipe's, and neither what a named DeepSpeed JSON fixes."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from ranks import write_json

from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.shorthands import read_run
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_config import dtype_name
from wandistiller.utils.errors import ConfigError

STUDENT = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
TEACHER = {"bf16": {"enabled": True}}
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lr": ("deepspeed_config", "optimizer.params.lr", {"same": 1e-3, "other": 2e-3}),
    "batch_size": ("deepspeed_config", "train_micro_batch_size_per_gpu", {"same": 2, "other": 4}),
    "mixed_precision": ("deepspeed_config", "bf16", {"same": "bf16", "other": "no"}),
    "teacher_dtype": ("teacher_deepspeed_config", "bf16", {"same": "bfloat16", "other": "float32"}),
}
"""Setting -> the JSON that has it too, its key there, and a value that agrees or differs."""
PLACES = ("recipe", "flag")
RANKS = (1, 2)


def run(folder: Path, recipe: dict[str, Any], flags: dict[str, Any]) -> RunConfig:
    paths = {"teacher_path": "tiny", "data_path": "tiny", "output_dir": str(folder / "out")}
    return read_run(str(write_json(folder / "recipe.json", paths | recipe)), flags)


def placed(folder: Path, setting: str, value: str, at: str, json_at: str, left_open: bool) -> RunConfig:
    """A run with the setting and the JSON each in the recipe or as a flag."""
    kind, key, values = SETTINGS[setting]
    content: dict[str, Any] = copy.deepcopy(TEACHER if kind.startswith("teacher") else STUDENT)
    if left_open:
        *sections, last = key.split(".")
        inner = content
        for section in sections:
            inner = inner[section]
        del inner[last]
    given: dict[str, dict[str, Any]] = {"recipe": {}, "flag": {}}
    given[json_at][kind] = str(write_json(folder / "engine.json", content))
    given[at][setting] = values[value]
    return run(folder, given["recipe"], given["flag"])


def used(job: Job, setting: str) -> Any:
    params = job.student_ds["optimizer"]["params"]
    return {
        "lr": params["lr"],
        "batch_size": job.batch.micro,
        "mixed_precision": {"bfloat16": "bf16", "float32": "no"}[dtype_name(job.student_ds)],
        "teacher_dtype": dtype_name(job.teacher_ds),
    }[setting]


@pytest.mark.parametrize(("setting", "at", "json_at"), product(SETTINGS, PLACES, PLACES))
def test_a_setting_and_a_named_json_that_differ_are_an_error_that_names_both(
    tmp_path: Path, setting: str, at: str, json_at: str
) -> None:
    if (setting, at, json_at) == ("teacher_dtype", "recipe", "flag"):
        config = placed(tmp_path, setting, "other", at, json_at, False)
        assert config.teacher_dtype is None  # a flag with a JSON replaces the recipe's precision too
        return
    with pytest.raises(ConfigError) as caught:
        placed(tmp_path, setting, "other", at, json_at, left_open=False)
    (text,) = caught.value.problems
    where = {"recipe": f"{tmp_path}/recipe.json", "flag": "command line"}[at]
    assert text.startswith(f"{where}: `{setting}` is {SETTINGS[setting][2]['other']}, but ")
    assert f"{tmp_path}/engine.json" in text and text.endswith("Keep one.")


@pytest.mark.parametrize(("setting", "at", "value"), product(SETTINGS, PLACES, ("same", "other")))
def test_a_value_that_the_json_leaves_open_is_the_setting_s(
    tmp_path: Path, setting: str, at: str, value: str
) -> None:
    config = placed(tmp_path, setting, value, at, "recipe", left_open=True)
    assert used(read_job(config, 1), setting) == SETTINGS[setting][2][value]


@pytest.mark.parametrize(("setting", "at", "json_at"), product(SETTINGS, PLACES, PLACES))
def test_a_setting_that_agrees_with_the_json_is_taken(
    tmp_path: Path, setting: str, at: str, json_at: str
) -> None:
    config = placed(tmp_path, setting, "same", at, json_at, left_open=False)
    assert used(read_job(config, 1), setting) == SETTINGS[setting][2]["same"]


@pytest.mark.parametrize(("at", "ranks"), product(PLACES, RANKS))
def test_a_global_batch_that_a_json_fixes_stays_and_accumulation_follows(
    tmp_path: Path, at: str, ranks: int
) -> None:
    ds = {"train_batch_size": 32, "optimizer": STUDENT["optimizer"]}
    given = {"recipe": {"deepspeed_config": ds}, "flag": {}}
    given[at]["batch_size"] = 4
    batch = read_job(run(tmp_path, given["recipe"], given["flag"]), ranks).batch
    assert (batch.total, batch.micro, batch.accumulation) == (32, 4, 8 // ranks)


@pytest.mark.parametrize(("ranks", "size"), [(1, 4), (2, 4), (2, 5)])
def test_a_batch_size_that_cannot_make_the_json_s_global_batch_is_an_error_that_names_all(
    tmp_path: Path, ranks: int, size: int
) -> None:
    config = run(tmp_path, {"deepspeed_config": "ds_configs/student/quickstart.json"}, {"batch_size": size})
    with pytest.raises(ConfigError, match="train_batch_size 16 is not") as caught:
        read_job(config, ranks)
    (text,) = caught.value.problems
    assert text.startswith(f"ds_configs/student/quickstart.json with `batch_size` {size}: ")
    assert f"{size} x gradient_accumulation_steps 1 x {ranks} rank" in text


def test_the_default_engine_s_values_are_replaced(tmp_path: Path) -> None:
    batch = read_job(run(tmp_path, {"batch_size": 4}, {}), 2).batch
    assert (batch.micro, batch.accumulation) == (4, 8)


HOST, OWNER = "ds_configs/teacher/host_cpu.json", "ds_configs/teacher/owner.json"
ONE_THING = [
    ({"max_steps": 5}, {"num_epochs": 2}, {"max_steps": None, "num_epochs": 2}),
    ({"num_epochs": 2}, {"num_steps": 3}, {"max_steps": 3, "num_epochs": None}),
    ({"num_steps": 5}, {"max_steps": 3}, {"max_steps": 3}),
    ({"sample_every": 7}, {"sample_interval": 2}, {"sample_every": 500, "sample_interval": 2}),
    ({"sample_interval": 2}, {"sample_every": 7}, {"sample_every": 7, "sample_interval": None}),
    ({"teacher_deepspeed_config": OWNER}, {"teacher_on_cpu": True}, {"teacher_deepspeed_config": HOST}),
    ({"teacher_on_cpu": True}, {"teacher_deepspeed_config": OWNER}, {"teacher_deepspeed_config": OWNER}),
    ({"teacher_device_strategy": "gpu0"}, {"teacher_on_cpu": True}, {"teacher_deepspeed_config": HOST}),
]


@pytest.mark.parametrize(("recipe", "flags", "result"), ONE_THING)
def test_a_flag_replaces_the_recipe_s_setting_for_the_same_thing_whatever_its_name(
    tmp_path: Path, recipe: dict[str, Any], flags: dict[str, Any], result: dict[str, Any]
) -> None:
    config = run(tmp_path, recipe, flags)
    assert {key: getattr(config, key) for key in result} == result


@pytest.mark.parametrize(("first", "second"), [pair[:2] for pair in ONE_THING])
@pytest.mark.parametrize("at", PLACES)
def test_two_names_for_one_thing_in_one_place_are_an_error_that_names_both(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], at: str
) -> None:
    both = first | second
    given = {"recipe": {}, "flag": {}} | {at: both}
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, given["recipe"], given["flag"])
    text = "\n".join(caught.value.problems)
    names = {"num_steps": "max_steps"} if "num_epochs" in both else {}
    assert all(f"`{names.get(key, key)}`" in text for key in both)


@pytest.mark.parametrize("at", PLACES)
def test_a_limit_of_skipped_steps_needs_steps_that_may_be_skipped(tmp_path: Path, at: str) -> None:
    given = {"recipe": {}, "flag": {}} | {at: {"nonfinite_limit": 3}}
    with pytest.raises(ConfigError, match="`nonfinite_limit` is 3. It needs `on_nonfinite`"):
        run(tmp_path, given["recipe"], given["flag"])
