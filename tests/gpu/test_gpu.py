"""What only a GPU can show. Never run by the authors yet: their machines have none."""

from pathlib import Path

import pytest
from ranks import losses, wandistiller, write_json
from recipes import recipe, student_engine


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_gpu_and_cpu_give_the_same_losses_in_float32(stage: int, tmp_path: Path, wan2: Path) -> None:
    for accelerator in ("cpu", "cuda"):
        more = {"output_dir": str(tmp_path / accelerator), "max_steps": 8, "deepspeed_config": student_engine(stage)}
        file = write_json(tmp_path / f"{accelerator}.json", recipe(tmp_path, wan2, **more))
        wandistiller("train", "--recipe", file, accelerator=accelerator)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)
