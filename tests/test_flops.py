"""Floating-point operations against those that torch counts."""

from typing import Any

import pytest
import torch
from small_wan import transformer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wandistiller.flops import flops
from wandistiller.planner import _network
from wandistiller.recompute import Recompute
from wandistiller.tuning import tune
from wandistiller.wan import TEXT_TOKENS


def batch(frames: int, height: int, width: int, channels: int, text: int) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.randn(1, channels, frames, height, width), "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, text)}  # fmt: skip


@pytest.mark.parametrize("frames", [1, 3])
def test_a_forward_pass_takes_what_torch_counts(frames: int) -> None:
    model = transformer(0, 2, attention_head_dim=32, ffn_dim=96)
    c = model.config
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch(frames, 8, 12, c.in_channels, c.text_dim))
    assert flops(dict(c), frames * 4 * 6).forward == counter.get_total_flops()


TUNED = {"all": (None, None), "adapters": (None, {"rank": 4}), "late adapters": (None, {"rank": 4, "targets": ["blocks.2-3"]}),
         "late blocks": (["blocks.0-1", "patch_embedding", "condition_embedder"], None)}  # fmt: skip


@pytest.mark.parametrize(("frozen", "lora"), TUNED.values(), ids=TUNED)
def test_a_step_takes_what_torch_counts_but_for_inputs_without_gradient_and_attention_s_own_recomputation(
    frozen: list[str] | None, lora: dict[str, Any] | None
) -> None:
    """With 8 heads of 32, so that all but the matrices' products of weights is small."""
    model = transformer(0, 4, num_attention_heads=8, attention_head_dim=32, ffn_dim=1024).requires_grad_(True)
    c, tokens = dict(model.config), 8 * 12
    network = _network(c, frozen, lora, (), 256)
    tune(model, frozen, lora, seed=0)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**batch(1, 16, 24, c["in_channels"], c["text_dim"]))[0].sum().backward()
    assert flops(c, tokens).step(None, network) == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize(("frozen", "again"), [(None, 4), (["blocks.0-1", "patch_embedding", "condition_embedder"], 2)])
def test_a_block_is_computed_again_where_gradients_go_through_it(frozen: list[str] | None, again: int) -> None:
    c = dict(transformer(0, 4).config)
    f, network = flops(c, 24), _network(c, frozen, None, (), 64)
    assert f.step(Recompute(), network) - f.step(None, network) == again * (f.attention + f.feed_forward)


def test_a_14b_takes_two_operations_a_parameter_and_token_and_more_for_attention() -> None:
    """Wan 14B, one frame of 480 x 832: 1560 tokens."""
    from published_wan import LARGE

    d, f, layers, t = 5120, 13824, 40, 1560
    per_token = layers * (2 * (4 + 2) * d * d + 4 * d * f)
    attention = layers * 4 * t * d * (t + 512)
    text = layers * 4 * 512 * d * d
    ends = flops(LARGE, t).ends
    assert flops(LARGE, t).forward == t * per_token + attention + text + ends
    assert 0.9 < flops(LARGE, t).forward / (2 * t * 14.29e9) < 1.05
