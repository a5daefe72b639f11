"""Floating-point operations of a traced block against sums by hand and torch's count of the whole network."""

from typing import Any

import pytest
import torch
from networks import network_of
from published_wan import LARGE
from small_wan import small_transformer
from states import state
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wandistiller.engine.engine_config import CheckpointPolicy
from wandistiller.network.flops import count_flops
from wandistiller.network.network import Trained
from wandistiller.wan.text_padding import TEXT_TOKENS
from wandistiller.wan.transformer import velocity
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
    assert count_flops(TransformerConfig.usual(**LARGE), (16, 1, 60, 104)).forward == layers * block + ends


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all", "adapters"])
def test_a_backward_pass_has_the_operations_that_torch_counts(lora: dict[str, Any] | None) -> None:
    """But for texts and the ends of the network, whose states need no gradient: a tenth of all."""
    latent = (16, 5, 32, 32)
    model = small_transformer(0, 4, **SIZES).requires_grad_(True)
    c = TransformerConfig.of(model.config)
    network_of(model).prepare(Trained(lora=lora))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = trained / sum(p.numel() for p in model.parameters())
    x_t_BCFHW, text_BLD = torch.randn(1, *latent), torch.randn(1, TEXT_TOKENS, c.text_dim)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        velocity(model, state(x_t_BCFHW, torch.tensor([0.5]), text_BLD)).sum().backward()
    flops = count_flops(c, latent)
    assert flops.forward + flops.backward(share) == pytest.approx(counter.get_total_flops(), rel=0.1)


@pytest.mark.parametrize(
    ("policy", "share"),
    [
        (None, 0),
        (CheckpointPolicy(), 1),
        (CheckpointPolicy(checkpoint_every=2), 1 / 2),
        (CheckpointPolicy(checkpoint_but_last=3), 1 / 4),
        (CheckpointPolicy(checkpoint_but_last=9), 0),
    ],
)
def test_a_backward_pass_computes_checkpointed_blocks_again(
    policy: CheckpointPolicy | None, share: float
) -> None:
    c = TransformerConfig.of(small_transformer(0, 4, **SIZES).config)
    assert count_flops(c, LATENT).recomputed(policy, 4) == share


def test_a_feed_forward_part_is_its_share_of_the_block() -> None:
    c = TransformerConfig.of(small_transformer(0, 4, **SIZES).config)
    d, f, tokens = 256, 1024, 8 * 12
    block = (count_flops(c, LATENT).forward - count_flops(c.replaced(num_layers=1), LATENT).forward) / 3
    share = count_flops(c, LATENT).recomputed(CheckpointPolicy(checkpoint="feed_forward"), 4)
    assert share == pytest.approx(2 * 2 * tokens * d * f / block)
