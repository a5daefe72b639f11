"""Training on simulated GPUs: the losses and gradient norms of a CPU run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import STUDENTS, metrics, runs_here
from recipes import train
from simulated import Simulated, simulated_gpu

from wandistiller.data.text_cache import text_fingerprint
from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, simulated_gpu]
FLOAT32, DTYPES = {"bf16": {"enabled": False}}, (torch.float32, torch.bfloat16)


def steps(folder: Path, wan: Path, name: str, where: str | Simulated, ranks: int, **more: Any) -> list[float]:
    output = train(folder, wan, name, ranks=ranks, accelerator=where, max_steps=3, **more)
    return [value for line in metrics(output) for value in (line["loss"], line["grad_norm"])]


def compare(folder: Path, wan: Path, ranks: int = 1, **more: Any) -> None:
    """Train on CPUs, then on GPUs with the CPUs' text, which GPUs encode in bf16; compare bit for bit."""
    (reports := folder / "reports").mkdir()
    devices = Simulated(reports, gpus=ranks)
    expected = steps(folder, wan, "cpu", "cpu", ranks, **more)
    texts, of_cpu, of_gpu = folder / "cache/text", *(text_fingerprint(wan, dtype) for dtype in DTYPES)
    shutil.copytree(texts / of_cpu, texts / of_gpu)
    assert steps(folder, wan, "gpu", devices, ranks, **more) == expected
    assert devices.reports() == ""


def test_a_student_on_a_gpu_learns_bitwise_what_one_on_a_cpu_learns(wan2: Path, tmp_path: Path) -> None:
    compare(tmp_path, wan2, teacher_deepspeed_config=read_json("ds_configs/teacher/streamed.json") | FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("student", STUDENTS)
def test_every_student_json_learns_on_gpus_bitwise_what_it_learns_on_cpus(
    student: str, ranks: int, wan2: Path, tmp_path: Path
) -> None:
    if not runs_here(student):
        pytest.skip("no libaio here")
    engine = read_json(f"ds_configs/student/{student}.json") | FLOAT32
    del engine["scheduler"]  # its first steps would change nothing
    # without nvcc on both: DeepSpeed's own Adam for CPUs rounds otherwise
    engine["optimizer"]["params"] |= {} if "offload" in student else {"torch_adam": True, "fused": True}
    compare(tmp_path, wan2, ranks, deepspeed_config=engine)
