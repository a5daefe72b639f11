"""Called on ranks by test_quantized.py: quantised teachers next to diffusers' modules by torchao itself."""

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from networks import network_of
from on_ranks.loading import bytes_read, shared_blocks
from on_ranks.placements import NULL_LD, SCALES, difference, outputs
from shipped import placement
from torch import nn
from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher
from wandistiller.teacher.build import build_teacher
from wandistiller.wan.pipeline import open_wan

FORMATS = ("int8", "float8", "nf4")
PLACEMENTS = ("replicated", "owner", "host_cpu", "streamed")


def config_of(weights: str, linear: nn.Linear) -> Any:
    """torchao's own configuration for a linear layer."""
    if weights == "nf4":
        config = NF4WeightOnlyConfig()
        config.scaler_block_size = math.gcd(linear.weight.numel() // 64, 256)
        return config
    return {"int8": Int8WeightOnlyConfig(), "float8": Float8WeightOnlyConfig()}[weights]


def by_torchao(folder: Path, dtype: torch.dtype, weights: str | None) -> WanTransformer3DModel:
    """diffusers' own module, whose linear layers in blocks torchao quantises in place."""
    model = WanTransformer3DModel.from_pretrained(folder, dtype=dtype).eval()
    for p in model.parameters():
        p.data = p.data.clone()
    for linear in model.blocks.modules():
        if weights and isinstance(linear, nn.Linear):
            quantize_(linear, config_of(weights, linear))
    return model


def differences(folder: Path, tasks: list[str]) -> dict[str, Any]:
    """Return what differs most from torchao's outputs, bytes read, and memory shared, by task.

    A task is `NAME WEIGHTS PRECISION`.
    """
    results, guidance = {}, Guidance(NULL_LD, SCALES)
    for task in tasks:
        name, weights, precision = task.split()
        experts = {e: by_torchao(folder / e.value, getattr(torch, precision), weights) for e in Expert}
        config = open_wan(str(folder)).config
        local = LocalTeacher({e: network_of(module) for e, module in experts.items()})
        expected = outputs(GuidedTeacher(local, guidance), config, torch.device("cpu"))
        before = bytes_read()
        placed = placement(name, precision, weights=weights)
        teacher = build_teacher(open_wan(str(folder)), placed, guidance)
        read = bytes_read() - before
        most = {"difference": difference(outputs(teacher, config, collectives.device()), expected)}
        results[task] = most | {"read": read, "shared": shared_blocks()}
        collectives.barrier()
        del teacher
    return results
