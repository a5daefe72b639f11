"""Runs of adapters on one streamed base whose blocks have Wan 14B's sizes, and the least that they hold."""

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import planned
import torch
from small_wan import make_large_wan

from wandistiller.network.names import is_in_block
from wandistiller.planner.peak_memory import PROCESS
from wandistiller.utils.files import read_json
from wandistiller.wan.pipeline import open_wan

SIZES = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824}
RANK, MAPS = 64, 8
DMD2 = {"name": "dmd2", "steps": 4, "critic_updates": 1, "critic_lr": 2e-5}
STATE = 2 + 12 + 4 + 2 + 2
"""Bytes for each element of an adapter: weight, its float32 copy and moments, gradients in float32, and those
of a micro-step and of those before it."""


class Held(NamedTuple):
    """Bytes that a process cannot do without, but for the blocks that compute."""

    block: int
    stored: int
    """All blocks, once."""
    rest: int
    """Weights outside of blocks, adapters with all their state, and the libraries."""


def wan(folder: Path, layers: int) -> Path:
    """A pipeline of one expert with random weights in bf16, in files, unless it is there."""
    return make_large_wan(folder / f"wan_14b_{layers}", torch.bfloat16, "10GB", **SIZES, num_layers=layers)


def run_of(folder: Path, teacher: Path, objective: str, **more: Any) -> dict[str, Any]:
    """The recipe of a step of two micro-steps, of a sample of four patches each; else as the shipped one."""
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    usual = {
        "student_config": {},
        "lora": {"rank": RANK},
        "objective": DMD2 if objective == "dmd2" else objective,
        "deepspeed_config": read_json("ds_configs/student/lora_wan.json") | batch,
        "teacher_deepspeed_config": read_json("ds_configs/teacher/streamed.json"),
        "lr": 1e-4,
        "merge_text_padding": True,
        "height": 32,
        "width": 32,
        "max_steps": 1,
        "rollout_steps": 1,
        "sample_prompts": [],
    }
    values = planned.recipe(folder, teacher, 0, "", "", **usual | more)
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    return values


def held(teacher: Path, roles: int) -> Held:
    """What a process holds on a CPU, from the shapes alone."""
    config = open_wan(str(teacher)).config
    inside = outside = 0
    for name, shape in config.shapes.items():
        nbytes = prod(shape) * config.dtype_of(name, torch.bfloat16).itemsize
        inside, outside = (inside + nbytes, outside) if is_in_block(name) else (inside, outside + nbytes)
    adapters = config.num_layers * MAPS * 2 * RANK * config.width
    return Held(inside // config.num_layers, inside, outside + roles * STATE * adapters + PROCESS)
