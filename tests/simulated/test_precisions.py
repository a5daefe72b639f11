"""Precisions, checkpoints and resumed runs on simulated GPUs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import numbers, take_texts_of_cpus
from on_ranks.tuning import places_of_restored_steps
from ranks import call, metrics, program
from recipes import student_engine, train
from simulated import Simulated, simulated_gpu

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_fp16_student_skips_overflows_lowers_its_loss_scale_and_learns(
    stage: int, tmp_path: Path, wan2: Path
) -> None:
    engine = student_engine(stage) | {"fp16": {"enabled": True, "initial_scale_power": 24}}
    devices = Simulated(tmp_path)
    run = train(tmp_path, wan2, ranks=1, accelerator=devices, max_steps=20, deepspeed_config=engine)
    lines = metrics(run)
    assert lines[0]["skipped"] and lines[-1]["loss_scale"] < 2**24
    same = [line["loss"] for line in lines if line["expert"] == lines[-1]["expert"]]
    assert same[-1] < same[0] and devices.reports() == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_in_cpu_memory_change_no_bit(stage: int, tmp_path: Path, wan2: Path) -> None:
    devices, found = Simulated(tmp_path), []
    for name, section in {
        "gpu": {"partition_activations": False},
        "host": {"cpu_checkpointing": True},
    }.items():
        engine = student_engine(stage, activation_checkpointing=section)
        more = {"max_steps": 3, "deepspeed_config": engine}
        found.append(numbers(train(tmp_path, wan2, name, ranks=1, accelerator=devices, **more)))
    assert found[0] == found[1] and devices.reports() == ""


def test_a_run_that_goes_on_under_another_stage_on_fewer_gpus_is_that_of_cpus_bitwise(
    tmp_path: Path, wan2: Path
) -> None:
    def cut_and_resumed(name: str, **more: Any) -> list[Any]:
        for ranks, stage, steps in ((2, 2, 2), (1, 3, 4)):
            settings = {"max_steps": steps, "save_every": 2, "deterministic": True}
            engine = {"deepspeed_config": student_engine(stage)}
            output = train(tmp_path, wan2, name, ranks=ranks, **settings, **engine, **more)
        return numbers(output)

    cpu, devices = cut_and_resumed("cpu"), Simulated(tmp_path, gpus=2)
    take_texts_of_cpus(wan2, tmp_path / "cache", tmp_path / "cache")
    assert cut_and_resumed("gpu", accelerator=devices) == cpu and devices.reports() == ""


def test_torch_s_fused_adam_has_its_restored_count_of_updates_on_the_gpu_where_its_kernel_reads_it(
    tmp_path: Path,
) -> None:
    start = partial(program, gpus=Simulated(tmp_path))
    assert call(places_of_restored_steps, ranks=1, start=start) == [["3.0 cuda", "3.0 cpu"]]
