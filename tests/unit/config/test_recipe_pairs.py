"""Pairs of settings for one thing: a flag wins, and a line names both; two in one place are an error."""

from pathlib import Path
from typing import Any

import pytest
from ranks import write_json
from reading import read_run

from wandistiller.config.job import Job
from wandistiller.config.summary import summary
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


def precision(job: Job) -> str:
    return job.student_engine.precision


WINS = {
    "lr": (2e-3, {"optimizer": ADAM}, "`optimizer.params.lr` 0.001"),
    "lr of a schedule": (
        2e-3,
        schedule("WarmupLR", warmup_max_lr=1e-4),
        "`scheduler.params.warmup_max_lr` 0.0001",
    ),
    "mixed_precision": ("no", {"bf16": {"enabled": True}}, '`bf16` {"enabled": true}'),
    "mixed_precision other": ("bf16", {"fp16": {"enabled": True}}, '`fp16` {"enabled": true}'),
    "mixed_precision off": ("bf16", {"bf16": {"enabled": False}}, "`bf16.enabled` false"),
    "batch_size": (4, {}, "`train_micro_batch_size_per_gpu` 2"),
    "batch_size product": (
        4,
        {"train_batch_size": 32, "gradient_accumulation_steps": 16},
        "`train_micro_batch_size_per_gpu` 2 and `gradient_accumulation_steps` 16",
    ),
    "gradient_checkpointing": (
        False,
        CHECKPOINTING,
        '`activation_checkpointing` {"partition_activations": false}',
    ),
}
"""Setting -> a value, keys of a JSON that fix another, and how the line names them."""


def refused(recipe: dict[str, Any], flags: dict[str, Any], folder: Path, world: int = 1) -> str:
    """The only problem of these settings."""
    with pytest.raises(ConfigError) as caught:
        job(recipe, flags, folder, world)
    (found,) = caught.value.problems
    return found


def job(recipe: dict[str, Any], flags: dict[str, Any], folder: Path, world: int = 1) -> Job:
    length = {} if "num_epochs" in recipe else {"max_steps": 100}
    given = PATHS | length | {"output_dir": str(folder / "out")} | recipe
    return read_job(read_run(str(write_json(folder / "recipe.json", given)), flags), world)


@pytest.mark.parametrize("value_in", ["recipe", "flags"])
@pytest.mark.parametrize("name", WINS)
def test_a_setting_wins_over_a_named_json_and_one_line_has_both_values(
    name: str, value_in: str, tmp_path: Path
) -> None:
    value, fixed, replaced = WINS[name]
    setting, file = name.split()[0], str(write_json(tmp_path / "ds.json", OPEN | fixed))
    places = {"recipe": {}, "flags": {}} | {value_in: {setting: value}}
    engine = job({"deepspeed_config": file} | places["recipe"], places["flags"], tmp_path).student_engine
    assert engine.overridden == (f"`{setting}` {value} is taken in place of {replaced} in {file}",)
    taken = {
        "lr": engine.section("optimizer.params").get("lr"),
        "mixed_precision": {"float32": "no", "bfloat16": "bf16"}[engine.precision],
        "batch_size": engine.batch.micro,
        "gradient_checkpointing": bool(engine.recompute),
    }
    assert taken[setting] == value


def test_the_line_stands_at_the_head_of_the_run(tmp_path: Path) -> None:
    found = job({"deepspeed_config": OPEN, "batch_size": 4}, {}, tmp_path)
    line = "`batch_size` 4 is taken in place of `train_micro_batch_size_per_gpu` 2 in recipe"
    assert f"setting   {line}" in summary(found)


def test_the_total_of_a_json_stays_beside_another_micro_batch(tmp_path: Path) -> None:
    ds = OPEN | {"train_batch_size": 32, "gradient_accumulation_steps": 16, "optimizer": ADAM}
    batch = job({"deepspeed_config": ds}, {"batch_size": 4}, tmp_path).batch
    assert (batch.micro, batch.accumulation, batch.total) == (4, 8, 32)


TOTAL = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 32}


def rates(job: Job) -> list[float]:
    """The learning rates of optimizer and schedule."""
    sections = (job.student_engine.section(f"{name}.params") for name in ("optimizer", "scheduler"))
    return [params[key] for params, key in zip(sections, ("lr", "warmup_max_lr"), strict=True)]


@pytest.mark.parametrize(
    ("ds", "setting", "of", "expected"),
    [
        (OPEN | schedule("WarmupLR", warmup_max_lr="auto"), {"lr": 2e-3}, rates, [2e-3, 2e-3]),
        (OPEN | schedule("WarmupLR"), {"lr": 2e-3}, rates, [2e-3, 2e-3]),
        (OPEN | {"bf16": {"enabled": "auto"}}, {"mixed_precision": "no"}, precision, "float32"),
        (OPEN | TOTAL, {"batch_size": 4}, lambda job: (job.batch.micro, job.batch.total), (4, 32)),
        (None, {"lr": 2e-3}, rates, [2e-3, 2e-3]),
        (None, {"mixed_precision": "no"}, precision, "float32"),
        (None, {"gradient_checkpointing": False}, lambda job: job.student_engine.recompute, None),
    ],
)
def test_a_value_that_a_json_leaves_open_or_the_default_one_has_is_the_setting_s_without_a_line(
    ds: dict[str, Any] | None, setting: dict[str, Any], of: Any, expected: Any, tmp_path: Path
) -> None:
    found = job({"deepspeed_config": ds} if ds else {}, setting, tmp_path)
    assert of(found) == expected and not found.student_engine.overridden


def test_the_loss_scale_of_a_json_is_kept_beside_its_precision_as_a_flag() -> None:
    json = load({"fp16": {"enabled": "auto", "initial_scale_power": 7}}).in_precision("float16")
    assert json.raw == {"fp16": {"enabled": True, "initial_scale_power": 7}}


@pytest.mark.parametrize("place", ["recipe", "flags"])
@pytest.mark.parametrize(
    ("one", "other"), [({"max_steps": 4}, {"num_epochs": 3}), ({"sample_interval": 2}, {"sample_every": 5})]
)
def test_two_settings_for_one_thing_in_one_place_are_refused(
    one: dict[str, Any], other: dict[str, Any], place: str, tmp_path: Path
) -> None:
    both = {"recipe": {}, "flags": {}} | {place: one | other}
    message = refused(both["recipe"], both["flags"], tmp_path)
    assert message.startswith("command line" if place == "flags" else f"{tmp_path}/recipe.json")
    assert all(f"`{key}`" in message for key in one | other)


@pytest.mark.parametrize("json_in", ["recipe", "flags"])
def test_a_teacher_dtype_flag_wins_over_a_named_teacher_json(json_in: str, tmp_path: Path) -> None:
    file = "ds_configs/teacher/owner.json"
    places: dict[str, dict[str, Any]] = {"recipe": {}, "flags": {"teacher_dtype": "float32"}}
    places[json_in]["teacher_deepspeed_config"] = file
    engine = job(places["recipe"], places["flags"], tmp_path).teacher.engine
    line = f'`teacher_dtype` float32 is taken in place of `bf16` {{"enabled": true}} in {file}'
    assert (engine.precision, engine.overridden) == ("float32", (line,))


def test_a_teacher_dtype_beside_a_placement_s_short_name_is_no_news(tmp_path: Path) -> None:
    flags = {"teacher_dtype": "float32", "teacher_deepspeed_config": "replicated"}
    engine = job({}, flags, tmp_path).teacher.engine
    assert (engine.precision, engine.overridden) == ("float32", ())
