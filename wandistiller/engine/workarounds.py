"""Workarounds for faults of DeepSpeed (0.19.8), for one engine each; `patches` are for the process."""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from wandistiller.distributed.device import kind, on_accelerator
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.optimizer_state import is_plain


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
    first true step is 0.74 as long with beta 0.9, 0.99. ZeRO 1 to 3 take none.
    tests/unit/engine/test_ds_config_engines.py::test_every_stage_learns_as_plain_pytorch_in_bf16.
    """
    with ExitStack() as stack:
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            stack.enter_context(patch.object(wrapper, "initialize_optimizer_states", lambda _: None))
        yield


def skip_nonfinite_steps(engine: Any) -> None:
    """Make the engine skip a step whose gradients, or their norm, are not finite; see `was_step_applied`.

    DeepSpeed 0.19.8 does so from stage 1 on and at stage 0 in bf16 and fp16, but for two cases, fixed here: a
    plain optimizer, at stage 0 in float32, takes any gradients; stages 1 and 2 do where the JSON has
    `check_grad_overflow` or `compute_grad_norm` false. At the least loss scale it raises an exception of no
    class.
    tests/integration/test_nonfinite.py::test_every_engine_skips_a_step_that_is_not_finite.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2):
        optimizer.check_grad_overflow |= not optimizer.compute_grad_norm or optimizer.dtype == torch.bfloat16
    if engine.zero_optimization_stage() > 0 and engine.fp16_enabled() and engine.dynamic_loss_scale():
        optimizer.loss_scaler.raise_error_at_min_scale = False
    if not is_plain(engine):
        return
    step, take = optimizer.step, engine._take_model_step

    def take_if_finite(lr_kwargs: dict[str, Any] | None) -> None:
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients)
        optimizer.overflow = not engine._global_grad_norm.isfinite()  # where the engine looks after the step
        optimizer.step = (lambda: None) if optimizer.overflow else step
        take(lr_kwargs)

    engine._take_model_step = take_if_finite


def wait_seldom(engine: Any) -> None:
    """Let an update of stage 1 or 2 wait for an accelerator a few times, where the optimizer is offloaded.

    DeepSpeed 0.19.8 waits for each gradient to hear if it is finite, and for each one's norm. Here norms come
    to the host together, which sums them in DeepSpeed's order. `skip_nonfinite_steps` makes it reject a norm
    that is not finite, as that of a gradient which is not.
    Where micro-steps add gradients, it waits for each one's last copy too, as pageable memory would be read
    at once. Of page-locked memory the stream waits instead.
    tests/simulated/test_students.py::test_an_update_with_an_offloaded_optimizer_waits_8_times_at_most.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() not in (1, 2) or not optimizer.cpu_offload:
        return
    norm, accumulate = optimizer.scaled_global_norm, optimizer.async_accumulate_grad_in_cpu_via_gpu

    def scaled_global_norm(norm_type: int = 2) -> torch.Tensor:
        if norms := optimizer.norm_for_param_grads:
            on_host = torch.stack([*norms.values()]).cpu()
            optimizer.norm_for_param_grads = dict(zip(norms, on_host, strict=True))
        return norm(norm_type)

    def accumulate_in_stream(p: nn.Parameter) -> None:
        stream = torch.get_device_module(p.device).current_stream()
        for event in optimizer._pending_offload_events.values():
            stream.wait_event(event)
        optimizer._pending_offload_events.clear()  # the stream's next event comes after these
        accumulate(p)

    optimizer.update_offload_overflow_tracker = lambda _: None
    optimizer.scaled_global_norm = scaled_global_norm
    if optimizer.cpu_offload_pin_memory:
        optimizer.async_accumulate_grad_in_cpu_via_gpu = accumulate_in_stream


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


def may_lower_loss_scale(engine: Any) -> bool:
    """Return whether the next step may lower the loss scale, or waits to do so: float16, above its least."""
    if not (engine.fp16_enabled() and engine.dynamic_loss_scale()):
        return False
    scaler = engine.optimizer.loss_scaler
    return scaler.cur_scale > scaler.min_scale or scaler.cur_hysteresis > 1


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


AHEAD = 1
"""Blocks that the device may have yet to finish when the host fetches the weights of the next."""


class FetchPace:
    """Lets the host wait before a block until the device has finished the block before the last.

    Fetched weights are allocated on a side stream and freed with `record_stream`, so their memory comes back
    once the device has used them, while DeepSpeed (0.19.8) counts them as free once the host has passed.
    A host that is faster than the device would fetch as many blocks as there are launches in CUDA's queue:
    15 of a 14B, 10 GB (DeepSpeed issues 7217 and 7670). Backward passes are bounded where blocks are
    recomputed in them.
    """

    def __init__(self, blocks: Iterable[nn.Module], event: Callable[[], torch.Event]):
        """Hook `blocks`, before the hooks that fetch their weights."""
        self._event, self._ends = event, deque[torch.Event]()
        for block in blocks:
            block.register_forward_pre_hook(self._wait, prepend=True)
            block.register_forward_hook(self._mark)

    def _wait(self, *_: Any) -> None:
        while len(self._ends) > AHEAD:
            self._ends.popleft().synchronize()

    def _mark(self, *_: Any) -> None:
        end = self._event()
        end.record()
        self._ends.append(end)


def fetching_blocks(engine: EngineConfig, block_class: str) -> EngineConfig:
    """Return the JSON with the weights of a block fetched at once under ZeRO-3, in half the time of the host.

    On NVMe it would need a buffer for each matrix of a block, the largest's size. And only for a network
    that is not trained: before a backward pass DeepSpeed (0.19.8) releases the frozen
    weights of a block whose inputs need no gradient, and it reduces a block's gradients twice where they
    come from two outputs.
    """
    if engine.stage < 3 or engine.weights_on == "nvme":
        return engine
    blocks = {"leaf_module": {"classes": [block_class]}}
    return engine.replaced(zero_optimization=blocks | engine.section("zero_optimization"))


def pace_fetches(modules: Iterable[nn.Module]) -> None:
    """Bound the memory of the fetched weights of a ZeRO-3 model in its engine, if it computes on a GPU.

    Args:
        modules: the model's, in the order of their calls; each fetches weights.
    """
    if on_accelerator():
        FetchPace(modules, torch.get_device_module(kind()).Event)


def destroy_engines(engines: Iterable[Any]) -> None:
    """Release engines, which must not be called afterwards.

    Hooks on gradients keep an engine with all that it holds (deepspeed 0.19.8).
    tests/unit/engine/test_workarounds.py::test_an_engine_that_was_destroyed_leaves_no_network.
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
