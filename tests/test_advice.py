"""What is advised when memory runs out: numbers that are the planner's, settings that a run can go on with."""

from dataclasses import replace
from typing import Any

import pytest
from published_wan import PUBLISHED, write_published
from ranks import has_async_io
from recipes import PROMPTS

from wandistiller.advice import STUDENT_JSONS, Saving, advice, needed, savings, taken
from wandistiller.check import read_job
from wandistiller.config import STRATEGIES, RunConfig, read_json
from wandistiller.exhausted import Spent
from wandistiller.footprint import activation_bytes
from wandistiller.job import Job
from wandistiller.machine import GIB, Machine
from wandistiller.memory import teacher_bytes
from wandistiller.planner import plan
from wandistiller.shorthands import read_run

GPUS = Machine(device_free=GIB, host_free=500 * GIB, disk_free=500 * GIB, ranks=4, ranks_on_node=4)
CPUS = Machine(device_free=None, host_free=2 * GIB, disk_free=500 * GIB, ranks=2, ranks_on_node=2)
MACHINES = {"GPU": (GPUS, Spent.DEVICE), "host of GPUs": (GPUS, Spent.HOST), "CPUs": (CPUS, Spent.HOST)}
STUDENT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 1},
}  # fmt: skip
"""In float32, without checkpointing or offload: much is left to advise."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Wan2.1 1.3B and 14B without weights, and prompts."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "prompts.txt").write_text(PROMPTS)
    small, large, *_ = PUBLISHED
    return {"small": str(write_published(folder, small)), "large": str(write_published(folder, large)),
            "prompts": str(folder / "prompts.txt"), "output": str(folder / "out")}  # fmt: skip


def settings(published: dict[str, str], wan: str = "small", **more: Any) -> RunConfig:
    usual = {"deepspeed_config": STUDENT, "teacher_deepspeed_config": {"zero_optimization": {"stage": 0}}, "num_frames": 17}
    return RunConfig(teacher_path=published[wan], data_path=published["prompts"], output_dir=published["output"],
                     max_steps=100, **usual | more)  # fmt: skip


def told(job: Job, where: str = "GPU", preparing: bool = False, **changed: Any) -> list[Saving]:
    machine, spent = MACHINES[where]
    return list(savings(job, spent, replace(machine, **changed), preparing))


def hows(found: list[Saving]) -> list[str]:
    return [f.change.how for f in found]


@pytest.fixture(scope="module")
def jobs(published: dict[str, str]) -> dict[str, Job]:
    """The same greedy run as 4 ranks on GPUs and 2 on CPUs have it."""
    greedy = settings(published)
    return {where: read_job(greedy, machine.ranks) for where, (machine, _) in MACHINES.items()}


# Numbers


@pytest.mark.parametrize("where", MACHINES)
def test_a_saving_is_the_difference_of_the_planner_s_numbers(jobs: dict[str, Job], where: str) -> None:
    (machine, spent), job = MACHINES[where], jobs[where]
    found = told(job, where)
    assert found
    for saving in found:
        before, after = (planned(j, machine, spent) for j in (job, saving.change.after))
        assert saving.saves == before - after > 0, saving


def planned(job: Job, machine: Machine, spent: Spent) -> int:
    """Bytes of one kind that `wandistiller plan` says a rank takes, until it has trained a step."""
    peaks = [phase.peak() for name, phase in plan(job, machine).items() if name in ("load", "train")]
    if spent is Spent.DEVICE:
        return max(p.device for p in peaks)
    return max(p.device for p in peaks) * (machine.device_free is None) + max(p.host for p in peaks) \
        + max(p.node for p in peaks) // machine.ranks_on_node  # fmt: skip


def test_a_smaller_micro_batch_saves_its_share_of_the_activations(jobs: dict[str, Job]) -> None:
    job = jobs["GPU"]
    tokens = job.folder.tokens(480, 832, 17)
    four, two = (activation_bytes(job.student_transformer, job.student_ds, tokens, n, accelerator=True) for n in (4, 2))
    (half,) = (f for f in told(job) if '"train_micro_batch_size_per_gpu": 2' in f.change.how)
    assert half.saves == four - two


def test_bf16_halves_a_replicated_float32_teacher(jobs: dict[str, Job]) -> None:
    job = jobs["GPU"]
    whole = teacher_bytes(job.folder, job.teacher_ds, 4).device
    (found,) = (f for f in told(job) if f.change.how == "--teacher_dtype bfloat16")
    assert found.saves == pytest.approx(whole / 2, rel=0.01)


def test_a_line_has_the_json_the_saving_and_what_it_takes_elsewhere(published: dict[str, str]) -> None:
    own = read_json("ds_configs/student/zero2.json") | {"gradient_accumulation_steps": 1}
    job = read_job(settings(published, deepspeed_config=own), 4)
    (found,) = (f for f in told(job) if "zero2_offload.json" in f.change.how)
    assert str(found) == (
        'in the student\'s JSON "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}, '
        f"as in ds_configs/student/zero2_offload.json: saves {found.saves / GIB:.3g} GiB a rank, "
        f"takes {found.costs / GIB:.3g} GiB of the other memory"
    )
    assert found.saves > GIB and found.costs > GIB / 3  # beside what all ranks need while they start


# Settings


@pytest.mark.parametrize("where", MACHINES)
def test_every_setting_passes_the_check_with_the_same_global_batch(
    published: dict[str, str], jobs: dict[str, Job], where: str
) -> None:
    for saving in told(jobs[where], where):
        run = replace(settings(published), **saving.change.settings)
        checked = read_job(run, jobs[where].batch.ranks)
        assert checked.batch.total == jobs[where].batch.total, saving
        machine, spent = MACHINES[where]
        assert taken(needed(checked, machine), spent, machine) == taken(needed(saving.change.after, machine), spent, machine)


def test_flags_are_what_the_command_line_takes(jobs: dict[str, Job], published: dict[str, str]) -> None:
    flags = [how.split() for how in hows(told(jobs["GPU"])) if how.startswith("--")]
    assert len(flags) > 4
    for words in flags:
        given = {"teacher_path": published["small"], "data_path": published["prompts"], "output_dir": published["output"]}
        for name, value in zip(words[::2], [*words[1::2], True], strict=False):
            given[name.removeprefix("--")] = int(value) if str(value).isdigit() else value
        assert read_run(None, given)


def test_the_teacher_keeps_its_precision_and_guidance_passes(published: dict[str, str]) -> None:
    ds = {"zero_optimization": {"stage": 0}, "wandistiller": {"guidance_passes": 2}}
    job = read_job(settings(published, teacher_deepspeed_config=ds), 4)
    made = [f.change.settings.get("teacher_deepspeed_config") for f in told(job)]
    made = [m for m in made if m]
    assert made
    assert all("bf16" not in m and m["wandistiller"]["guidance_passes"] == 2 for m in made)


# Which, and in which order


def test_what_leaves_the_loss_curve_as_it_is_comes_first(jobs: dict[str, Job]) -> None:
    found = hows(told(jobs["GPU"]))
    marks = ["zero2.json", "zero2_offload.json", "--teacher_device_strategy balanced", "guidance_passes",
             '"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4', '"train_micro_batch_size_per_gpu": 1',
             "--gradient_checkpointing", "--teacher_dtype bfloat16", '"bf16"', "--num_frames", "--height",
             '"num_layers"']  # fmt: skip
    places = [next((i for i, how in enumerate(found) if mark in how), None) for mark in marks]
    given = [p for p in places if p is not None]
    assert given == sorted(given)
    assert {marks[i] for i, p in enumerate(places) if p is None} <= {"zero2.json", "guidance_passes"}


def test_of_several_homes_a_slower_one_is_told_if_it_saves_more(jobs: dict[str, Job]) -> None:
    for mark in ("ds_configs/student/", "--teacher_device_strategy"):
        saved = [f.saves for f in told(jobs["GPU"]) if mark in f.change.how]
        assert saved and saved == sorted(set(saved))


LAST = {  # a run that has all that leaves the loss curve as it is
    "deepspeed_config": "ds_configs/student/zero3_nvme.json", "teacher_deepspeed_config": "ds_configs/teacher/host_cpu.json",
}  # fmt: skip
needs_async_io = pytest.mark.skipif(not has_async_io(), reason="libaio or a compiler is missing")


@needs_async_io
def test_what_is_in_use_is_not_proposed(published: dict[str, str]) -> None:
    found = hows(told(read_job(settings(published, **LAST), 4)))
    assert found
    marks = "zero3_nvme", "device_strategy", "micro_batch", "checkpointing", "dtype", "bf16"
    assert not [how for how in found for mark in marks if mark in how]


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_async_io) if "nvme" in n else n for n in STUDENT_JSONS])
def test_no_shipped_student_json_is_proposed_to_a_run_that_has_it(published: dict[str, str], name: str) -> None:
    file = f"ds_configs/student/{name}.json"
    for where in MACHINES:
        job = read_job(settings(published, deepspeed_config=file), MACHINES[where][0].ranks)
        assert not [how for how in hows(told(job, where)) if file in how or "checkpointing" in how]


def test_where_cpu_memory_ran_out_nothing_is_moved_into_it(jobs: dict[str, Job]) -> None:
    assert not [how for how in hows(told(jobs["host of GPUs"], "host of GPUs")) if '"device": "cpu"' in how]


def test_without_an_accelerator_offloading_to_the_cpu_saves_nothing(jobs: dict[str, Job]) -> None:
    found = [how for how in hows(told(jobs["CPUs"], "CPUs")) if "offload" in how]
    assert all('"nvme"' in how or '"stage": 3' in how for how in found)


def test_nothing_is_moved_to_where_it_has_no_room(jobs: dict[str, Job]) -> None:
    found = hows(told(jobs["GPU"], host_free=GIB, disk_free=GIB))
    assert found and not [how for how in found if '"cpu"' in how or "nvme" in how or "strategy cpu" in how]


def test_while_the_cache_is_filled_the_student_is_not_spoken_of(jobs: dict[str, Job]) -> None:
    found = hows(told(jobs["GPU"], preparing=True))
    assert found[0] == "--prepare_batch 1"
    assert not [how for how in found if "student" in how or "checkpointing" in how]


def test_a_teacher_that_training_does_not_ask_is_not_moved(published: dict[str, str]) -> None:
    job = read_job(settings(published, objective="trajectory"), 4)
    assert told(job) and not [how for how in hows(told(job)) if "teacher" in how]
    assert [how for how in hows(told(job, preparing=True)) if "teacher" in how]


@needs_async_io
def test_a_run_that_can_do_no_less_is_told_so(published: dict[str, str]) -> None:
    least = {"num_frames": 1, "height": 16, "width": 16, "student_config": {"num_layers": 1},
             "teacher_deepspeed_config": "ds_configs/teacher/zero_inference_nvme.json"}  # fmt: skip
    # of so small a student the buffers of an optimizer on NVMe would take more than it takes itself
    least["deepspeed_config"] = "ds_configs/student/zero3_offload_all.json"
    job = read_job(settings(published, **LAST | least), 1)
    assert advice(job, Spent.HOST) == [
        "No setting of this run saves CPU memory. What helps is more of it, or fewer ranks that share it."
    ]


def test_expandable_segments_are_for_gpus_alone(jobs: dict[str, Job]) -> None:
    lines = advice(jobs["CPUs"], Spent.HOST)
    assert lines and not [line for line in lines if "PYTORCH_CUDA_ALLOC_CONF" in line]


def test_every_teacher_json_has_a_short_name() -> None:
    assert len(set(STRATEGIES.values())) == len(STRATEGIES)
