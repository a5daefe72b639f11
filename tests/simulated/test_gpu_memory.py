"""Memory of a simulated GPU: what a run takes of it, and how it ends when there is none left."""

from pathlib import Path
from typing import Any

import planned
import pytest
from ranks import wandistiller, write_json
from recipes import SHARDED, recipe_file, train
from simulated import Simulated, simulated_gpu
from small_wan import make_wan

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, simulated_gpu]


@pytest.mark.slow
def test_a_small_student_takes_no_gpu_memory_for_gradients_that_it_does_not_have(
    wan2: Path, tmp_path: Path
) -> None:
    """DeepSpeed's buckets are 191 MiB by default."""
    output = train(tmp_path, wan2, ranks=1, accelerator=Simulated(tmp_path), max_steps=1)
    assert max(read_json(output / "memory.json")["train"]["peak"]) * 1024 < 80


SPENT = {
    "in the rollouts": (1, 2),
    "in the first measurement": (1, 26),
    "on both ranks": (2, 14),
    "on one of two ranks": (2, (4096, 14)),
}
"""When -> ranks, and MiB of their GPUs."""


@pytest.mark.slow
@pytest.mark.parametrize("when", SPENT)
def test_a_gpu_whose_memory_runs_out_ends_all_ranks_with_code_3_and_advice(
    when: str, wan2: Path, tmp_path: Path
) -> None:
    ranks, mib = SPENT[when]
    devices = Simulated(tmp_path, gpus=ranks, mib=mib)
    file = recipe_file(tmp_path, wan2, max_steps=1, height=256, width=256, num_frames=17)
    words = ["train", "--recipe", file, "--despite_plan"]
    error = wandistiller(*words, ranks=ranks, code=3, accelerator=devices).stderr
    assert devices.reports() == ""
    assert "Traceback" not in error and "Out of memory on rank" in error and "What helps:" in error


@pytest.mark.slow
def test_a_run_that_has_run_out_of_memory_ends_with_the_flags_that_are_advised(tmp_path: Path) -> None:
    wan = planned.pipeline(tmp_path, width=1024, layers=8)
    devices = Simulated(tmp_path, mib=2500)

    def trained(student: str, teacher: str, *flags: str, code: int = 0) -> str:
        given = planned.recipe(tmp_path, wan, 8, "", "", rollout_steps=1, sample_steps=1) | {"max_steps": 1}
        for key, file in (("deepspeed_config", student), ("teacher_deepspeed_config", teacher)):
            given[key] = read_json(file) | {"bf16": {"enabled": False}}
        words = ["train", "--recipe", write_json(tmp_path / "run.json", given), *flags]
        return wandistiller(*words, code=code, accelerator=devices).stderr

    own = "ds_configs/student/zero0.json", "ds_configs/teacher/replicated.json"
    error = trained(*own, "--despite_plan", code=3)
    flags = next(line for line in error.splitlines() if "--deepspeed_config auto" in line)
    trained(*own, *flags.partition(":")[0].split())
    assert (tmp_path / "run" / "student").is_dir() and devices.reports() == ""


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 2}}
EIGHT = ADAM | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}
TWO = ADAM | {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}
RECOMPUTED = {"activation_checkpointing": {"partition_activations": False}}
ON_CPU = {"sample_prompts": [], "teacher_deepspeed_config": SHARDED}
CLIPS = {"height": 256, "width": 256, "num_frames": 5}
PHASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pictures of the teacher": (2, 64, CLIPS),
    "the student's forward pass": (2, 84, CLIPS | {"sample_prompts": [], "deepspeed_config": EIGHT}),
    "the student's backward pass": (
        2,
        64,
        CLIPS | {"sample_prompts": [], "deepspeed_config": EIGHT | RECOMPUTED},
    ),
    "building the student": (16, 120, ON_CPU | {"deepspeed_config": TWO | RECOMPUTED}),
    "the optimizer's step": (16, 200, ON_CPU | {"deepspeed_config": TWO | RECOMPUTED}),
}
"""What it does -> heads of the teacher, MiB of its GPU, and settings of the run."""


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_memory_that_runs_out_names_what_was_done_and_leaves_no_trace(phase: str, tmp_path: Path) -> None:
    heads, mib, settings = PHASES[phase]
    wan, devices = make_wan(tmp_path / "wan", heads=heads), Simulated(tmp_path, mib=mib)
    file = recipe_file(tmp_path, wan, max_steps=2, student_config={"num_layers": 4}, **settings)
    error = wandistiller("train", "--recipe", file, "--despite_plan", code=3, accelerator=devices).stderr
    assert "Out of memory on rank 0, " in error and f"{phase}: CUDA out of memory" in error
    assert "Traceback" not in error and devices.reports() == ""
    assert not list((tmp_path / "run").rglob("*.tmp"))
