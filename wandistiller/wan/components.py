"""The parts of a pipeline, of their known classes, without weights from their JSON files; and their calls."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.utils.files import read_json
from wandistiller.wan.component_classes import known_text_config

UMT5_XXL = {
    "d_ff": 10240,
    "d_kv": 64,
    "d_model": 4096,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 256384,
}
"""Wan's text encoder. Source: text_encoder/config.json of Wan-AI/Wan2.1-T2V-14B-Diffusers."""


def text_config(folder: Path) -> dict[str, Any]:
    """Return the text encoder's config; Wan's own if the pipeline has none."""
    file = folder / "text_encoder" / "config.json"
    return read_json(file) if file.is_file() else UMT5_XXL


def vae_of(config: dict[str, Any]) -> AutoencoderKLWan:
    """Make the VAE that `config` describes, untrained, in float32, on the current default device."""
    return AutoencoderKLWan.from_config(config).eval()


def text_encoder_of(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> UMT5EncoderModel:
    """Make the text encoder that `config` describes, untrained, on the current default device."""
    return UMT5EncoderModel._from_config(UMT5Config.from_dict(known_text_config(config)), dtype=dtype).eval()


def states(encoder: UMT5EncoderModel, token_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return text_BLD of token ids; `mask_BL` is 0 at padding."""
    return encoder(token_BL, mask_BL).last_hidden_state


def encoded(vae: AutoencoderKLWan, pixels_BCFHW: Tensor) -> Tensor:
    """Encode pixels in [-1, 1] to the posterior's mode z_BCFHW."""
    return vae.encode(pixels_BCFHW).latent_dist.mode()


def decoded(vae: AutoencoderKLWan, z_BCFHW: Tensor) -> Tensor:
    """Decode z_BCFHW to pixels_BCFHW in [0, 1]."""
    return (vae.decode(z_BCFHW).sample / 2 + 0.5).clamp(0, 1)
