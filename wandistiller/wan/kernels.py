"""Kernels of a Wan transformer's blocks: attention through diffusers' own dispatch, and torch.compile."""

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName

from wandistiller.engine.kernels import Kernels


def use_kernels(model: WanTransformer3DModel, kernels: Kernels) -> None:
    """Compute the blocks of `model` with these kernels from now on.

    diffusers' own `set_attention_backend` (0.42.1) would change the default of all networks of the process,
    and cross-attention too, which is short and may have a bias.
    """
    for block in model.blocks:
        if kernels.attention != "native":
            block.attn1.processor._attention_backend = AttentionBackendName(kernels.attention)
        if kernels.compile:  # without the hooks around it, which fetch weights
            block.forward = torch.compile(block.forward)
