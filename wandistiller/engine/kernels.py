"""Kernels of a network's blocks: keys of the block "wandistiller" in both DeepSpeed JSONs."""

from dataclasses import dataclass
from typing import Literal

import torch

from wandistiller.distributed.device import on_accelerator
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_schema import BLOCK


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels of a network's blocks."""

    attention: Literal["native", "_native_cudnn", "flash", "_flash_3", "sage"] = "native"
    """Attention among the patches, by diffusers' names: torch's own choice, or one kernel for it."""
    compile: bool = False
    """Compile each block by torch.compile: minutes at the start, and fewer, larger kernels."""


def emulates_bf16() -> bool:
    """Return whether this rank computes on a CPU without instructions for bf16.

    Its products in bf16 then take 6 to 56 times as long as in float32 (torch 2.13, whose oneDNN refuses
    them; `python tests/bench/emulation.py`).
    """
    if on_accelerator():
        return False
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def training_problems(json: DeepSpeedJson) -> list[str]:
    """List kernels of a student's JSON that cannot learn, or do not go with its other settings."""
    given, problems = json.section(BLOCK), []
    if given.get("attention") == "sage":
        remedy = "It has no backward pass. Write another, such as flash."
        problems.append(json.problem(f"{BLOCK}.attention", "sage", remedy))
    if given.get("compile") is True:
        if json.stage == 3:
            remedy = "ZeRO-3 fetches weights inside of the blocks. Leave it out, or write stage 2."
            problems.append(json.problem(f"{BLOCK}.compile", True, remedy))
        if given.get("checkpoint", "blocks") != "blocks":
            remedy = (
                f'Compiled blocks are recomputed whole: leave `{BLOCK}.checkpoint` out, or write "blocks".'
            )
            problems.append(json.problem(f"{BLOCK}.compile", True, remedy))
    return problems
