"""Claims that only a GPU can show. Never run by the authors yet: their machines have none."""

from pathlib import Path

import planned
import pytest
import torch
from ranks import TEACHERS, losses, metrics
from recipes import student_engine, train


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_gpu_and_cpu_give_the_same_losses_in_float32(stage: int, tmp_path: Path, wan2: Path) -> None:
    more = {"max_steps": 8, "deepspeed_config": student_engine(stage)}
    cpu, cuda = (train(tmp_path, wan2, kind, ranks=1, accelerator=kind, **more) for kind in ("cpu", "cuda"))
    assert losses(cuda) == pytest.approx(losses(cpu), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_fp16_student_skips_overflows_lowers_its_loss_scale_and_learns(
    stage: int, tmp_path: Path, wan2: Path
) -> None:
    engine = student_engine(stage, offload=stage > 0) | {"fp16": {"enabled": True, "initial_scale_power": 24}}
    more = {"max_steps": 20, "deepspeed_config": engine}
    lines = metrics(train(tmp_path, wan2, ranks=1, accelerator="cuda", **more))
    assert lines[0]["skipped"] and lines[-1]["loss_scale"] < 2**24
    same = [line["loss"] for line in lines if line["expert"] == lines[0]["expert"]]
    assert same[-1] < same[0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("teacher", [name for name in TEACHERS if not name.startswith("device_map")])
def test_two_gpus_have_the_losses_of_one_whatever_the_placement(
    teacher: str, stage: int, tmp_path: Path, wan2: Path
) -> None:
    more = {"max_steps": 4, "deepspeed_config": student_engine(stage, offload=stage > 0)}

    def losses_of(ranks: int, name: str) -> list[float]:
        placed = {"teacher_deepspeed_config": f"ds_configs/teacher/{name}.json"}
        return losses(train(tmp_path, wan2, str(ranks), ranks=ranks, accelerator="cuda", **more, **placed))

    one = losses_of(1, "replicated")
    assert losses_of(2, teacher) == pytest.approx(one, rel=1e-2)  # bf16 and float32 in other orders


@pytest.mark.gpu
@pytest.mark.parametrize("num_frames", [1, 81])
@pytest.mark.parametrize("student", ["zero2_offload", "zero3_offload_all"])
def test_a_gpu_s_memory_is_planned_within_a_tenth(student: str, num_frames: int, tmp_path: Path) -> None:
    wan = planned.pipeline(tmp_path, width=1024, layers=12)
    size = {"height": 256, "width": 256, "num_frames": num_frames}
    given = planned.recipe(tmp_path, wan, 12, student, "zero_inference_cpu", **size)
    expected, actual = planned.predicted(given, 1), planned.measured(given, 1)
    assert 0.95 <= max(expected.values()) / max(actual.values()) <= 1.1
