"""Networks whose activations are measured, and the peak of the CPU's allocator; also called on ranks."""

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
from wandistiller.distributed.sequence import Ranks
from wandistiller.engine.activation_checkpointing import empties_inputs, read_recompute
from wandistiller.engine.ds_schema import without_block
from wandistiller.student.blocks import Blocks, add_projections
from wandistiller.wan import text_padding
from wandistiller.wan.context_parallel import share_sequences
from wandistiller.wan.transformer import renew_rope, velocity

SIZES = {"num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024}
SIDE, TEXT = 48, 64  # latent pixels, text tokens
TOKENS, LATENT = (SIDE // 2) ** 2, (16, 1, SIDE, SIDE)
MICRO = 2


def student_json(dtype: str, **block: Any) -> dict[str, Any]:
    ds: dict[str, Any] = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": 2}}
    ds |= {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}
    return ds | (
        {"activation_checkpointing": {"partition_activations": False}, "wandistiller": block} if block else {}
    )


def network(layers: int, ds: dict[str, Any], dtype: str, matched_width: int | None = None) -> tuple[Any, Any]:
    """A network of `layers` with gradients, and its blocks; all matched with a teacher of `matched_width`."""
    model = small_transformer(0, layers, **SIZES)
    if matched_width:
        add_projections(model, range(layers), matched_width)
    model = model.to(getattr(torch, dtype))
    renew_rope(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if "wandistiller" in ds:
        deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=without_block(ds))
    return model, Blocks(model, read_recompute(ds), copies=empties_inputs(ds))


def predict(model: torch.nn.Module, samples: int = MICRO) -> torch.Tensor:
    x_t_BCFHW, text_BLD = torch.randn(samples, *LATENT), torch.randn(samples, TEXT, 32)
    return velocity(model, state(x_t_BCFHW, torch.ones(samples), text_BLD))


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are allocated at once on the CPU while `run` runs."""
    run()  # what is allocated once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def config(layers: int) -> dict[str, Any]:
    return dict(small_transformer(0, 1, **SIZES).config) | {"num_layers": layers}


def shared_peaks(layers: int, ds: dict[str, Any], dtype: str) -> tuple[int, int]:
    """Return this rank's peak bytes while all ranks share a sample: of both passes, and of a call."""
    text_padding.TEXT_TOKENS = TEXT
    model, _ = network(layers, ds, dtype)
    share_sequences(model, Ranks.in_groups_of(collectives.world_size()))
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
