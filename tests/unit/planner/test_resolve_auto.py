"""Choices of `auto` and `--recommend` for published Wans on machines of every size, and their messages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder
from planned import EIGHT_80, ONE_24, gpus
from planned import published_job as job
from ranks import wandistiller, write_json
from reading import run_of
from recipes import recipe
from slow_cases import slow_but

from wandistiller.cli.flags import PlanFlags
from wandistiller.cli.plan import FITTING, plan_lines
from wandistiller.config.identity import identity
from wandistiller.config.job import Job
from wandistiller.config.validate import read_job
from wandistiller.engine.zero_memory import Topology
from wandistiller.planner.disk import on_its_disk
from wandistiller.planner.machine import Machine
from wandistiller.planner.resolve_auto import choices, chosen, left_open, pairs, teachers
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB

SMALL, LARGE, FIVE, TWO = "Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B", "Wan2.2-TI2V-5B", "Wan2.2-T2V-A14B"
TEACHER = {"teacher_deepspeed_config": "ds_configs/teacher/auto.json"}
BOTH = TEACHER | {"deepspeed_config": "auto"}
TENTH = TEACHER | {"student_config": "ds_configs/students/tenth.json"}
IN_THE_CACHE = TEACHER | {"objective": "trajectory"}
"""The teacher only fills the cache."""
COSINE = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}}
USUAL = [
    (SMALL, gpus(1, 24, 64), TEACHER, "as given", "replicated"),
    (LARGE, gpus(1, 40, 256), TEACHER, "as given", "streamed"),  # 26.7 GiB beside 13.5
    (LARGE, gpus(1, 24, 48), TENTH, "as given", "files"),  # not even a block-wise copy beside 1.5B
    (SMALL, gpus(8, 80, 1000), BOTH, "zero2", "replicated"),
    (LARGE, gpus(1, 48, 256), BOTH, "zero3_offload", "streamed"),  # two samples fit beside a replica
]


@pytest.mark.parametrize(
    ("wan", "machine", "given", "student", "teacher"),
    slow_but(
        USUAL[1:4],
        [
            *USUAL,
            (LARGE, gpus(1, 48, 256), TEACHER, "as given", "replicated"),
            (TWO, gpus(4, 40, 1000), TEACHER, "as given", "streamed"),  # during Adam, unlike sharded
            (LARGE, Machine(None, 48 * GIB, 1000 * GIB, 1, 1), TENTH, "as given", "files"),
            (SMALL, Machine(None, 64 * GIB, 1000 * GIB, 1, 1), TEACHER, "as given", "replicated"),
            (LARGE, gpus(1, 80, 256), IN_THE_CACHE, "as given", "replicated"),
            (SMALL, gpus(1, 24, 64), BOTH, "zero0", "replicated"),
            (LARGE, gpus(8, 80, 1000), BOTH, "zero2", "replicated"),
        ],
    ),
)
def test_of_what_is_auto_the_simplest_that_fits_is_chosen(
    published: Path, wan: str, machine: Machine, given: dict[str, Any], student: str, teacher: str
) -> None:
    choice = chosen(job(published, machine, wan, **given), machine)
    assert (choice.student, choice.teacher) == (student, teacher)


def test_of_micro_batches_the_largest_that_fits_is_chosen(published: Path) -> None:
    machine = gpus(1, 80, 256)
    best = chosen(job(published, machine, SMALL, **BOTH), machine)
    assert (best.teacher, best.job.batch.micro) == ("replicated", 8)


@pytest.mark.slow
def test_what_is_swapped_has_room_beside_the_run_s_files(published: Path) -> None:
    fits, not_beside = gpus(1, 24, 128), replace(gpus(1, 24, 128), disk_free=200 * GIB)
    run = job(published, fits, LARGE, **BOTH)
    assert chosen(run, not_beside).student == "zero3_nvme"
    assert chosen(run, on_its_disk(fits, run, None)).student == "zero3_nvme"
    with pytest.raises(ConfigError, match="a larger disk for the swap folder"):
        chosen(run, on_its_disk(not_beside, run, None))


def names(run: Job, machine: Machine, here: bool = False) -> set[tuple[str, str]]:
    """The pairs of JSONs that there are to choose from."""
    return {(pair.student, pair.teacher) for pair in pairs(run, machine, here=here)}


@pytest.mark.slow
def test_what_this_machine_cannot_build_is_passed_over(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    machine = gpus(1, 24, 128)
    run = job(published, machine, LARGE, **BOTH)
    here, elsewhere = names(run, machine, here=True), names(run, machine)
    lacking = "nvme", "lora_wan_clips"  # libaio; a GPU, whose activations come to CPU memory
    assert here == {pair for pair in elsewhere if not any(word in "".join(pair) for word in lacking)}
    assert here != elsewhere


def test_what_is_chosen_keeps_the_run_s_batch_optimizer_and_precision(published: Path) -> None:
    machine = gpus(2, 24, 256)
    run = job(published, machine, LARGE, **BOTH)
    assert identity(chosen(run, machine).job) == identity(run)


@pytest.mark.parametrize("own", slow_but([COSINE], [{}, COSINE]))
def test_auto_as_a_flag_keeps_batch_optimizer_and_schedule_of_the_recipe_s_json(
    published: Path, own: dict[str, Any]
) -> None:
    """4 samples a step and betas of 0 and 0.999, not the default JSON's."""
    recipe, machine = read_json("ds_configs/machines/1x16_wan2.1_14b_lora.json"), gpus(1, 24, 64)
    engine = read_json(recipe["deepspeed_config"]) | own
    recipe |= {"deepspeed_config": engine} if own else {}
    places = {
        "teacher_path": f"{published}/{recipe['teacher_path']}",
        "data_path": f"{published}/prompts.txt",
    }
    flags = places | {"lr": 1e-5}
    given, auto = (read_job(run_of(recipe, flags | more), 1) for more in ({}, BOTH))
    assert left_open(auto) == (True, True) and left_open(given) == (False, False)
    best = chosen(auto, machine).job
    assert identity(best) == identity(auto) == identity(given) and best.batch.total == 4
    assert best.student_engine.section("optimizer.params")["betas"] == [0.0, 0.999]


def test_where_nothing_fits_the_message_has_what_came_nearest_and_what_helps(published: Path) -> None:
    machine = Machine(16 * GIB, 32 * GIB, 10 * GIB, 1, 1)
    words = r"No JSONs .* fit. Available: .*16.0 GiB on each GPU.*The nearest: student .* would need .*"
    with pytest.raises(ConfigError, match=words):
        chosen(job(published, machine, TWO, **BOTH), machine)


@pytest.mark.slow
def test_a_run_leaves_the_jsons_that_it_chose(tmp_path: Path, wan1: Path) -> None:
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=2, **BOTH)
    log = wandistiller("train", "--recipe", write_json(tmp_path / "r.json", given)).stderr
    assert log.count("chosen    student ") == 1 and " kept in reserve" in log
    student, teacher = (
        read_json(tmp_path / "run" / "resolved" / f"{name}_deepspeed.json") for name in ("student", "teacher")
    )
    assert student["train_batch_size"] == 8 and "zero_optimization" in student
    assert teacher.get("wandistiller", {}).get("placement") != "auto"


FEW = ["replicated", "streamed", "zero_inference_cpu", "files", "zero_inference_nvme", "host_cpu"]
NODES = ["replicated", "streamed", "sharded_node", "sharded", "zero_inference_cpu_node", *FEW[2:]]


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        (Topology(16, 8, True), NODES),
        (Topology(8, 8, True), ["replicated", "streamed", "sharded", *FEW[2:]]),
        (Topology(1, 1, True), FEW),
        (Topology(2, 2, False), ["replicated", "host_cpu", "sharded", "files", "zero_inference_nvme"]),
        (Topology(1, 1, False), ["replicated", "files", "zero_inference_nvme"]),
    ],
)
def test_placements_are_compared_where_they_differ_those_first_that_move_least(
    topology: Topology, names: list[str]
) -> None:
    assert [name for name, _ in teachers("bfloat16", topology)] == names


# Recommendations


@pytest.mark.parametrize("wan", slow_but([SMALL], [SMALL, LARGE, FIVE, TWO]))
def test_what_is_recommended_fits_and_nothing_simpler_does(published: Path, wan: str) -> None:
    run = job(published, EIGHT_80, wan)
    best, every = next(choices(run, EIGHT_80)), pairs(run, EIGHT_80)
    names = [(pair.student, pair.teacher) for pair in every]
    simpler = every[: names.index((best.student, best.teacher))]
    assert best.fits(EIGHT_80) and best.job.batch.micro == 8
    assert not any(pair.choice(pair.sizes[2], EIGHT_80).fits(EIGHT_80) for pair in simpler)  # four samples


ENGINE = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 7}},
    "gradient_clipping": 0.5,
    "csv_monitor": {"enabled": True, "output_path": "curves"},
    "zero_optimization": {"stage": 2},
    "wandistiller": {"checkpoint": "attention"},
    "activation_checkpointing": {},
}
FLAGS = {"lr": 3e-4, "mixed_precision": "no", "teacher_dtype": "float32", "batch_size": 2, "max_steps": 30}
EPOCHS = {"num_epochs": 3, "teacher_deepspeed_config": "gpu"}
ON_GPU = {"teacher_deepspeed_config": "gpu", "teacher_dtype": "bfloat16"}
RECOMMENDED = {
    "shorthands of the quick start": (read_json("ds_configs/recipes/quickstart.json"), {}),
    "flags": ({}, FLAGS),
    "flags over a recipe": (EPOCHS, {"max_steps": 5, "teacher_deepspeed_config": "cpu"}),
    "own optimizer, schedule and monitors": ({"deepspeed_config": ENGINE}, {}),
    "guidance in two passes": ({"teacher_deepspeed_config": {"wandistiller": {"guidance_passes": 2}}}, {}),
    "a quantised teacher": ({"teacher_deepspeed_config": {"wandistiller": {"weights": "int8"}}}, {}),
    "no teacher in training": ({"objective": "trajectory"}, ON_GPU),
}


@pytest.mark.parametrize("name", slow_but(["flags"], RECOMMENDED))
def test_the_recommended_recipe_is_the_run_that_was_planned_with_other_jsons(
    tmp_path: Path, wan1: Path, name: str
) -> None:
    values, flags = RECOMMENDED[name]
    keys = ("teacher_path", "data_path", "student_config", "height", "width")
    given = {key: recipe(tmp_path, wan1)[key] for key in keys} | values
    file, recommended = write_json(tmp_path / "given.json", given), tmp_path / "recommended.json"
    output = {"output_dir": str(tmp_path)}
    machine = {"gpus": 1, "gpu_memory": 24, "host_memory": 128, "disk": 1000, "nodes": 1}
    named = {"recipe": str(file), "settings": flags, "recommend": recommended}
    plan_lines(PlanFlags(**named, **machine), lines := [])
    assert FITTING in lines and f"wrote {recommended}" in lines
    planned = read_job(run_of(given, flags | output), 1)
    best = next(choices(planned, ONE_24)).job
    again = read_job(run_of(read_json(recommended), output), 1)
    assert (again.student_engine, again.teacher) == (best.student_engine, best.teacher)
    assert (identity(again), again.run.max_steps) == (identity(best), best.run.max_steps)
