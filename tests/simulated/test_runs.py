"""Kinds of runs on simulated GPUs: losses of a CPU run, bit for bit, and no fault is reported."""

from pathlib import Path
from typing import Any

import pytest
from gpu_runs import DMD2, RUNS, image_run, on_both
from simulated import simulated_gpu
from small_wan import IMAGE_FORMS, make_wan

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_gpus_has_the_losses_of_one_on_cpus_bitwise(
    name: str, ranks: int, wan2: Path, tmp_path: Path
) -> None:
    found = on_both(tmp_path, wan2, ranks, **RUNS[name])
    assert found.gpu == found.cpu and found.reports == ""


@pytest.mark.parametrize("objective", ["velocity", DMD2 | {"gan": 0.03}], ids=["velocity", "dmd2"])
def test_two_gpus_that_share_each_sample_have_the_losses_of_two_cpus_bitwise(
    objective: Any, tmp_path: Path
) -> None:
    wan = make_wan(tmp_path / "wan", heads=4)
    found = on_both(tmp_path, wan, 2, context_parallel=2, num_frames=5, objective=objective)
    assert found.gpu == found.cpu and found.reports == ""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_an_image_to_video_run_on_gpus_has_the_losses_of_one_on_cpus_bitwise(
    form: str, ranks: int, tmp_path: Path
) -> None:
    wan, given = image_run(form, tmp_path)
    found = on_both(tmp_path, wan, ranks, **given)
    assert found.gpu == found.cpu and found.reports == ""
