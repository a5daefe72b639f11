"""The fastest shipped JSONs that fit, and the recipe that is written of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import EIGHT_80, ONE_24, RATES, TWO_NODES, told
from planned import published_job as job
from ranks import write_json
from recipes import recipe

from wandistiller.cli.plan import plan_lines
from wandistiller.config.shorthands import merged
from wandistiller.config.validate import read_job
from wandistiller.planner.hardware_rates import GPU, default_rates
from wandistiller.planner.machine import demands
from wandistiller.planner.recommend import EQUAL, choices
from wandistiller.utils.files import read_json


def test_gradients_that_go_around_once_a_step_are_recommended_where_the_network_is_slow(
    published: Path,
) -> None:
    found = choices(job(published, TWO_NODES, "Wan2.1-T2V-1.3B"), TWO_NODES, replace(GPU[80], network=1.2))
    fastest = {c.student: c.seconds for c in reversed(found)}
    assert (found[0].student, found[0].teacher) == ("zero0", "replicated") and fastest[
        "zero0"
    ] < 0.9 * fastest["zero2"]


@pytest.mark.parametrize("wan", ["Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B", "Wan2.2-TI2V-5B", "Wan2.2-T2V-A14B"])
def test_what_is_recommended_fits_and_nothing_faster_does(published: Path, wan: str) -> None:
    asked = job(published, EIGHT_80, wan)
    found = choices(asked, EIGHT_80, default_rates(EIGHT_80.device_free))
    assert found and all(d.is_met for d in demands(found[0].takes, EIGHT_80))
    assert found[0].seconds <= (1 + EQUAL) * min(c.seconds for c in found)


def test_of_equally_fast_ones_that_which_moves_least_is_first(published: Path) -> None:
    """Eight samples a call hide the streaming, yet with room for the teacher nothing needs to be streamed."""
    best = choices(job(published, EIGHT_80, "Wan2.1-T2V-1.3B"), EIGHT_80, replace(RATES, link=500))[0]
    assert (best.student, best.teacher) == ("zero0", "replicated")


@pytest.mark.usefixtures("quiet_logging")
def test_the_recommended_recipe_is_the_run_with_other_jsons_at_its_batch(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "recommended.json"
    said = told(
        published,
        capsys,
        "--max_steps 77 --gpus 8 --gpu_memory 80 --host_memory 1000",
        "--recommend",
        str(file),
    )
    assert "fastest of the shipped JSONs that fit:" in said and f"wrote {file}" in said
    recipe = json.loads(file.read_text())
    run = read_job(merged(recipe, {"output_dir": str(tmp_path / "out")}, str(file)), 8)
    assert (run.run.max_steps, run.batch.total) == (77, job(published, EIGHT_80).batch.total)


RECOMMENDED = {
    "shorthands of the quick start": (read_json("ds_configs/recipes/quickstart.json"), {}),
    "flags": (
        {},
        {"lr": 3e-4, "mixed_precision": "no", "teacher_dtype": "float32", "batch_size": 2, "num_steps": 30},
    ),
    "flags over a recipe": (
        {"num_epochs": 3, "teacher_device_strategy": "gpu"},
        {"max_steps": 5, "teacher_on_cpu": True},
    ),
    "own optimizer, schedule and monitors": (
        {
            "deepspeed_config": {
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {"total_num_steps": "auto", "warmup_num_steps": 7},
                },
                "gradient_clipping": 0.5,
                "csv_monitor": {"enabled": True, "output_path": "curves"},
                "zero_optimization": {"stage": 2},
                "wandistiller": {"checkpoint": "attention"},
                "activation_checkpointing": {},
            }
        },
        {},
    ),
    "guidance in two passes": ({"teacher_deepspeed_config": {"wandistiller": {"guidance_passes": 2}}}, {}),
    "no teacher in training": (
        {"objective": "trajectory"},
        {"teacher_device_strategy": "gpu", "teacher_dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize(("values", "flags"), RECOMMENDED.values(), ids=RECOMMENDED)
def test_what_is_written_is_the_run_that_was_planned(
    tmp_path: Path, wan1: Path, values: dict[str, Any], flags: dict[str, Any]
) -> None:
    keys = ("teacher_path", "data_path", "student_config", "height", "width")
    given = {key: recipe(tmp_path, wan1)[key] for key in keys} | values
    asked, file = write_json(tmp_path / "asked.json", given), tmp_path / "recommended.json"
    output = {"output_dir": str(tmp_path)}
    machine = {
        "gpus": 1,
        "gpu_memory": 24,
        "host_memory": 128,
        "disk": 1000,
        "nodes": 1,
        "rates": {},
        "measure": False,
        "price_per_gpu_hour": None,
    }
    plan_lines(machine | {"recommend": file}, flags | {"recipe": str(asked)})
    best = choices(
        read_job(merged(given, flags | output, None), 1), ONE_24, default_rates(ONE_24.device_free)
    )[0].job
    again = read_job(merged(read_json(file), output, str(file)), 1)
    assert (again.student_ds, again.teacher_ds, again.batch) == (best.student_ds, best.teacher_ds, best.batch)
    assert (again.identity, again.run.max_steps) == (best.identity, best.run.max_steps)
