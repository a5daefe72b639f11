"""Activation memory, traced on the meta device, which takes none, through the network itself."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from wandistiller.distributed.sequence_parallel import ImaginedRanks
from wandistiller.engine.engine_config import RECOMPUTED, CheckpointPolicy, EngineConfig, Kernels
from wandistiller.engine.zero_memory import Bytes
from wandistiller.network.adapters import Lora, add_lora, is_adapter
from wandistiller.network.config import NetworkConfig
from wandistiller.network.names import set_parameter
from wandistiller.utils.memoize import once_for_each

Latent = tuple[int, int, int, int]
"""(C, F, H, W) of one sample, as in `Folder.latent_shape`."""
META = torch.device("meta")


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors made inside, each storage once and as long as it is alive.

    Args:
        cudnn: count what cuDNN takes for a convolution, too: input, weights and output in its layout, NHWC
            (H100, torch 2.11: tests/gpu/measure.py coders).
    """

    def __init__(self, *, cudnn: bool = False) -> None:
        super().__init__()
        self._cudnn = cudnn
        self.now = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known.update(storages((args, kwargs)))  # weights, of which a view may come out
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage not in self._known:
                self._known.add(storage)
                weakref.finalize(storage, self._add, -storage.nbytes())
                self._add(storage.nbytes())
        if self._cudnn and func is torch.ops.aten.convolution.default:
            self.most = max(self.most, self.now + sum(t.nbytes for t in (*args[:2], out)))
        return out

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


class FusedAttention(TorchFunctionMode):
    """The CPU's kernel of attention, on the meta device too, which has none."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        states, mask = (*args, *map(kwargs.get, ("query", "key", "value"))), kwargs.get("attn_mask")
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states[:3], attn_mask=mask)[0]


def storages(tensors: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, Tensor)]


def activation_bytes(
    config: NetworkConfig,
    engine: EngineConfig,
    latent: Latent,
    micro: int,
    *,
    accelerator: bool,
    sharers: int = 1,
    recomputes: bool = True,
    lora: dict[str, Any] | None = None,
) -> Bytes:
    """Count the memory that a micro-step takes beside weights and gradients, at its peak.

    All weights are counted as trained, or all adapters. The peak is in the backward pass of the last block;
    those before it have the inputs of their checkpoints, or all that they saved.
    With `cpu_checkpointing` an accelerator's checkpoints keep all inputs of each in CPU memory, also those
    that others have (deepspeed 0.19.8).

    Args:
        micro: samples of a micro-step.
        sharers: ranks that compute each sample together.
        recomputes: False for what is there between forward and backward pass.
        lora: settings of adapters, which alone learn then.
    """
    policy, shape = engine.recompute, (config, engine, latent, accelerator, sharers)
    layers, part = config.num_layers, policy.checkpoint if policy else ""
    again = policy.recomputed(layers) if policy else range(layers)
    traced = _for_samples(partial(_passes, part, engine.empties_inputs, lora), micro, *shape)
    number = len(again)
    nbytes = traced["peak" if recomputes else "held"] + (number - 2) * traced["block"]
    if number < layers:
        gone = recomputes and layers - 1 not in again  # the last block, of those kept whole
        one = traced if part == "blocks" else _for_samples(partial(_passes, "", False, lora), micro, *shape)
        nbytes += (layers - number - gone) * one["whole"]
    on_cpu = accelerator and engine.section(RECOMPUTED).get("cpu_checkpointing")
    host = number * traced["inputs"] if on_cpu else 0
    away = (number - recomputes) * traced["inputs"] if on_cpu else 0  # those of one block come back
    return Bytes(transient=nbytes - away, host=host)


def call_bytes(
    config: NetworkConfig,
    engine: EngineConfig,
    latent: Latent,
    samples: int,
    *,
    accelerator: bool,
    sharers: int = 1,
) -> tuple[int, int]:
    """Count the bytes of a forward pass without gradients, weights left out: at its peak, between two blocks.

    On a CPU without bf16 arithmetic oneDNN takes up to a third more (torch 2.13); it is not counted.

    Args:
        samples: samples in one call; with guidance each counts twice.
        sharers: ranks that compute each sample together.
    """
    traced = _for_samples(_peak, samples, config, engine, latent, accelerator, sharers)
    return traced["peak"], traced["waiting"]


def compared_bytes(
    blocks: int,
    tokens: tuple[int, int],
    teacher: int,
    student: int,
    widths: tuple[int, int],
    items: tuple[int, int],
    engine: EngineConfig,
) -> int:
    """Count the bytes of hidden states of `blocks` that are compared and stay until the backward pass.

    The teacher's, the student's in the teacher's width, inputs of projections if the widths differ, unless
    checkpoints keep these, and the differences in float32.

    Args:
        tokens: tokens of one sample that a rank has the teacher's and the student's hidden states of.
        teacher: samples of the teacher's forward pass.
        student: samples of the student's, those of other terms included.
        items: bytes of one element of each.
    """
    (teacher_width, width), (teacher_item, item), (of_teacher, of_student) = widths, items, tokens
    # those of checkpoints are the inputs of the next block
    are_kept = engine.recompute == CheckpointPolicy() and not engine.empties_inputs
    projected = 0 if width == teacher_width or are_kept else width * item
    compared = teacher * teacher_width * 4 + student * (teacher_width * item + projected)
    return blocks * (of_teacher * teacher * teacher_width * teacher_item + of_student * compared)


def _for_samples(
    trace: Callable[..., dict[str, int]],
    samples: int,
    config: NetworkConfig,
    engine: EngineConfig,
    latent: Latent,
    accelerator: bool,
    sharers: int,
) -> dict[str, int]:
    """Extrapolate the bytes of `samples` samples, which grow linearly, from traces of one and of two."""
    of_any_depth = config.replaced(num_layers=2)  # networks that differ in it have one trace
    shape = of_any_depth, engine.dtype, latent, config.text_tokens, accelerator, sharers
    if samples <= 2:
        return trace(samples, *shape)
    of_one, of_two = (trace(n, *shape) for n in (1, 2))
    return {name: n + (samples - 1) * (of_two[name] - n) for name, n in of_one.items()}


@once_for_each
def _passes(
    part: str,
    copies: bool,
    lora: dict[str, Any] | None,
    samples: int,
    config: NetworkConfig,
    dtype: torch.dtype,
    *shape: Any,
) -> dict[str, int]:
    """Trace the bytes of both passes of a network of two blocks, and those that a block adds.

    Args:
        part: recomputed, as in `CheckpointPolicy`; empty: nothing.
        copies: checkpoints keep copies of their inputs.

    Returns:
        peak: the most until the backward pass has left the blocks.
        held: between both passes.
        block: what the forward pass of a block leaves.
        whole: the same of a block that is not recomputed, but not if parts of it are.
        inputs: those of a block's checkpoints.
    """
    peak, entered, inputs, whole = [], [], [], []
    names = (config.parts[part] or ("",)) if part else ()  # the block itself has no name
    with META, FusedAttention():
        model, call = _transformer(samples, config, lambda _: dtype, *shape, lora)
        for name, p in model.named_parameters():
            if p.requires_grad_(not lora or is_adapter(name)).requires_grad:
                p.grad = torch.empty_like(p)
        with Live() as live:

            def enter(_: nn.Module, args: tuple) -> tuple:
                entered.append(live.now)
                if len(entered) == 1:
                    if not args[0].requires_grad:  # all before is frozen
                        args = (args[0] + args[0].new_zeros((), requires_grad=True), *args[1:])
                    args[0].register_hook(lambda _: peak.append(live.most))
                return args

            def measured(run: Callable[..., Tensor], *args: Any) -> Tensor:
                with FusedAttention():  # backward passes suspend it
                    before, h_BSD = live.now, run(*args)
                whole.append(live.now - before)
                return h_BSD

            def recomputed(run: Callable[..., Tensor], *args: Any) -> Tensor:
                args = tree_map(lambda t: t.clone() if copies and isinstance(t, Tensor) else t, args)
                inputs.append(sum(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor)))
                return checkpoint(measured, run, *args, use_reentrant=True, preserve_rng_state=False)

            for block in model.blocks:
                block.register_forward_pre_hook(enter)
                for module in [block.get_submodule(name) for name in names]:
                    module.forward = partial(recomputed, module.forward)
            v_BCFHW = call()
            held = live.now
            v_BCFHW.backward(torch.empty_like(v_BCFHW))
    block = entered[1] - entered[0]
    of_block = {"block": block, "whole": (whole or [block])[-1], "inputs": sum(inputs) // 2}
    return {"peak": peak[0], "held": held} | of_block


@once_for_each
def _peak(samples: int, config: NetworkConfig, dtype: torch.dtype, *shape: Any) -> dict[str, int]:
    """Trace the bytes of a forward pass of a network of one block, at the most and before the block.

    Others run one after the other.
    """
    with META, FusedAttention(), torch.no_grad():
        of_one = config.replaced(num_layers=1)
        model, call = _transformer(samples, of_one, lambda name: config.dtype_of(name, dtype), *shape)
        waiting: list[int] = []
        with Live() as live:
            model.blocks[0].register_forward_pre_hook(lambda *_: waiting.append(live.now))
            call()
    return {"peak": live.most, "waiting": waiting[0]}


def _transformer(
    samples: int,
    config: NetworkConfig,
    dtype_of: Callable[[str], torch.dtype],
    latent: Latent,
    text_tokens: int,
    accelerator: bool,
    sharers: int,
    lora: dict[str, Any] | None = None,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Make the transformer and a call of it, for tensors of the meta device."""
    model = config.meta(META)
    if lora:
        add_lora(model, Lora(**lora), seed=0)
    for name, p in list(model.named_parameters()):
        set_parameter(model, name, torch.empty(p.shape, dtype=dtype_of(name)))
    for module in model.modules():
        if accelerator and isinstance(module, nn.RMSNorm):
            module.forward = lambda x, weight=module.weight: _FusedNorm.apply(x, weight)
    state = config.blank_state(latent, samples, text_tokens, META)
    config.share_sequences(model, ImaginedRanks(sharers))
    config.use_kernels(model, Kernels())
    return model, lambda: config.velocity(model, state)


class _FusedNorm(torch.autograd.Function):
    """CUDA's RMS norm, one kernel that saves its input; the CPU's several kernels save their results too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))
