"""Pairs of settings for one thing, in every two places: an error that names both, or the flag's value."""

from pathlib import Path
from typing import Any

import pytest
from ranks import write_json
from reading import read_run

from wandistiller.config.job import Job
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_config import load
from wandistiller.utils.errors import ConfigError

PATHS = {"teacher_path": "tiny", "data_path": "tiny"}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
OPEN = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
"""A JSON that fixes a batch and leaves the rest open."""
CHECKPOINTING = {"activation_checkpointing": {"partition_activations": False}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


AGAINST = {
    "lr": (2e-3, {"optimizer": ADAM}, "`optimizer.params.lr` is 0.001"),
    "lr of a schedule": (2e-3, schedule("WarmupLR", warmup_max_lr=1e-4), "`scheduler.params.warmup_max_lr`"),
    "lr of a cycle": (
        2e-3,
        schedule("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-4),
        "`scheduler.params.cycle_max_lr`",
    ),
    "lr of Muon": (
        2e-3,
        {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}}},
        "`optimizer.params.muon_lr` is 0.02 and `optimizer.params.adam_lr` is 0.0003",
    ),
    "mixed_precision": ("no", {"bf16": {"enabled": True}}, "`bf16 and fp16` is bf16"),
    "mixed_precision other": ("bf16", {"fp16": {"enabled": True}}, "`bf16 and fp16` is fp16"),
    "mixed_precision off": ("bf16", {"bf16": {"enabled": False}}, "`bf16 and fp16` is no"),
    "batch_size": (3, {}, "`train_micro_batch_size_per_gpu` is 2"),
    "batch_size total": (
        3,
        {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 32},
        "`train_batch_size` is 32",
    ),
    "batch_size product": (
        4,
        {"train_micro_batch_size_per_gpu": None, "train_batch_size": 32, "gradient_accumulation_steps": 2},
        "`train_batch_size` is 32 and `gradient_accumulation_steps` is 2",
    ),
    "gradient_checkpointing": (False, CHECKPOINTING, "`activation_checkpointing` is {"),
}
"""Setting -> a value, keys of a JSON that fix another, and how the message names them."""


def refused(recipe: dict[str, Any], flags: dict[str, Any], folder: Path, world: int = 1) -> str:
    """The only problem of these settings."""
    with pytest.raises(ConfigError) as caught:
        job(recipe, flags, folder, world)
    (found,) = caught.value.problems
    return found


def job(recipe: dict[str, Any], flags: dict[str, Any], folder: Path, world: int = 1) -> Job:
    length = {} if recipe.keys() & {"num_steps", "num_epochs"} else {"max_steps": 100}
    given = PATHS | length | {"output_dir": str(folder / "out")} | recipe
    return read_job(read_run(str(write_json(folder / "recipe.json", given)), flags, world), world)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("json_in", ["recipe", "flags", "recipe, inline"])
@pytest.mark.parametrize("value_in", ["recipe", "flags"])
@pytest.mark.parametrize("name", AGAINST)
def test_a_value_that_a_named_json_fixes_stops_another_from_any_place(
    name: str, value_in: str, json_in: str, world: int, tmp_path: Path
) -> None:
    value, fixed, named = AGAINST[name]
    places: dict[str, dict[str, Any]] = {"recipe": {}, "flags": {}}
    ds = {key: value for key, value in (OPEN | fixed).items() if value is not None}
    file = ds if "inline" in json_in else str(write_json(tmp_path / "ds.json", ds))
    key = name.split()[0]
    places[value_in][key] = value
    places[json_in.split(",")[0]]["deepspeed_config"] = file
    message = refused(places["recipe"], places["flags"], tmp_path, world)
    place = f"{tmp_path}/recipe.json" if value_in == "recipe" else "command line"
    assert message.startswith(f"{place}: `{key}` is {value}, but `deepspeed_config` names ")
    assert named in message and ("recipe" if "inline" in json_in else "ds.json") in message


OPEN_TO = {
    "lr": (2e-3, schedule("WarmupLR", warmup_max_lr="auto"), lambda job: rates(job), [2e-3, 2e-3]),
    "lr of a schedule": (2e-3, schedule("WarmupLR"), lambda job: rates(job), [2e-3, 2e-3]),
    "mixed_precision": (
        "no",
        {"bf16": {"enabled": "auto"}},
        lambda job: job.student_engine.precision,
        "float32",
    ),
    "mixed_precision other": (
        "bf16",
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}},
        lambda job: job.student_engine.precision,
        "bfloat16",
    ),
    "batch_size": (4, {"train_micro_batch_size_per_gpu": "auto"}, lambda job: job.batch.micro, 4),
    "batch_size total": (
        4,
        {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 32},
        lambda job: (job.batch.micro, job.batch.accumulation * job.batch.ranks, job.batch.total),
        (4, 8, 32),
    ),
    "gradient_checkpointing": (
        True,
        {},
        lambda job: bool(job.student_engine.recompute),
        True,
    ),
}
"""Setting -> a value, keys of a JSON that leave it open, what is resolved, and to what."""


def rates(job: Job) -> list[float]:
    """The learning rates of optimizer and schedule."""
    optimizer, schedule = (
        job.student_engine.section(f"{name}.params") for name in ("optimizer", "scheduler")
    )
    return [optimizer["lr"], schedule["warmup_max_lr"]]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("value_in", ["recipe", "flags"])
@pytest.mark.parametrize("name", OPEN_TO)
def test_a_value_that_a_named_json_leaves_open_is_the_setting_s(
    name: str, value_in: str, world: int, tmp_path: Path
) -> None:
    value, keys, of, expected = OPEN_TO[name]
    places: dict[str, dict[str, Any]] = {"recipe": {}, "flags": {}}
    places["recipe"]["deepspeed_config"] = str(write_json(tmp_path / "ds.json", OPEN | keys))
    places[value_in][name.split()[0]] = value
    assert of(job(places["recipe"], places["flags"], tmp_path, world)) == expected


DEFAULTS = {
    "lr": (2e-3, lambda job: rates(job), [2e-3, 2e-3]),
    "mixed_precision": ("no", lambda job: job.student_engine.precision, "float32"),
    "batch_size": (4, lambda job: (job.batch.micro, job.batch.accumulation), (4, 8)),
    "gradient_checkpointing": (
        False,
        lambda job: bool(job.student_engine.recompute),
        False,
    ),
}


@pytest.mark.parametrize("value_in", ["recipe", "flags"])
@pytest.mark.parametrize("key", DEFAULTS)
def test_a_setting_replaces_the_value_of_the_default_json(key: str, value_in: str, tmp_path: Path) -> None:
    value, of, expected = DEFAULTS[key]
    places: dict[str, dict[str, Any]] = {"recipe": {}, "flags": {}}
    places[value_in][key] = value
    assert of(job(places["recipe"], places["flags"], tmp_path)) == expected


@pytest.mark.parametrize(
    ("ds", "batch_size", "world", "remedy"),
    [
        ({"train_batch_size": 32}, 3, 2, "Write `batch_size` a divisor of 16, or leave"),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, 2, "Write `batch_size` 8, or leave"),
    ],
)
def test_a_batch_size_that_cannot_make_the_json_s_batch_is_told_what_could(
    ds: dict[str, Any], batch_size: int, world: int, remedy: str, tmp_path: Path
) -> None:
    ds = {"optimizer": ADAM} | ds
    message = refused({"deepspeed_config": ds}, {"batch_size": batch_size}, tmp_path, world)
    assert f"x {world} rank(s) cannot be {ds['train_batch_size']}" in message and remedy in message


@pytest.mark.parametrize(
    ("batch_size", "remedy"),
    [({}, ""), ({"batch_size": 8}, ", 8 at a time")],
    ids=["left out", "given"],
)
def test_a_number_of_ranks_that_cannot_share_a_batch_is_told_which_can(
    batch_size: dict[str, int], remedy: str, tmp_path: Path
) -> None:
    ds = {"optimizer": ADAM, "train_batch_size": 64}
    message = refused({"deepspeed_config": ds}, batch_size, tmp_path, world=3)
    assert "`train_batch_size` is 64. 64 samples cannot be shared by 3 ranks" in message
    multiple = 3 * batch_size.get("batch_size", 1)
    assert message.endswith(f"{remedy}; use 1, 2, 4 or 8, or write a multiple of {multiple}.")


def test_the_loss_scale_of_a_json_is_kept_beside_its_precision_as_a_flag() -> None:
    json = load({"fp16": {"enabled": "auto", "initial_scale_power": 7}}).in_precision("float16")
    assert json.raw == {"fp16": {"enabled": True, "initial_scale_power": 7}}


SAME = [
    ({"num_steps": 3}, {"max_steps": 4}, {"max_steps": 4}),
    ({"max_steps": 3}, {"num_steps": 4}, {"max_steps": 4}),
    ({"num_epochs": 3}, {"num_steps": 4}, {"max_steps": 4}),
    ({"num_steps": 3}, {"num_epochs": 1}, {"max_steps": 126}),
    ({"sample_interval": 2}, {"sample_every": 5}, {"sample_every": 5}),
    ({"sample_every": 5}, {"sample_interval": 2}, {"sample_every": 252}),
]
"""Recipe, flags, and what runs: 1008 prompts, 8 a step."""


@pytest.mark.parametrize(("recipe", "flags", "expected"), SAME)
def test_a_flag_replaces_the_recipe_s_other_name_for_the_same_thing(
    recipe: dict[str, Any], flags: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    run = job(recipe, flags, tmp_path).run
    assert {key: getattr(run, key) for key in expected} == expected


@pytest.mark.parametrize("place", ["recipe", "flags"])
@pytest.mark.parametrize(("one", "other", "_"), SAME)
def test_two_names_for_one_thing_in_one_place_are_refused(
    one: dict[str, Any], other: dict[str, Any], _: object, place: str, tmp_path: Path
) -> None:
    both = {"recipe": {}, "flags": {}} | {place: one | other}
    message = refused(both["recipe"], both["flags"], tmp_path)
    assert message.startswith("command line" if place == "flags" else f"{tmp_path}/recipe.json")
    names = {"num_steps": ("num_steps", "max_steps")}
    assert all(any(f"`{name}`" in message for name in names.get(key, (key,))) for key in one | other)


@pytest.mark.parametrize("json_in", ["recipe", "flags"])
def test_a_teacher_dtype_flag_beside_a_named_teacher_json_is_refused(json_in: str, tmp_path: Path) -> None:
    file = "ds_configs/teacher/owner.json"
    places: dict[str, dict[str, Any]] = {"recipe": {}, "flags": {"teacher_dtype": "float32"}}
    places[json_in]["teacher_deepspeed_config"] = file
    message = refused(places["recipe"], places["flags"], tmp_path)
    assert message == (
        f"command line: `teacher_dtype` is float32, but `teacher_deepspeed_config` names {file}, where the "
        "precision is bfloat16. Keep one."
    )


MUON = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}}


def test_a_critic_s_rate_that_muon_s_own_two_would_hide_is_refused(tmp_path: Path) -> None:
    objective = {"name": "dmd2", "critic_lr": 1e-6}
    given = {"deepspeed_config": OPEN | {"optimizer": MUON}, "objective": objective}
    message = refused(given, {}, tmp_path)
    assert message == (
        "`critic_lr` is 1e-06, but in recipe `optimizer.params.muon_lr` is 0.02 and "
        "`optimizer.params.adam_lr` is 0.0003, which Muon takes for the critic too. Write "
        "`optimizer.params.lr` in place of them, or leave `critic_lr` out."
    )


def test_a_critic_under_muon_has_its_rate_in_place_of_the_student_s(tmp_path: Path) -> None:
    optimizer = {"type": "Muon", "params": {"lr": 1e-3}}
    objective = {"name": "dmd2", "critic_lr": 1e-6}
    found = job({"deepspeed_config": OPEN | {"optimizer": optimizer}, "objective": objective}, {}, tmp_path)
    assert found.others["critic"].engine.section("optimizer.params")["lr"] == 1e-6
