"""Cross-attention to a prompt's padding through a few rows that stand for all of it.

Wan pads a prompt's states with zeros to 512 rows and attends to all of them. After the text embedder the
zero rows are equal, so n of them weigh in the softmax what one weighs with log n added to its logit.
"""

import math
from functools import cache
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from wandistiller.batch import padded

TEXT_TOKENS = 512  # what WanPipeline.__call__ passes; encode_prompt's own default of 226 is not what Wan saw
STAND_INS = 3
"""Rows for a prompt's padding: log n in bf16 is off by 0.8 %, which the second and third make up for."""
MERGED = "merges_text_padding"
"""Attribute of a transformer that takes prompts without their padding."""


def merge_text_padding(model: WanTransformer3DModel) -> WanTransformer3DModel:
    """Let `model` compute with fewer zero rows after a prompt what it computes with all 512, to rounding.

    The condition embedder's text becomes a pair with the bias of its rows, which blocks pass to attention
    as it is, so activation checkpoints and ZeRO's hooks see both as inputs.
    """
    for block in model.blocks:
        block.attn2.set_processor(MergedPaddingProcessor())
    model.condition_embedder.register_forward_hook(_with_bias)
    setattr(model, MERGED, True)
    return model


def network_text(model: nn.Module, text_BLD: Tensor) -> Tensor:
    """Return the text with as many zero rows as `model` needs: 512 in all, or those that stand for them."""
    rows = text_BLD.shape[1] + STAND_INS if getattr(model, MERGED, False) else TEXT_TOKENS
    return padded(text_BLD, min(rows, TEXT_TOKENS))


class MergedPaddingProcessor(WanAttnProcessor):
    """diffusers' attention, whose text is a pair with the bias that is added to the logits of its rows."""

    def __call__(
        self, attn: WanAttention, x_BSD: Tensor, text: tuple[Tensor, Tensor], *_: None, **kwargs: Any
    ) -> Tensor:
        """Attend to text_BLD with bias_B11L."""
        text_BLD, bias_B11L = text
        return super().__call__(attn, x_BSD, text_BLD, bias_B11L, **kwargs)


def _with_bias(_: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the text among the condition embedder's outputs by a pair with its bias."""
    temb, timestep_proj, text_BLD, image = outputs
    bias_B11L = row_bias(inputs[1], text_BLD.dtype)
    # a device map may have moved the text
    return temb, timestep_proj, (text_BLD, bias_B11L.to(text_BLD.device)), image


def row_bias(states_BLD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bias_B11L of the rows of a prompt's states, which end with at least STAND_INS zero rows.

    0 for the prompt's own, -inf for zero rows that are not needed. No host waits for the device.
    """
    row_L = torch.arange(states_BLD.shape[1], device=states_BLD.device)
    own_BL = (states_BLD != 0).any(-1)
    length_B1 = (own_BL * (row_L + 1)).amax(1, keepdim=True)
    after_BL = row_L - length_B1  # below 0 within the prompt
    table = _stand_in_biases(dtype, states_BLD.device)
    bias_BL = table[TEXT_TOKENS - length_B1, after_BL.clamp(0, STAND_INS)]
    return bias_BL.where(after_BL >= 0, 0)[:, None, None]


@cache
def _stand_in_biases(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the biases of the stand-ins, and -inf after them, by the number of rows that they stand for.

    Their exponentials sum up to that number: each is rounded down, and the next stands for what is missing.
    """
    table = torch.full((TEXT_TOKENS + 1, STAND_INS + 1), -math.inf, dtype=dtype)
    for number in range(1, TEXT_TOKENS + 1):
        missing = float(number)
        for place in range(STAND_INS):
            if missing <= 0:
                break
            bias = torch.tensor(math.log(missing), dtype=torch.float64)
            rounded = bias.to(dtype)
            if rounded > bias:
                rounded = torch.nextafter(rounded, torch.tensor(-math.inf, dtype=dtype))
            table[number, place] = rounded
            missing -= math.exp(rounded)
    return table.to(device)
