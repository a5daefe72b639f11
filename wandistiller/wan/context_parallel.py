"""A Wan transformer whose sequences several ranks share: each computes a part of the tokens.

diffusers' own `enable_parallelism` (0.42.1) is for inference: its backward pass computes attention once more,
and the gradient of its gathered outputs lacks the factor that averaging over the ranks takes away.
"""

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from wandistiller.distributed.sequence_parallel import SHARING, Ranks, Sharing

Rope = tuple[Tensor, Tensor]
"""cos_1S1D and sin_1S1D."""


def share_sequences(model: WanTransformer3DModel, ranks: Ranks) -> WanTransformer3DModel:
    """Let `model` take whole inputs and give whole outputs, but compute this rank's tokens alone. Collective.

    Hidden states between its blocks are then those of this rank's tokens.
    """
    if ranks.degree == 1:
        return model
    now = Sharing(ranks)

    def own_timesteps(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take this rank's part of the timestep of each patch, which the pipeline of Wan2.2 5B gives."""
        timestep = kwargs.get("timestep")
        if timestep is not None and timestep.ndim == 2:
            kwargs = kwargs | {"timestep": now.ranks.part(timestep)}
        return args, kwargs

    model.register_forward_pre_hook(own_timesteps, with_kwargs=True)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: (now.ranks.part(inputs[0]), *inputs[1:]))
    model.proj_out.register_forward_hook(lambda *args: now.ranks.whole(args[-1]))
    for block in model.blocks:
        block.attn1.set_processor(SharedAttention(now))
    setattr(model, SHARING, now)
    return model


class SharedAttention(WanAttnProcessor):
    """diffusers' self-attention, for this rank's share of the heads over all tokens."""

    def __init__(self, now: Sharing):
        super().__init__()
        self._now = now

    def __call__(
        self, attn: WanAttention, x_BSD: Tensor, text: None, mask: None, rope: Rope, **kwargs: Any
    ) -> Tensor:
        """Attend among the patches of all ranks of the sequence."""
        ranks = self._now.ranks
        if ranks.degree == 1:
            return super().__call__(attn, x_BSD, text, mask, rope, **kwargs)
        own = [ranks.part(table_1S1D) for table_1S1D in rope]
        heads = (attn.heads, -1)
        query_BSHD = _rotated(attn.norm_q(attn.to_q(x_BSD)).unflatten(2, heads), *own)
        key_BSHD = _rotated(attn.norm_k(attn.to_k(x_BSD)).unflatten(2, heads), *own)
        value_BSHD = attn.to_v(x_BSD).unflatten(2, heads)
        of_all = ranks.to_heads(torch.cat([query_BSHD, key_BSHD, value_BSHD], dim=-1)).chunk(3, dim=-1)
        out_BSHD = dispatch_attention_fn(*of_all, backend=self._attention_backend)
        out_BSD = ranks.to_tokens(out_BSHD).flatten(2).type_as(x_BSD)
        for layer in attn.to_out:
            out_BSD = layer(out_BSD)
        return out_BSD


def _rotated(x_BSHD: Tensor, cos_1S1D: Tensor, sin_1S1D: Tensor) -> Tensor:
    """Turn pairs of neighbouring numbers by their angle, as diffusers does inside of its attention."""
    even, odd = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_1S1D[..., 0::2], sin_1S1D[..., 1::2]
    out_BSHD = torch.empty_like(x_BSHD)  # rounded at once: no second copy in the tables' float32
    out_BSHD[..., 0::2] = even * cos - odd * sin
    out_BSHD[..., 1::2] = even * sin + odd * cos
    return out_BSHD
