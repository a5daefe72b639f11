"""Kernels of a network's blocks: keys of the block "wandistiller" in both DeepSpeed JSONs."""

from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, Literal

import torch

from wandistiller.distributed.device import kind, on_accelerator
from wandistiller.engine.ds_schema import BLOCK
from wandistiller.utils.errors import problem

PACKAGES = {
    "flash": ("flash_attn", "pip install flash-attn"),
    "_flash_3": ("flash_attn_interface", "FlashAttention 3, built from its sources"),
    "sage": ("sageattention", "pip install sageattention"),
}
"""Attention -> the module that it needs, and where that comes from."""


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


def read_kernels(ds: dict[str, Any]) -> Kernels:
    """Read the kernels of a checked JSON."""
    names = {f.name for f in fields(Kernels)}
    return Kernels(**{key: value for key, value in ds.get(BLOCK, {}).items() if key in names})


def kernel_problems(where: str, ds: dict[str, Any], *, here: bool) -> list[str]:
    """List what this machine lacks for the kernels of a checked JSON.

    Args:
        here: whether the run is to be on this machine.
    """
    kernels, key = read_kernels(ds), f"{BLOCK}.attention"
    if not here or kernels.attention == "native":
        return []
    if kind() != "cuda":
        remedy = "It needs a CUDA GPU, and there is none here. Write native, or leave it out."
        return [problem(where, key, kernels.attention, remedy)]
    module, source = PACKAGES.get(kernels.attention, ("torch", ""))
    if not find_spec(module):
        remedy = f"It needs {source}. Install it, or write native."
        return [problem(where, key, kernels.attention, remedy)]
    return []


def training_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """List kernels of a student's JSON that cannot learn, or do not go with its other settings."""
    block = ds.get(BLOCK)
    given, problems = block if isinstance(block, dict) else {}, []
    if given.get("attention") == "sage":
        remedy = "It has no backward pass. Write another, such as flash."
        problems.append(problem(where, f"{BLOCK}.attention", "sage", remedy))
    if given.get("compile") is True:
        zero = ds.get("zero_optimization")
        if isinstance(zero, dict) and zero.get("stage") == 3:
            remedy = "ZeRO-3 fetches weights inside of the blocks. Leave it out, or write stage 2."
            problems.append(problem(where, f"{BLOCK}.compile", True, remedy))
        if given.get("checkpoint", "blocks") != "blocks":
            remedy = (
                f'Compiled blocks are recomputed whole: leave `{BLOCK}.checkpoint` out, or write "blocks".'
            )
            problems.append(problem(where, f"{BLOCK}.compile", True, remedy))
    return problems
