"""Activation memory, traced with fake tensors, which take no memory, through the network itself."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wandistiller.distributed.sequence_parallel import ImaginedRanks
from wandistiller.engine.engine_config import RECOMPUTED, CheckpointPolicy, EngineConfig, Kernels
from wandistiller.engine.zero_memory import Bytes
from wandistiller.network.config import NetworkConfig
from wandistiller.network.names import set_parameter
from wandistiller.utils.memoize import once_for_each

BLOCK, TIME = "block", "time"
Latent = tuple[int, int, int, int]
"""(C, F, H, W) of one sample, as in `Folder.latent_shape`."""


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
) -> Bytes:
    """Count the memory that autograd takes for a micro-step's backward pass, with its first recomputation.

    All weights are counted as trained. A checkpoint saves its inputs instead of its activations; those that
    all blocks share count once, unless checkpoints copy them.
    The peak is at the start of the backward pass: the first recomputation comes on top, if nothing was freed
    before; where blocks are recomputed, gradients of the time too, which is large if each patch has its own.
    With `cpu_checkpointing` an accelerator's checkpoints keep all inputs of each in CPU memory, also those
    that others have (deepspeed 0.19.8).

    Args:
        micro: samples of a micro-step.
        sharers: ranks that compute each sample together.
        recomputes: False for what is saved between forward and backward pass.
    """
    layers, policy = config.num_layers, engine.recompute
    saved = _for_samples(_saved, micro, config, engine, latent, accelerator, sharers)
    until_backward = saved["ends"] + layers * saved[BLOCK]
    if policy is None:
        return Bytes(transient=until_backward)
    names, number = config.parts[policy.checkpoint] or (BLOCK,), -(-layers // policy.checkpoint_every)
    kind = " inputs" if engine.empties_inputs else " own inputs"
    part, inputs = (sum(saved[f"{name}{of}"] for name in names) for of in ("", kind))
    until_backward -= number * (part - inputs)
    # attention is recomputed after the feed-forward of the last block was freed
    if recomputes and policy.checkpoint != "attention" and (layers - 1) % policy.checkpoint_every == 0:
        until_backward += part
    if recomputes and policy.checkpoint == "blocks":
        until_backward += 2 * saved[TIME]  # the sum, and what a block adds
    on_cpu = accelerator and engine.section(RECOMPUTED).get("cpu_checkpointing")
    away = number * sum(saved[f"{name} inputs"] for name in names) if on_cpu else 0
    return Bytes(transient=until_backward - away, host=away)


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
    shape = config.replaced(num_layers=1), engine.dtype, latent, config.text_tokens, accelerator, sharers
    of_two = trace(2, *shape)
    return {name: n + (samples - 1) * (of_two[name] - n) for name, n in trace(1, *shape).items()}


@once_for_each
def _saved(samples: int, config: NetworkConfig, dtype: torch.dtype, *shape: Any) -> dict[str, int]:
    """Trace the bytes that autograd saves in one block, in its parts and around it, and of their inputs."""
    with FakeTensorMode():
        model, call = _transformer(samples, config, lambda _: dtype, *shape)
        model.requires_grad_(True)
        weights = set(storages(list(model.parameters())))
        block = model.blocks[0]
        parts = [name for names in config.parts.values() for name in names]
        modules = {BLOCK: block} | {name: block.get_submodule(name) for name in parts}
        saved: dict[str, set[torch.UntypedStorage]] = {name: set() for name in ("all", *modules)}
        inside, inputs, shared = ["all"], {}, set()

        def enter(name: str, args: tuple) -> None:
            inside.append(name)
            if name == BLOCK:
                shared.update(storages(args[1:]))  # text, time, rope: for all blocks
                inputs[TIME] = args[2].nbytes
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            inputs[f"{name} inputs"] = sum(t.nbytes for t in tensors)
            not_shared = (t.nbytes for t in tensors if t.untyped_storage() not in shared)
            inputs[f"{name} own inputs"] = sum(not_shared)

        def pack(t: Tensor) -> Tensor:
            for name in inside:
                saved[name].add(t.untyped_storage())
            return t

        # as a later block's input, which is not part of a whole
        block.register_forward_pre_hook(lambda _, args: (args[0].clone(), *args[1:]))
        for name, module in modules.items():
            module.register_forward_pre_hook(lambda _, args, name=name: enter(name, args))
            module.register_forward_hook(lambda *_: inside.pop() and None)
        with saved_tensors_hooks(pack, lambda t: t):
            v_BCFHW = call()
        traced = {name: sum(s.nbytes() for s in saved[name] - weights - shared) for name in modules}
        traced["ends"] = sum(s.nbytes() for s in saved["all"] - weights) - traced[BLOCK]
        *_, sharers = shape
        traced["ends"] += (sharers - 1) * inputs[f"{BLOCK} own inputs"]  # the first block's is whole
        del v_BCFHW
    return traced | inputs


@once_for_each
def _peak(samples: int, config: NetworkConfig, dtype: torch.dtype, *shape: Any) -> dict[str, int]:
    """Trace the bytes of a forward pass of a network of one block, at the most and before the block.

    Others run one after the other.
    """
    with FakeTensorMode(), torch.no_grad():
        model, call = _transformer(samples, config, lambda name: config.dtype_of(name, dtype), *shape)
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
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Make the transformer and a call of it, without memory, to be used in the same FakeTensorMode."""
    model = config.meta()
    for name, p in list(model.named_parameters()):
        set_parameter(model, name, torch.empty(p.shape, dtype=dtype_of(name)))
    for module in model.modules():
        if accelerator and isinstance(module, nn.RMSNorm):
            module.forward = lambda x, weight=module.weight: _FusedNorm.apply(x, weight)
    state = config.blank_state(latent, samples, text_tokens)
    config.share_sequences(model, ImaginedRanks(sharers))
    config.use_kernels(model, Kernels())
    return model, lambda: config.velocity(model, state)


class _FusedNorm(torch.autograd.Function):
    """CUDA's RMS norm, one kernel that saves its input; the CPU's several kernels save their results too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)
