"""Seconds of steps and rollouts of published Wans, against sums done by hand and a step that was measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import EIGHT_80, ON_CPU, ONE_24, RATES, TWO_NODES
from planned import published_job as job

from wandistiller.cli.plan_report import duration
from wandistiller.config.job import Job, branches
from wandistiller.network.flops import count_flops
from wandistiller.planner.machine import Machine
from wandistiller.planner.time import EAGER, PEAKS, SHARE, Rates, Times, passes, usual_rates
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB

GPU = {"teacher_deepspeed_config": "gpu"}
"""A teacher whose weights stay on each GPU."""


def whole(run: Job) -> int:
    """Bytes of one network of the teacher in bf16."""
    return 2 * sum(run.folder.config.numels.values())


def test_a_step_of_a_14b_s_lora_on_an_h100_is_planned_as_it_was_measured(published: Path) -> None:
    """20.0 s, of a recipe of then, with 17 calls of the student for its samples, where 13.6 are usual."""
    given = read_json("ds_configs/machines/1x16_wan2.1_14b_lora.json")
    given["objective"] = {"name": "dmd2", "steps": 4, "critic_updates": 5, "critic_follows": 0.03}
    paths = ("teacher_path", "data_path", "output_dir")
    run = job(published, ONE_24, **{key: value for key, value in given.items() if key not in paths})
    machine = replace(ONE_24, device_name="NVIDIA H100 80GB HBM3")
    times = Times(run, machine, usual_rates(machine))
    blocks = 40 * 1560 * 5120 / 1e12 / times.rates.tbytes  # their kernels moved 310 and 393 bytes then
    before = 4 * blocks * ((310 - EAGER[0]) * 32 + (393 - EAGER[1]) * 6)
    more_calls = (17 - 13.6) * times.call("student", 4)
    assert times.step() + more_calls + before == pytest.approx(20.0, rel=0.03)


@pytest.mark.parametrize(
    ("machine", "placement", "share"),
    [
        (EIGHT_80, "replicated", 0),
        (EIGHT_80, "zero_inference_cpu", 1 / 8),
        (TWO_NODES, "zero_inference_cpu_node", 1 / 8),
        (TWO_NODES, "sharded", 0),
        (EIGHT_80, "streamed", 0.9838),  # its blocks
        (ON_CPU, "streamed", 0),
        (ON_CPU, "files", 0.9838),
    ],
)
def test_of_the_teacher_s_weights_a_rank_or_its_node_fetches_its_share(
    published: Path, machine: Machine, placement: str, share: float
) -> None:
    run = job(published, machine, teacher_deepspeed_config=f"ds_configs/teacher/{placement}.json")
    fetched = run.teacher.fetched(run.folder.config, machine.topology)
    assert fetched == pytest.approx(whole(run) * share, rel=1e-3)


@pytest.mark.parametrize(("frames", "together"), [(1, 33), (81, 1)])
def test_streamed_weights_come_once_for_all_micro_steps_whose_hidden_states_take_a_gib(
    published: Path, frames: int, together: int
) -> None:
    ds = {
        "train_batch_size": 66,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    size = {"num_frames": frames, "prepare_batch": 1, "deepspeed_config": ds | {"bf16": {"enabled": True}}}
    run = job(published, ONE_24, teacher_deepspeed_config="stream", **size)
    once = run.teacher.fetched(run.folder.config, ONE_24.topology) / 1e9 / RATES.pcie
    assert Times(run, ONE_24, RATES).moving() == pytest.approx(66 / together * once)


def test_an_owner_computes_for_all_ranks_of_its_node_and_for_those_of_a_sample_once(published: Path) -> None:
    owner = {"teacher_deepspeed_config": "ds_configs/teacher/owner.json", "num_frames": 81}
    engine = {"deepspeed_config": "ds_configs/student/zero2.json"}
    runs = (job(published, EIGHT_80, context_parallel=n, **owner, **engine) for n in (1, 4))
    one, four = (Times(run, EIGHT_80, RATES) for run in runs)
    alone = branches(one.job) * 8 * one.job.batch.accumulation * one.job.batch.micro
    flops = count_flops(one.job.folder.config, (16, 21, 60, 104)).forward / 1e12 / RATES.tflops
    assert one.computing()["teacher"] == pytest.approx(alone * flops)
    assert four.computing()["teacher"] == pytest.approx(one.computing()["teacher"] / 4)
    assert one.rollouts() == pytest.approx(four.rollouts())


def test_guidance_of_half_of_the_samples_saves_half_a_pass_and_no_way_of_the_weights(published: Path) -> None:
    dmd2 = {"name": "dmd2", "steps": 4, "shared": True, "critic_updates": 1}
    streamed = {"teacher_deepspeed_config": {"wandistiller": {"placement": "streamed"}}}
    whole, half = (
        job(published, EIGHT_80, objective=dmd2 | more, **GPU | streamed)
        for more in ({}, {"guidance_share": 0.5})
    )
    assert (passes(whole)["teacher"], passes(half)["teacher"]) == ((2, 0), (1.5, 0))
    assert Times(whole, EIGHT_80, RATES).moving() == Times(half, EIGHT_80, RATES).moving() > 0


def test_a_critic_of_adapters_from_the_teacher_is_as_large_as_from_the_student(published: Path) -> None:
    lora = {"lora": {"rank": 8}, "student_config": {}}
    runs = (
        job(published, ONE_24, **lora, objective={"name": "dmd2", "critic_start": start})
        for start in ("student", "teacher")
    )
    student, teacher = (run.networks.others["critic"].parameters for run in runs)
    assert student == teacher and all(".lora_" in name for name in teacher.trained)


def test_rollouts_that_an_earlier_stage_made_are_not_counted_again(published: Path) -> None:
    """Of 80 samples 5 steps of 8 take 40."""
    usual = {"rollouts_per_prompt": 10, "cache_dir": "cache"}
    runs: list[Job] = []
    for more in ({"max_steps": 5}, {}, {"guidance_scale": 2.0}, {"seed": 1}, {}):
        run = job(published, ONE_24, "Wan2.1-T2V-1.3B", **usual | {"max_steps": 100} | more, **GPU)
        runs.append(replace(run, previous=runs[-1] if runs else None))
    first, *later = (Times(run, ONE_24, RATES).rollouts() for run in runs)
    assert first > 0 and later == pytest.approx([first, 2 * first, 2 * first, 0])


@pytest.mark.parametrize(
    ("gib", "name", "kind"),
    [
        (23.5, "", "4090"),
        (79.1, "", "A100"),
        (24, "NVIDIA A10G", "A10"),
        (80, "NVIDIA A100-SXM4-80GB", "A100"),
        (48, "NVIDIA L40S", "L40S"),
        (24, "NVIDIA L4", "L4"),
    ],
)
def test_a_gpu_is_known_by_its_name_or_its_memory_and_reaches_two_thirds_of_its_peaks(
    gib: float, name: str, kind: str
) -> None:
    machine = replace(ONE_24, device_free=int(gib * GIB), device_name=name)
    tflops, tbytes, pcie = PEAKS[kind]
    assert usual_rates(machine) == Rates(SHARE * tflops, pcie, SHARE * tbytes) and SHARE == 2 / 3


def test_a_gpu_that_others_use_too_is_still_of_its_kind() -> None:
    assert usual_rates(Machine(60 * GIB, GIB, GIB, 1, 1, device_total=80 * GIB)).tflops == 208


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0.00012, "0.12 ms"), (0.0421, "42 ms"), (0.28, "0.28 s"), (1.26, "1.3 s"), (80.7, "81 s")],
        *[(142, "142 s"), (3000, "50 min"), (5400, "1.5 h"), (360_000, "100.0 h")],
    ],
)
def test_a_duration_is_in_the_unit_that_shows_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_teacher_on_the_cpu_beside_gpus_has_the_rate_of_the_cpu(published: Path) -> None:
    found: list[float] = []
    for name in ("gpu", "host_cpu"):
        given: dict[str, Any] = {"teacher_deepspeed_config": name}
        found.append(Times(job(published, ONE_24, **given), ONE_24, RATES).computing()["teacher"])
    assert found[1] == pytest.approx(RATES.tflops * found[0])
