"""The weights under the names of the original Wan, in one file, as ComfyUI and diffusers' from_single_file read them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from wandistiller.files import atomic

NAMES = (
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^proj_out\.", "head.head."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.norm2\.", ".norm3."),  # diffusers numbers a block's norms in the order of use; only this one has weights
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
)
"""diffusers' names -> the original ones."""
QUANTIZED = re.compile(r"^blocks\.\d+\.(?:(?:self|cross)_attn\.[qkvo]|ffn\.[02])\.weight$")
"""What is stored in eight bits: the products of matrices in the blocks."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max
MARK = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
"""What ComfyUI is told of such a layer: multiply in the precision of its input, for whose own scale nothing was measured."""
HEAD_DIM = 128
FIXED = {"attention_head_dim": HEAD_DIM, "patch_size": [1, 2, 2], "freq_dim": 256, "text_dim": 4096, "cross_attn_norm": True}
"""What ComfyUI takes for granted of a Wan, and does not read from the file."""


def original_name(name: str) -> str:
    """Of a parameter, or with a dot behind it of a module, of diffusers' WanTransformer3DModel."""
    for pattern, becomes in NAMES:
        name = re.sub(pattern, becomes, name)
    return name


def unlike_published(config: dict[str, Any]) -> list[str]:
    """Where a transformer differs from what ComfyUI takes for granted, in words; such a file opens in diffusers only."""
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    return [f"`{key}` is {json.dumps(said[key])}; ComfyUI reads every Wan with {json.dumps(value)}, so it cannot open this file"
            for key, value in FIXED.items() if said.get(key, value) != value]  # fmt: skip


def quantized(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A weight in eight bits with one scale, weight ~ stored * scale, and what marks its layer for ComfyUI.

    Source of the layout: ComfyUI's mixed-precision layers, `.weight_scale` (float32) and `.comfy_quant` (JSON as bytes).
    """
    layer, scale = name.removesuffix(".weight"), weight.abs().max().float().clamp(min=1e-12) / LARGEST
    yield name, (weight.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    yield f"{layer}.weight_scale", scale
    yield f"{layer}.comfy_quant", torch.tensor(list(json.dumps(MARK).encode()), dtype=torch.uint8)


def original_state(state: dict[str, Tensor], eight_bits: bool) -> dict[str, Tensor]:
    """All weights of a network under their original names."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        renamed = original_name(name)
        found |= quantized(renamed, value) if eight_bits and QUANTIZED.match(renamed) else {renamed: value.contiguous()}
    return found


def write_file(file: Path, tensors: dict[str, Tensor], architecture: str, description: str, facts: dict[str, Any]) -> Path:
    """Write one safetensors file with the metadata that loaders and model managers look for, whole or not at all.

    Args:
        architecture: as https://github.com/Stability-AI/ModelSpec has it: of a LoRA with /lora behind it.
    """
    about = {"format": "pt", "modelspec.sai_model_spec": "1.0.0", "modelspec.architecture": architecture,
             "modelspec.title": file.stem, "modelspec.implementation": "https://github.com/Wan-Video/Wan2.1",
             "modelspec.description": description, "wandistiller": json.dumps(facts)}  # fmt: skip
    with atomic(file) as temporary:
        save_file(tensors, temporary, about)
    return file


def per_expert(file: Path, experts: list[str], expert: str) -> Path:
    """FILE, or for a student of two experts FILE_high_noise and FILE_low_noise."""
    side = {"transformer": "_high_noise", "transformer_2": "_low_noise"}[expert] if len(experts) > 1 else ""
    return file.with_name(f"{file.stem}{side}{file.suffix}")
