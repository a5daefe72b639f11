"""The small run that the multi-rank tests share: 8 prompts, two experts, a student of two layers."""

from pathlib import Path
from typing import Any

from ranks import wandistiller, write_json

from wandistiller.utils.files import atomic

PROMPTS = """a red circle on a blue background, left
a green square on a red background, top
a blue circle on a green background, right
a blue square on a red background, center
a green circle on a red background, bottom
a red square on a green background, top
a green square on a blue background, left
a red circle on a green background, right
"""
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01}}
TORCH_ADAM = ADAM | {"params": ADAM["params"] | {"torch_adam": True}}
"""The same without DeepSpeed's build for CPUs, which takes a minute once and seconds in each process."""
REPLICATED = {"zero_optimization": {"stage": 0}}
"""A teacher in float32, whole on every rank: two seconds a run less than one that ZeRO gathers."""
SHARDED = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
    }
}
"""The same weights in parts on the ranks, and in CPU memory between calls."""


def student_engine(stage: int, *, offload: bool = True, **more: Any) -> dict[str, Any]:
    """A float32 engine: 8 samples a step, 2 a rank and micro-step."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": ADAM,
        "zero_optimization": zero,
        "activation_checkpointing": {"partition_activations": False},
        **more,
    }


def recipe(folder: Path, wan: Path, **more: Any) -> dict[str, Any]:
    """A recipe that runs in seconds; the cache is shared by all runs in `folder`."""
    prompts = folder / "prompts.txt"
    if not prompts.is_file():  # written whole: ranks may come here together
        with atomic(prompts) as temporary:
            temporary.write_text(PROMPTS)
    return {
        "teacher_path": str(wan),
        "data_path": str(prompts),
        "cache_dir": str(folder / "cache"),
        "student_config": {"num_layers": 2},
        "deepspeed_config": student_engine(2),
        "teacher_deepspeed_config": REPLICATED,
        "height": 32,
        "width": 32,
        "max_steps": 20,
        "rollout_steps": 2,
        "sample_steps": 2,
        "sample_prompts": ["a red circle"],
        "negative_prompt": "",
        **more,
    }


def recipe_file(folder: Path, wan: Path, name: str = "run", **more: Any) -> Path:
    """Write this recipe to `folder`/`name`.json; its output is `folder`/`name`."""
    values = recipe(folder, wan, **{"output_dir": str(folder / name)} | more)
    return write_json(folder / f"{name}.json", values)


def train(
    folder: Path,
    wan: Path,
    name: str = "run",
    *flags: str,
    ranks: int = 2,
    accelerator: str = "cpu",
    **more: Any,
) -> Path:
    """Train by a `recipe_file`; return the output folder."""
    file = recipe_file(folder, wan, name, **more)
    wandistiller("train", "--recipe", file, *flags, ranks=ranks, accelerator=accelerator)
    return folder / name
