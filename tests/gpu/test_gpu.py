"""What only a GPU can show. Never run by the authors yet: their machines have none."""

import json
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


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_fp16_student_skips_overflows_lowers_its_loss_scale_and_learns(stage: int, tmp_path: Path, wan2: Path) -> None:
    engine = student_engine(stage, offload=stage > 0) | {"fp16": {"enabled": True, "initial_scale_power": 24}}
    more = {"output_dir": str(tmp_path / "run"), "max_steps": 20, "deepspeed_config": engine}
    wandistiller("train", "--recipe", write_json(tmp_path / "r.json", recipe(tmp_path, wan2, **more)), accelerator="cuda")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["skipped"] and lines[-1]["loss_scale"] < 2**24
    assert lines[-1]["loss"] < lines[0]["loss"]
