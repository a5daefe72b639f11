"""Numbers on a GPU: as on a CPU, the same in every layout, and after a resume."""

from pathlib import Path

import pytest
import torch
from gpu import KIND, on_gpu
from gpu_runs import RUNS, Pair, image_run, on_cpu_and
from ranks import STUDENTS, TEACHERS, has_async_io, losses, metrics
from recipes import student_engine, train
from small_wan import IMAGE_FORMS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage", [2, 3])
def test_gpu_and_cpu_give_the_same_losses_in_float32(stage: int, tmp_path: Path, wan2: Path) -> None:
    more = {"max_steps": 8, "deepspeed_config": student_engine(stage)}
    cpu, cuda = (train(tmp_path, wan2, kind, ranks=1, accelerator=kind, **more) for kind in ("cpu", KIND))
    assert losses(cuda) == pytest.approx(losses(cpu), rel=1e-3)


def has_losses_of_the_cpu(found: Pair, rel: float = 1e-3) -> bool:
    """Whether the losses on both are equal, and print how far they are from it."""
    gpu, cpu = ([loss for loss, *_ in lines] for lines in found)
    print("=>", max(abs(a / b - 1) for a, b in zip(gpu, cpu, strict=True)))
    return gpu == pytest.approx(cpu, rel=rel)


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_has_the_losses_of_a_cpu_in_float32(name: str, tmp_path: Path, wan2: Path) -> None:
    found = on_cpu_and(KIND, tmp_path, wan2, **RUNS[name])
    assert has_losses_of_the_cpu(
        found, 1e-2 if "8 bits" in name else 1e-3
    )  # a rounding more is a level of 8 bits


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_image_to_video_has_the_losses_of_a_cpu_in_float32(form: str, tmp_path: Path) -> None:
    wan, given = image_run(form, tmp_path)
    found = on_cpu_and(KIND, tmp_path, wan, **given)
    assert has_losses_of_the_cpu(found)


@pytest.mark.skipif(KIND == "cuda" and torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("stage", [2, 3])
def test_two_gpus_that_share_samples_learn_what_one_learns_in_float32(
    stage: int, tmp_path: Path, wan2: Path
) -> None:
    more = {"max_steps": 4, "num_frames": 5, "deepspeed_config": student_engine(stage)}
    found = [
        losses(train(tmp_path, wan2, f"{n}", ranks=n, accelerator=KIND, context_parallel=n, **more))
        for n in (1, 2)
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("student", STUDENTS)
def test_every_student_json_learns_in_bf16(student: str, tmp_path: Path, wan2: Path) -> None:
    if student.endswith("nvme") and not has_async_io():
        pytest.skip("no libaio here")
    lines = metrics(
        on_gpu(tmp_path, wan2, max_steps=4, deepspeed_config=f"ds_configs/student/{student}.json")
    )
    assert len(lines) == 4 and all(line["grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_deterministic_run_that_was_cut_and_resumed_has_the_losses_of_one_that_was_not_bitwise(
    stage: int, tmp_path: Path, wan2: Path
) -> None:
    engine = student_engine(stage, offload=stage > 0, bf16={"enabled": True})
    more = {"deepspeed_config": engine, "save_every": 5, "deterministic": True}
    for name, steps in (("whole", 10), ("cut", 5), ("cut", 10)):
        on_gpu(tmp_path, wan2, name, max_steps=steps, **more)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("teacher", [name for name in TEACHERS if not name.startswith("device_map")])
def test_two_gpus_have_the_losses_of_one_whatever_the_placement(
    teacher: str, stage: int, tmp_path: Path, wan2: Path
) -> None:
    more = {"max_steps": 4, "deepspeed_config": student_engine(stage, offload=stage > 0)}

    def losses_of(ranks: int, name: str) -> list[float]:
        placed = {"teacher_deepspeed_config": f"ds_configs/teacher/{name}.json"}
        return losses(on_gpu(tmp_path, wan2, str(ranks), ranks, **more, **placed))

    one = losses_of(1, "replicated")
    assert losses_of(2, teacher) == pytest.approx(one, rel=1e-2)  # bf16 and float32 in other orders
