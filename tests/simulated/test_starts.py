"""Ranks that have no simulated GPU of their own."""

from pathlib import Path

import pytest
from ranks import wandistiller
from recipes import recipe_file
from simulated import Simulated, simulated_gpu

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]


def test_two_ranks_on_one_gpu_are_refused_before_anything_is_loaded(wan2: Path, tmp_path: Path) -> None:
    file, devices = recipe_file(tmp_path, wan2, max_steps=1), Simulated(tmp_path, gpus=1)
    error = wandistiller("train", "--recipe", file, ranks=2, code=2, accelerator=devices).stderr
    assert "Ranks 0, 1 compute on the same GPU, simulated-0. Start one rank a GPU" in error
    assert "Traceback" not in error and not (tmp_path / "run").exists()
