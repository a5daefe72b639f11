"""Networks whose activations are measured, and the peak of the CPU's allocator; also called on ranks."""

import gc
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import deepspeed
import torch
from small_wan import small_transformer
from states import state
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import Ranks
from wandistiller.engine.engine_config import EngineConfig, Kernels
from wandistiller.network.adapters import Lora, add_lora
from wandistiller.network.blocks import Blocks
from wandistiller.network.heads import add_projections
from wandistiller.wan import text_padding
from wandistiller.wan.kernels import share_sequences, use_kernels
from wandistiller.wan.structure import PARTS
from wandistiller.wan.transformer import renew_rope, velocity
from wandistiller.wan.transformer_config import TransformerConfig

SIZES = {"num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024}
SIDE, TEXT = 48, 64  # latent pixels, text tokens
TOKENS, LATENT = (SIDE // 2) ** 2, (16, 1, SIDE, SIDE)
MICRO = 2


def student_engine(dtype: str, **block: Any) -> EngineConfig:
    ds = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": 2}}
    engine = EngineConfig("student", ds).in_precision(dtype)
    section = {"partition_activations": False}
    return engine.replaced(activation_checkpointing=section, wandistiller=block) if block else engine


def network(
    layers: int,
    engine: EngineConfig,
    matched_width: int | None = None,
    lora: dict[str, Any] | None = None,
    **more: int,
) -> tuple[Any, Any]:
    """A network of `layers` with gradients, and its blocks; all matched with a teacher of `matched_width`."""
    model = small_transformer(0, layers, **SIZES, **more)
    if matched_width:
        add_projections(model, range(layers), matched_width)
    if lora:
        add_lora(model, Lora(**lora), seed=0)
    model = model.to(engine.dtype)
    renew_rope(model)
    use_kernels(model, Kernels())
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    if engine.recompute:
        deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=engine.for_deepspeed)
    return model, Blocks(model, PARTS, engine.recompute, copies=engine.empties_inputs)


def predict(model: torch.nn.Module, samples: int = MICRO) -> torch.Tensor:
    x_t_BCFHW, text_BLD = torch.randn(samples, *LATENT), torch.randn(samples, TEXT, 32)
    return velocity(model, state(x_t_BCFHW, torch.ones(samples), text_BLD))


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are allocated at once on the CPU while `run` runs."""
    run()  # what is allocated once
    gc.collect()  # or what other tests left may be freed in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def config(layers: int, **more: int) -> TransformerConfig:
    return TransformerConfig.of(small_transformer(0, 1, **SIZES, **more).config).replaced(num_layers=layers)


def shared_peaks(layers: int, engine: EngineConfig) -> tuple[int, int]:
    """Return this rank's peak bytes while all ranks share a sample: of both passes, and of a call."""
    text_padding.TEXT_TOKENS = TEXT
    model, _ = network(layers, engine)
    share_sequences(model, Ranks.in_groups_of(collectives.world_size()))
    use_kernels(model, Kernels())
    with PausedExchanges():
        passes = peak_bytes(lambda: predict(model, 1).square().mean().backward())
        with torch.no_grad():
            return passes, peak_bytes(lambda: predict(model, 1))


class PausedExchanges(TorchDispatchMode):
    """Wait after each exchange: gloo's threads free what they sent only when a core is free for them."""

    def __torch_dispatch__(
        self, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(0.01)
        return result
