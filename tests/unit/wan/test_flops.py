"""Floating-point operations of a traced block against sums by hand and torch's count of the whole network."""

from typing import Any

import pytest
import torch
from published_wan import LARGE
from small_wan import small_transformer
from states import state
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wandistiller.engine.activation_checkpointing import CheckpointPolicy
from wandistiller.planner.student_network import student_model
from wandistiller.student.trainable import set_trainable
from wandistiller.wan.flops import forward_flops, step_flops
from wandistiller.wan.text_padding import TEXT_TOKENS
from wandistiller.wan.transformer import usual_config, velocity
from wandistiller.wan.transformer_config import TransformerConfig

LATENT = (16, 1, 16, 24)
SIZES = {"num_attention_heads": 8, "attention_head_dim": 32, "ffn_dim": 1024}


def test_a_forward_pass_of_14b_is_the_sum_of_its_matrices_and_attention() -> None:
    """Wan 14B, one frame of 480 x 832: 1560 tokens, 512 of text; two operations for each of m x n x k."""
    d, f, layers, t, text = 5120, 13824, 40, 1560, 512
    self_attention = 2 * 4 * t * d * d + 4 * t * t * d
    cross_attention = 2 * 2 * t * d * d + 2 * 2 * text * d * d + 4 * t * text * d
    ends = 2 * t * d * 4 * (16 + 16) + 2 * text * d * (4096 + d) + 2 * d * (256 + d + 6 * d)
    block = self_attention + cross_attention + 2 * 2 * t * d * f
    assert forward_flops(usual_config(**LARGE), (16, 1, 60, 104)) == layers * block + ends


TUNED = {
    "all": (None, None),
    "adapters": (None, {"rank": 4}),
    "late adapters": (None, {"rank": 4, "targets": ["blocks.2-3"]}),
    "late blocks": (["blocks.0-1", "patch_embedding", "condition_embedder"], None),
}


@pytest.mark.parametrize(("frozen", "lora"), TUNED.values(), ids=TUNED)
def test_flops_of_a_step_are_torch_s_count_of_all_blocks(
    frozen: list[str] | None, lora: dict[str, Any] | None
) -> None:
    model = small_transformer(0, 4, **SIZES).requires_grad_(True)
    c = TransformerConfig.of(model.config)
    set_trainable(model, frozen, lora, seed=0)
    x_t_BCFHW, text_BLD = torch.randn(1, *LATENT), torch.randn(1, TEXT_TOKENS, c.text_dim)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        velocity(model, state(x_t_BCFHW, torch.tensor([0.5]), text_BLD)).sum().backward()
    traced = step_flops(student_model(c, frozen, lora, (), 256), c, LATENT, None)
    assert traced == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize(
    ("frozen", "recomputed"), [(None, 4), (["blocks.0-1", "patch_embedding", "condition_embedder"], 2)]
)
def test_a_block_is_recomputed_where_gradients_go_through_it(
    frozen: list[str] | None, recomputed: int
) -> None:
    c = TransformerConfig.of(small_transformer(0, 4, **SIZES).config)
    model = student_model(c, frozen, None, (), 256)
    block = (forward_flops(c, LATENT) - forward_flops(c.replaced(num_layers=1), LATENT)) / 3
    with_recomputation, without = (step_flops(model, c, LATENT, p) for p in (CheckpointPolicy(), None))
    assert with_recomputation - without == recomputed * block


def test_a_traced_network_keeps_its_blocks() -> None:
    c = TransformerConfig.of(small_transformer(0, 4, **SIZES).config)
    model = student_model(c, None, None, (), 256)
    names = [name for name, _ in model.named_parameters()]
    step_flops(model, c, LATENT, None)
    assert [name for name, _ in model.named_parameters()] == names
