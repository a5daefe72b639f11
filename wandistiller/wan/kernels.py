"""Kernels of a Wan transformer's blocks, compiled or eager with few passes over memory; shared sequences.

The eager ones compute diffusers' numbers (0.42.1) and move 245 bytes for each number of a block's state in
place of 285, backward 281 in place of 369 (tests/unit/wan/test_kernels.py). torch.compile fuses diffusers'
own blocks, but no products of complex numbers.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.transformers import transformer_wan
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from wandistiller.distributed.sequence_parallel import ALONE, SHARING, Ranks, Sharing
from wandistiller.engine.compiler import compiled
from wandistiller.engine.engine_config import Kernels

Rope = tuple[Tensor, Tensor]
"""cos_1S1D and sin_1S1D."""
ACCELERATE_S = "_old_forward"
"""Attribute of a module with accelerate's hooks (1.15): the forward pass that they are around."""


def use_kernels(model: WanTransformer3DModel, kernels: Kernels) -> None:
    """Compute the blocks of `model` with these kernels from now on, once it shares its sequences.

    diffusers' own `set_attention_backend` (0.42.1) would change the default of all networks of the process,
    and cross-attention too, which is short and may have a bias.
    """
    for block in model.blocks:
        if kernels.compile:  # without the hooks around it, which fetch weights
            block.forward = partial(_with_any_rows, compiled(block.forward))
        else:
            if hasattr(block, ACCELERATE_S):
                setattr(block, ACCELERATE_S, MethodType(WanTransformerBlock.forward, block))
            else:  # a method on the block would be a cycle, which keeps its weights until it is collected
                block.__class__ = WanTransformerBlock
            if not isinstance(block.attn1.processor, SelfAttention):
                block.attn1.set_processor(SelfAttention(Sharing(ALONE)))
            block.attn1.processor.rotated = rotated
        if kernels.attention != "native":
            block.attn1.processor._attention_backend = AttentionBackendName(kernels.attention)


def _with_any_rows(
    forward: Callable[..., Tensor], x_BSD: Tensor, text: Tensor | tuple[Tensor, Tensor], *others: Any
) -> Tensor:
    """Call a compiled block, whose text without padding has another number of rows in each batch."""
    if isinstance(text, tuple):
        text_BLD, bias_B11L = text
        torch._dynamo.mark_dynamic(text_BLD, 1)
        torch._dynamo.mark_dynamic(bias_B11L, 3)
    return forward(x_BSD, text, *others)


class WanTransformerBlock(transformer_wan.WanTransformerBlock):
    """diffusers' block, which casts each of its states to float32 once.

    It has diffusers' name, by which DeepSpeed (0.19.8) and accelerate (1.15) find blocks.
    """

    def forward(
        self, x_BSD: Tensor, text: Tensor | tuple[Tensor, Tensor], time: Tensor, rope: Rope
    ) -> Tensor:
        """Compute the next state.

        Args:
            text: what cross-attention takes.
            time: time_B6D, or time_BS6D of each patch.
        """
        table_BS6D = self.scale_shift_table + (time if time.ndim == 4 else time[:, None]).float()
        shift, scale, gate, shift_2, scale_2, gate_2 = table_BS6D.unbind(2)
        wide_BSD = x_BSD.float()
        normed_BSD = (self.norm1(wide_BSD) * (1 + scale) + shift).type_as(x_BSD)
        x_BSD = (wide_BSD + self.attn1(normed_BSD, None, None, rope) * gate).type_as(x_BSD)
        x_BSD = x_BSD + self.attn2(self.norm2(x_BSD.float()).type_as(x_BSD), text, None, None)
        wide_BSD = x_BSD.float()
        normed_BSD = (self.norm3(wide_BSD) * (1 + scale_2) + shift_2).type_as(x_BSD)
        return (wide_BSD + self.ffn(normed_BSD) * gate_2).type_as(x_BSD)


class SelfAttention(WanAttnProcessor):
    """diffusers' self-attention, for this rank's share of the heads over all tokens."""

    def __init__(self, now: Sharing):
        super().__init__()
        self._now = now
        self.rotated = rotated_in_halves

    def __call__(
        self, attn: WanAttention, x_BSD: Tensor, text: None, mask: None, rope: Rope, **kwargs: None
    ) -> Tensor:
        """Attend among the patches of all ranks of the sequence."""
        ranks, heads = self._now.ranks, (attn.heads, -1)
        tables = [ranks.part(table_1S1D) for table_1S1D in rope]
        query_BSHD = self.rotated(attn.norm_q(attn.to_q(x_BSD)).unflatten(2, heads), *tables)
        key_BSHD = self.rotated(attn.norm_k(attn.to_k(x_BSD)).unflatten(2, heads), *tables)
        of_all = query_BSHD, key_BSHD, attn.to_v(x_BSD).unflatten(2, heads)
        if ranks.degree > 1:
            of_all = ranks.to_heads(torch.cat(of_all, dim=-1)).chunk(3, dim=-1)
        out_BSHD = dispatch_attention_fn(*of_all, backend=self._attention_backend)
        if ranks.degree > 1:
            out_BSHD = ranks.to_tokens(out_BSHD)
        out_BSD = out_BSHD.flatten(2).type_as(x_BSD)
        for layer in attn.to_out:
            out_BSD = layer(out_BSD)
        return out_BSD


def rotated(x_BSHD: Tensor, cos_1S1D: Tensor, sin_1S1D: Tensor) -> Tensor:
    """Turn pairs of neighbouring numbers by their angle, as products of complex numbers in float32."""
    turns = torch.complex(cos_1S1D[..., 0::2], sin_1S1D[..., 1::2])
    pairs = torch.view_as_complex(x_BSHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x_BSHD)


def rotated_in_halves(x_BSHD: Tensor, cos_1S1D: Tensor, sin_1S1D: Tensor) -> Tensor:
    """Turn pairs of neighbouring numbers by their angle, as diffusers does inside of its attention."""
    even, odd = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_1S1D[..., 0::2], sin_1S1D[..., 1::2]
    out_BSHD = torch.empty_like(x_BSHD)  # rounded at once: no second copy in the tables' float32
    out_BSHD[..., 0::2] = even * cos - odd * sin
    out_BSHD[..., 1::2] = even * sin + odd * cos
    return out_BSHD


def share_sequences(model: WanTransformer3DModel, ranks: Ranks) -> WanTransformer3DModel:
    """Let `model` take whole inputs and give whole outputs, but compute this rank's tokens alone. Collective.

    Hidden states between its blocks are then those of this rank's tokens. diffusers' `enable_parallelism`
    (0.42.1) is for inference: its backward pass computes attention once more, and the gradient of its
    gathered outputs lacks the factor that averaging over the ranks takes away.
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
        block.attn1.set_processor(SelfAttention(now))
    setattr(model, SHARING, now)
    return model
