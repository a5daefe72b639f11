"""What DeepSpeed itself says of a JSON, before any weight is loaded, and what must be mended in its engines."""

import copy
from importlib.util import find_spec
from typing import Any

import torch
from deepspeed import DeepSpeedConfig
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.profiling.flops_profiler import profiler
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from pydantic import ValidationError

from wandistiller.config import problem
from wandistiller.deepspeed_json import dtype_name, on_nvme
from wandistiller.deepspeed_keys import BATCH_KEYS

MONITORS = {"tensorboard": ("tensorboard", "tensorboard"), "wandb": ("wandb", "wandb"), "comet": ("comet_ml", "comet_ml")}
"""Section -> the module that DeepSpeed imports for it on rank 0 alone, and the package that brings it."""


def config_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """Wrong types and values in DeepSpeed's sections, found by its own reader, as messages."""
    probe = {k: v for k, v in copy.deepcopy(ds).items() if k not in BATCH_KEYS} | {"train_micro_batch_size_per_gpu": 1}
    try:
        DeepSpeedConfig(probe)
    except ValidationError as error:
        return [f"{where}: `{'.'.join(map(str, e['loc']))}` is {e['input']!r}. {e['msg']}." for e in error.errors()]
    except (DeepSpeedConfigError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return [f"{where}: DeepSpeed refuses it: {error}"]
    if (key := on_nvme(ds)) and not AsyncIOBuilder().is_compatible(verbose=False):
        return [problem(where, f"zero_optimization.{key}.device", "nvme", "DeepSpeed's async_io cannot be built here. "
                        "Install libaio and a C++ compiler (Debian, Ubuntu: apt install libaio-dev g++).")]  # fmt: skip
    if found := _machine_problems(where, ds):
        return found
    if dtype_name(ds) == "float16" and not get_accelerator().is_fp16_supported():
        return [f"{where}: `fp16` is enabled, but this machine's accelerator has none. Use bf16."]
    return []


def _machine_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """What this machine or its Python packages lack."""
    section = ds.get("activation_checkpointing", {})
    found = []
    if section.get("cpu_checkpointing") and not section.get("partition_activations") and get_accelerator().device_name() == "cpu":
        found.append(problem(where, "activation_checkpointing.cpu_checkpointing", True,  # the copy would be the original
                             "On a CPU DeepSpeed has it only together with `partition_activations`: true."))  # fmt: skip
    kind, offload = ds.get("optimizer", {}).get("type", ""), ds.get("zero_optimization", {}).get("offload_optimizer", {})
    if kind.lower() == "lion" and offload.get("device", "none") == "none" and get_accelerator().device_name() == "cpu":
        found.append(problem(where, "optimizer.type", kind, "On a CPU DeepSpeed has it only with `offload_optimizer`."))
    for key, (module, package) in MONITORS.items():
        if ds.get(key, {}).get("enabled") and not find_spec(module):
            found.append(problem(where, f"{key}.enabled", True, f"It needs: pip install {package}"))
    return found


def forget_trial_step(engine: Any) -> None:
    """Undo the step with zero gradients that stage 0 takes in bf16 and fp16 while it is built. Does nothing to other engines.

    `initialize_optimizer_states` of FP16_Optimizer and FP16_UnfusedOptimizer runs one to allocate Adam's moments
    (deepspeed 0.19.8): the weights decay once, and Adam's bias correction counts it, so that the first true step is
    0.74 as long with beta 0.9, 0.99. ZeRO 1 to 3 take none.
    tests/test_engines.py::test_every_stage_learns_as_plain_pytorch_in_bf16.
    """
    wrapper = engine.optimizer
    if not isinstance(wrapper, FP16_Optimizer | FP16_UnfusedOptimizer):
        return
    wrapper.optimizer.state.clear()
    for group in wrapper.optimizer.param_groups:
        group.pop("step", None)  # where FusedAdam counts
    with torch.no_grad():
        if isinstance(wrapper, FP16_Optimizer):
            for flat, weights in zip(wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True):
                flat.copy_(torch.cat([w.flatten() for w in weights]))
        else:
            for masters, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
                for master, weight in zip(masters, weights, strict=True):
                    master.copy_(weight)


def mend_flops_profiler() -> None:
    """Let it count attention: it expects q, k and v by position, diffusers gives them by name (deepspeed 0.19.8)."""
    counted = profiler._attn_flops_compute
    profiler._attn_flops_compute = lambda query, key, value, *args, **more: counted(query, key, value, *args, **more)
