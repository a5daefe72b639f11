"""What DeepSpeed itself says of a JSON, before any weight is loaded, and what must be mended in its engines."""

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import cpuinfo
import torch
from deepspeed import DeepSpeedConfig
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.profiling.flops_profiler import profiler
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from pydantic import ValidationError
from torch import nn
from torch.utils.cpp_extension import CUDA_HOME

from wandistiller.deepspeed_json import dtype_name, on_nvme, stage
from wandistiller.deepspeed_keys import BATCH_KEYS
from wandistiller.monitors import MONITORS
from wandistiller.problems import problem

cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)  # a second each; deepspeed 0.19.8 asks three times while it starts CPU Adam

SECTION_OF = {"DeepSpeedZeroConfig": ("zero_optimization",), "DeepSpeedFP16Config": ("fp16",), "DeepSpeedBF16Config": ("bf16",)}
"""What DeepSpeed calls its checked sections -> where they stand."""
FUSED = {"adam": "fused_adam", "adamw": "fused_adam", "lamb": "fused_lamb", "lion": "fused_lion"}
"""Optimizers that it compiles for GPUs, and the names of what it makes of them."""


def config_problems(where: str, ds: dict[str, Any], *, here: bool = True) -> list[str]:
    """Wrong types and values in DeepSpeed's sections, found by its own reader, as messages; and what this machine lacks, if the
    run is to be `here`."""
    probe = {k: v for k, v in copy.deepcopy(ds).items() if k not in BATCH_KEYS} | {"train_micro_batch_size_per_gpu": 1}
    try:
        DeepSpeedConfig(probe)
    except ValidationError as error:
        section = SECTION_OF.get(error.title, ())
        return [problem(where, ".".join(map(str, (*section, *e["loc"]))), e["input"], f"{e['msg']}.") for e in error.errors()]
    except (DeepSpeedConfigError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return [f"{where}: DeepSpeed refuses it: {error}. Change or remove what it names."]
    if not here:
        return []
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
    if get_accelerator().device_name() == "cuda" and not CUDA_HOME:
        found += _toolkit_problems(where, ds, offload.get("device", "none") != "none")
    for key, (module, package) in MONITORS.items():
        if ds.get(key, {}).get("enabled") and not find_spec(module):
            found.append(problem(where, f"{key}.enabled", True, f"It needs: pip install {package}"))
    return found


@contextmanager
def moved_part_by_part(model: nn.Module, ds: dict[str, Any]) -> Iterator[None]:
    """While its engine is made, let ZeRO-3 take each parameter to the accelerator as it cuts it, not all of them whole before.

    The engine moves, and sends to all ranks, a module that `zero.Init` has not cut (deepspeed 0.19.8), which may be far larger
    than the GPU. The cut itself moves and sends what it cuts.
    """
    if stage(ds) < 3:
        yield
        return

    def stay(*_: Any) -> nn.Module:
        for p in model.parameters():
            p.ds_status = ZeroParamStatus.NOT_AVAILABLE  # so that it is not sent now
        return model

    model.to = stay
    yield
    del model.to


def _toolkit_problems(where: str, ds: dict[str, Any], offloaded: bool) -> list[str]:
    """What DeepSpeed compiles with nvcc on a machine with GPUs, where there is no nvcc (deepspeed 0.19.8)."""
    why = (f"On a machine with GPUs DeepSpeed compiles it with nvcc. Install the CUDA toolkit {torch.version.cuda}, the version "
           "of torch's, and set CUDA_HOME")  # fmt: skip
    found, kind = [], ds.get("optimizer", {}).get("type", "")
    plain = ds.get("optimizer", {}).get("params", {}).get("torch_adam", False)
    if kind.lower() in FUSED and not (offloaded or plain) and not installed_ops.get(FUSED[kind.lower()]):
        other = ", or write \"torch_adam\": true into `optimizer.params`" if "adam" in kind.lower() else ""
        found.append(problem(where, "optimizer.type", kind, f"{why}{other}, or offload the optimizer."))
    if (key := on_nvme(ds)) and not installed_ops.get("async_io"):
        found.append(problem(where, f"zero_optimization.{key}.device", "nvme", f"{why}, or write cpu."))
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


def skip_bad_gradients(engine: Any) -> None:
    """Let the engine skip a step whose gradients, or their norm, are not finite, and say so in `was_step_applied`.

    DeepSpeed 0.19.8 does so from stage 1 on and at stage 0 in bf16 and fp16, but for two cases, mended here: a plain
    optimizer, at stage 0 in float32, takes any gradients; stages 1 and 2 do where the JSON says `check_grad_overflow` or
    `compute_grad_norm` false. torch's own loss scaler, at stage 0 in autocast to float16, looks for itself.
    tests/test_nonfinite.py::test_every_engine_skips_a_step_that_is_not_finite.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2):
        optimizer.check_grad_overflow |= not optimizer.compute_grad_norm or optimizer.dtype == torch.bfloat16
    plain = engine.zero_optimization_stage() == 0 and not isinstance(optimizer, FP16_Optimizer | FP16_UnfusedOptimizer)
    if not plain or engine.torch_autocast_z0_gradscaler:
        return
    step, take = optimizer.step, engine._take_model_step

    def take_if_finite(lr_kwargs: dict[str, Any] | None) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients)
        optimizer.overflow = not engine._global_grad_norm.isfinite()  # where the engine looks after the step
        optimizer.step = (lambda: None) if optimizer.overflow else step
        take(lr_kwargs)

    engine._take_model_step = take_if_finite


def forget_step(engine: Any) -> None:
    """Count the step that the engine has just skipped as if it never was."""
    engine.global_steps -= 1
    engine.skipped_steps -= 1
    engine.global_samples -= engine.train_batch_size()


def scales_itself(engine: Any) -> bool:
    """Whether gradients that are not finite may be too large for float16 alone, so that a lower loss scale will do."""
    autocast = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16
    return autocast or (engine.fp16_enabled() and engine.dynamic_loss_scale())


def forget_powers(optimizer: torch.optim.Optimizer) -> None:
    """Let Adam compute beta^t anew at every step, so that its numbers do not depend on where a run was cut.

    DeepSpeedCPUAdam, and FusedAdam on a CPU, multiply beta^t up step by step in C++ and know nothing of it in a checkpoint, so a
    resumed run would differ by one ulp (deepspeed 0.19.8). tests/test_layouts.py, tests/test_stopping.py.
    """
    group = optimizer.param_groups[0]
    if isinstance(optimizer, FusedAdam) and get_accelerator().device_name() == "cpu":
        nothing = [[torch.zeros(1)] for _ in range(4)]  # an update of step 0, after which the next is no step up
        optimizer.multi_tensor_adam(1, torch.zeros(1), nothing, 0.0, *group["betas"], 1.0, 0, optimizer.adam_w_mode, 1, 0.0)
    if isinstance(optimizer, DeepSpeedCPUAdam):
        optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
        optimizer.ds_opt_adam.create_adam(
            optimizer.opt_id, group["lr"], *group["betas"], group["eps"], group["weight_decay"], optimizer.adam_w_mode, False
        )


def release(engines: Iterable[Any]) -> None:
    """Let go of engines, which must not be called any more.

    Hooks on gradients keep an engine with all that it holds (deepspeed 0.19.8).
    tests/test_census.py::test_no_network_is_left_for_the_export.
    """
    for engine in engines:
        engine.destroy()
        forget([engine.module])


def forget(networks: Iterable[nn.Module]) -> None:
    """Let go of networks, which must not be called any more: a list and a cache keep those that ZeRO-3 cut (deepspeed 0.19.8)."""
    gone = set(map(id, networks))
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if id(module) not in gone]
    with suppress(AttributeError, KeyError):  # another version of DeepSpeed keeps memory rather than lose a run's export
        cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(cached).nonlocals["func"].cache_clear()


def mend_flops_profiler() -> None:
    """Let it count attention: it expects q, k and v by position, diffusers gives them by name (deepspeed 0.19.8)."""
    counted = profiler._attn_flops_compute
    profiler._attn_flops_compute = lambda query, key, value, *args, **more: counted(query, key, value, *args, **more)
