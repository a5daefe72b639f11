"""Workarounds for faults of DeepSpeed's engines (0.19.8)."""

import inspect
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder import PinMemoryBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.profiling.flops_profiler import profiler
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from wandistiller.distributed.device import on_accelerator
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.optimizer_state import is_plain
from wandistiller.engine.start_time import leave_out_muon, read_cpu_info_in_this_process
from wandistiller.utils.extension_locks import sole_builder

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""Environment variable with those that CUDA code is compiled for."""

read_cpu_info_in_this_process()
leave_out_muon()


def without_empty_buckets(engine: EngineConfig, numel: int) -> EngineConfig:
    """Let the buckets of gradients be no larger than all gradients: DeepSpeed (0.19.8) allocates them whole.

    By default 191 MiB in float32 on a GPU, however small the student.

    Args:
        numel: trained parameters.
    """
    if engine.stage == 0 or numel >= engine.zero.reduce_bucket_size:
        return engine
    zero = engine.section("zero_optimization") | {"reduce_bucket_size": numel}
    return engine.replaced(zero_optimization=zero)


def numbers_alone(architectures: str) -> str:
    """Leave out what torch knows and DeepSpeed fails to read: letters, as in 9.0a, which some containers set.

    Of names, such as Hopper, nothing is left: DeepSpeed then asks the GPUs.
    """
    numbers = re.sub(r"(\d)[a-z]", r"\1", architectures)
    return "" if re.search("[A-Za-z]", numbers.replace("PTX", "")) else numbers


def build_one_at_a_time() -> None:
    """Let every build of an extension by DeepSpeed (0.19.8) go through `sole_builder`."""
    load = OpBuilder.jit_load

    def jit_load(builder: OpBuilder, verbose: bool = True) -> Any:
        architectures = {ARCHITECTURES: numbers_alone(os.environ.get(ARCHITECTURES, ""))}
        with sole_builder(builder.name), patch.dict(os.environ, architectures):
            return load(builder, verbose)

    OpBuilder.jit_load = jit_load


build_one_at_a_time()


def keep_libraries_of_pin_memory_to_itself() -> None:
    """Let the extension `pin_memory` export none of the symbols of archives that the compiler links into it.

    DeepSpeed (0.19.8) loads it with RTLD_GLOBAL, for async_io. A compiler that links libstdc++ statically, as
    those of some containers do, thereby replaced streams of libraries that were loaded later: the first
    convolution of cuDNN ended in a segmentation fault.
    """
    PinMemoryBuilder.extra_ldflags = lambda _: ["-Wl,--exclude-libs,ALL"]


keep_libraries_of_pin_memory_to_itself()


def keep_autocast_to_its_engine() -> None:
    """Let `torch_autocast` in one engine's JSON leave the other engines of the process alone.

    DeepSpeed (0.19.8) keeps it in two global variables, so that every engine built after one in float16
    scaled its loss by 65,536 and unscaled only what its optimizer stepped with.
    tests/unit/engine/test_engines.py::test_autocast_of_one_engine_does_not_scale_the_gradients_of_another.
    """
    init = DeepSpeedEngine.__init__

    def start(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
        torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
        init(engine, *args, **kwargs)

    def comm_dtype(optimizer: Any, p: nn.Parameter) -> torch.dtype:
        dtype = torch_autocast.get_comm_dtype(p)
        return dtype if dtype in optimizer.ipg_buckets else optimizer.communication_data_type

    DeepSpeedEngine.__init__ = start
    ZeROOptimizer.get_param_comm_dtype = comm_dtype


keep_autocast_to_its_engine()


@contextmanager
def partition_before_moving(model: nn.Module, stage: int) -> Iterator[None]:
    """While an engine is built, let ZeRO-3 move each parameter as it cuts it, not the whole module before.

    The engine moves, and sends to all ranks, a module that `zero.Init` has not cut (deepspeed 0.19.8), which
    may be far larger than the GPU. The cut itself moves and sends what it cuts.
    """
    if stage < 3:
        yield
        return

    def stay(*_: Any) -> nn.Module:
        for p in model.parameters():
            p.ds_status = ZeroParamStatus.NOT_AVAILABLE  # so that it is not sent now
        return model

    model.to = stay
    yield
    del model.to


@contextmanager
def without_dummy_step() -> Iterator[None]:
    """While an engine is built, leave out the step with zero gradients that stage 0 takes in bf16 and fp16.

    `initialize_optimizer_states` of FP16_Optimizer and FP16_UnfusedOptimizer takes it to allocate Adam's
    moments (deepspeed 0.19.8): the weights decay once, and Adam's bias correction counts it, so that the
    first true step is 0.74 as long with beta 0.9, 0.99. ZeRO 1 to 3 take none. What an optimizer has
    allocated for the parameters that the wrapper replaced, as Adagrad does, is freed.
    tests/unit/engine/test_engines.py::test_every_stage_learns_as_plain_pytorch_in_bf16.
    """

    def clear(wrapper: Any) -> None:
        wrapper.optimizer.state.clear()

    name = "initialize_optimizer_states"
    with patch.object(FP16_Optimizer, name, clear), patch.object(FP16_UnfusedOptimizer, name, clear):
        yield


def skip_nonfinite_steps(engine: Any) -> None:
    """Make the engine skip a step whose gradients, or their norm, are not finite; see `was_step_applied`.

    DeepSpeed 0.19.8 does so from stage 1 on and at stage 0 in bf16 and fp16, but for two cases, fixed here: a
    plain optimizer, at stage 0 in float32, takes any gradients; stages 1 and 2 do where the JSON has
    `check_grad_overflow` or `compute_grad_norm` false. torch's own loss scaler, at stage 0 in autocast to
    float16, checks by itself.
    tests/integration/test_nonfinite.py::test_every_engine_skips_a_step_that_is_not_finite.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2):
        optimizer.check_grad_overflow |= not optimizer.compute_grad_norm or optimizer.dtype == torch.bfloat16
    if not is_plain(engine) or engine.torch_autocast_z0_gradscaler:
        return
    step, take = optimizer.step, engine._take_model_step

    def take_if_finite(lr_kwargs: dict[str, Any] | None) -> None:
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients)
        optimizer.overflow = not engine._global_grad_norm.isfinite()  # where the engine looks after the step
        optimizer.step = (lambda: None) if optimizer.overflow else step
        take(lr_kwargs)

    engine._take_model_step = take_if_finite


def leave_out_reduction_of_one_rank(engine: Any) -> None:
    """Leave a single rank's gradients as they are at stage 0.

    DeepSpeed 0.19.8 copies them into a bucket of up to 500M elements, reduces it over the one rank and copies
    it back: 16 % of a CPU's step of 4 images by a student of 40M (tests/bench/overhead.py --wider 4).
    """
    if engine.zero_optimization_stage() == 0 and engine.dp_world_size == 1:
        engine.enable_backward_allreduce = False


def uncount_skipped_step(engine: Any) -> None:
    """Undo the counting of the step that the engine has just skipped."""
    engine.global_steps -= 1
    engine.skipped_steps -= 1
    engine.global_samples -= engine.train_batch_size()


def has_dynamic_loss_scale(engine: Any) -> bool:
    """Return whether a lower loss scale may make the gradients finite, as in float16."""
    autocast = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16
    return autocast or (engine.fp16_enabled() and engine.dynamic_loss_scale())


def reset_adam_step_cache(optimizer: torch.optim.Optimizer) -> None:
    """Let Adam compute beta^t anew at every step, so that its numbers do not depend on where a run was cut.

    DeepSpeedCPUAdam, and FusedAdam on a CPU, multiply beta^t up step by step in C++ and do not checkpoint
    it, so that a resumed run would differ by one ulp (deepspeed 0.19.8). tests/integration/test_layouts.py.
    """
    group = optimizer.param_groups[0]
    if isinstance(optimizer, FusedAdam) and not on_accelerator():
        # an update of step 0, after which the next is no step up
        zeros = [[torch.zeros(1)] for _ in range(4)]
        optimizer.multi_tensor_adam(
            1, torch.zeros(1), zeros, 0.0, *group["betas"], 1.0, 0, optimizer.adam_w_mode, 1, 0.0
        )
    if isinstance(optimizer, DeepSpeedCPUAdam):
        settings = group["lr"], *group["betas"], group["eps"], group["weight_decay"], optimizer.adam_w_mode
        optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
        optimizer.ds_opt_adam.create_adam(optimizer.opt_id, *settings, False)


ADAM_PART = 2**24
"""Numbers that CPU Adam updates at once: some milliseconds. A multiple of its vectors, so no bit changes."""


class AdamInParts:
    """DeepSpeed's CPU Adam with pauses, in which other threads run Python.

    Its `adam_update` keeps Python's lock (deepspeed 0.19.8), in ZeRO 1 and 2 for all weights in one call, so
    that nobody could launch kernels meanwhile.
    tests/unit/engine/test_workarounds.py::test_adam_in_parts_changes_no_bit.
    """

    def __init__(self, adam: Any):
        self._adam = adam

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adam, name)

    def adam_update(self, *settings_and_tensors: Any) -> None:
        """Update the last four arguments: weights, gradients, and both moments."""
        *settings, weights, _, _, _ = settings_and_tensors
        tensors = [t.view(-1) for t in settings_and_tensors[-4:]]
        for start in range(0, weights.numel(), ADAM_PART):
            self._adam.adam_update(*settings, *(t[start : start + ADAM_PART] for t in tensors))


def share_adam_s_time(optimizer: torch.optim.Optimizer) -> None:
    """Let other threads run Python while this optimizer works, if it is DeepSpeed's CPU Adam."""
    if isinstance(optimizer, DeepSpeedCPUAdam):
        optimizer.ds_opt_adam = AdamInParts(optimizer.ds_opt_adam)


def destroy_engines(engines: Iterable[Any]) -> None:
    """Release engines, which must not be called afterwards.

    Hooks on gradients keep an engine with all that it holds (deepspeed 0.19.8).
    tests/integration/test_census.py::test_no_network_is_left_for_the_export.
    """
    for engine in engines:
        engine.destroy()
        release_module_references([engine.module])


def release_module_references(networks: Iterable[nn.Module]) -> None:
    """Drop DeepSpeed's last references to ZeRO-3 modules (0.19.8), which can then be freed but not used."""
    gone = set(map(id, networks))
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if id(module) not in gone]
    # another version of DeepSpeed keeps memory rather than lose a run's export
    with suppress(AttributeError, KeyError):
        cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(cached).nonlocals["func"].cache_clear()


def patch_flops_profiler() -> None:
    """Make it count attention: it takes q, k and v by position, diffusers passes names (deepspeed 0.19.8)."""
    count = profiler._attn_flops_compute
    profiler._attn_flops_compute = lambda query, key, value, *_, **__: count(query, key, value)
