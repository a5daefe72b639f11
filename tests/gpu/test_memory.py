"""Memory of a GPU: planned, measured, and exhausted."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import active_peaks
import planned
import pytest
import torch
from gpu import not_rehearsed
from ranks import run, wandistiller, write_json
from recipes import recipe_file

from wandistiller.planner.peak_memory import CONTEXT, MIB
from wandistiller.utils.files import read_json

pytestmark = pytest.mark.gpu

PIECES = 80
"""MiB for four streams, whose segments grow by 20 MiB."""
LEFT = 900 * MIB
"""Bytes that are left free where memory is to run out: CUDA starts in them, and no run fits."""


@contextmanager
def only(nbytes: int) -> Iterator[None]:
    """Leave so much of the GPU to the processes of the block."""
    taken = torch.empty(torch.cuda.mem_get_info()[0] - nbytes, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        taken.set_()  # a failed test keeps its variables
        torch.cuda.empty_cache()


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
def test_a_run_fits_a_gpu_with_a_tenth_more_than_its_plan_and_takes_as_much(
    student: str, teacher: str, num_frames: int, tmp_path: Path
) -> None:
    """With more it may take more: DeepSpeed (0.19.8) joins weights on the GPU where they fit twice."""
    wan = planned.pipeline(tmp_path, width=1024, layers=12)
    size = {"height": 256, "width": 256, "num_frames": num_frames}
    given = planned.recipe(tmp_path, wan, 12, student, teacher, **size)
    plan = max(planned.predicted(given, 1).values())
    file = write_json(tmp_path / "run.json", given)
    words = [active_peaks.__file__, "train", "--recipe", str(file), "--despite_plan"]
    with only(CONTEXT + int(1.1 * plan + PIECES) * MIB):
        run([sys.executable, *words], DS_ACCELERATOR="cuda")
    found = read_json(Path(given["output_dir"]) / "memory.json")
    most = 1024 * max(max(kinds.get("peak", [0])) for kinds in found.values())
    assert plan / 1.1 <= most <= 1.1 * plan


@not_rehearsed
def test_a_gpu_whose_memory_runs_out_ends_with_code_3_and_what_fits(tmp_path: Path) -> None:
    wan = planned.pipeline(tmp_path, width=1024, layers=12)
    given = planned.recipe(tmp_path, wan, 12, "zero0", "replicated", height=256, width=256, num_frames=81)
    file = recipe_file(tmp_path, wan, **given)
    with only(LEFT):
        error = wandistiller("train", "--recipe", file, "--despite_plan", code=3, accelerator="cuda").stderr
    assert "Traceback" not in error and "ds_configs/" in error
