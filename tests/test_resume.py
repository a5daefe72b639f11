"""A run that was cut and started again ends as one that was not."""

import json
from pathlib import Path

import pytest
import torch
from ranks import losses, wandistiller, write_json
from recipes import recipe, student_engine
from safetensors.torch import load_file


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "student" / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("stage", [2, 3])
def test_resumed_run_is_bitwise_equal(stage: int, tmp_path: Path, wan2: Path) -> None:
    engine = student_engine(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-3}})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for output, steps in ((whole, 8), (cut, 4), (cut, 8)):  # both save at 4, the second run of `cut` resumes there
        more = {"output_dir": str(output), "max_steps": steps, "save_every": 4, "deepspeed_config": engine}
        file = write_json(tmp_path / "recipe.json", recipe(tmp_path, wan2, **more))
        done = wandistiller("train", "--recipe", file, ranks=2)
    assert "4 of 8 steps are done" in done.stderr
    assert losses(cut) == losses(whole)
    a, b = weights(cut), weights(whole)
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path, wan2: Path) -> None:
    output = tmp_path / "run"
    file = write_json(tmp_path / "recipe.json", recipe(tmp_path, wan2, output_dir=str(output), max_steps=2))
    wandistiller("train", "--recipe", file)
    done = wandistiller("train", "--recipe", file, "--seed", "7", code=2)
    assert "another seed: 0, now 7" in done.stderr
    assert json.loads((output / "resolved" / "run.json").read_text())["seed"] == 0
