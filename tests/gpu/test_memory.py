"""Memory of a GPU: planned, measured, and exhausted. Never run by the authors."""

from pathlib import Path

import planned
import pytest
import torch
from gpu import not_rehearsed, on_gpu
from ranks import wandistiller
from recipes import recipe_file

pytestmark = pytest.mark.gpu

LEFT = 900 * 2**20
"""Bytes that are left free where memory is to run out: CUDA starts in them, and no run fits."""


@not_rehearsed
@pytest.mark.parametrize("num_frames", [1, 81])
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ("zero2_offload", "zero_inference_cpu"),
        ("zero2_offload", "streamed"),
        ("zero3_offload_all", "streamed"),
    ],
)
def test_a_gpu_s_memory_is_planned_within_a_tenth(
    student: str, teacher: str, num_frames: int, tmp_path: Path
) -> None:
    wan = planned.pipeline(tmp_path, width=1024, layers=12)
    size = {"height": 256, "width": 256, "num_frames": num_frames}
    given = planned.recipe(tmp_path, wan, 12, student, teacher, **size)
    expected, actual = planned.predicted(given, 1), planned.measured(given, 1)
    assert 0.95 <= max(expected.values()) / max(actual.values()) <= 1.1


@not_rehearsed
def test_a_gpu_whose_memory_runs_out_ends_with_code_3_and_what_fits(tmp_path: Path) -> None:
    wan = planned.pipeline(tmp_path, width=1024, layers=12)
    given = planned.recipe(tmp_path, wan, 12, "zero0", "replicated", height=256, width=256, num_frames=81)
    file = recipe_file(tmp_path, wan, **given)
    taken = torch.empty(torch.cuda.mem_get_info()[0] - LEFT, dtype=torch.uint8, device="cuda")
    error = wandistiller("train", "--recipe", file, code=3, accelerator="cuda").stderr
    del taken
    assert "Traceback" not in error and "ds_configs/" in error


@not_rehearsed
def test_a_memory_profile_of_a_step_is_written(tmp_path: Path, wan2: Path) -> None:
    output = on_gpu(tmp_path, wan2, max_steps=2, profile_memory=2)
    assert (output / "profile_memory" / "rank_0.pickle").is_file()
