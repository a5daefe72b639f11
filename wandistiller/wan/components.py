"""VAE and text encoder without weights, from their JSON files."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.utils.files import read_json

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
    return UMT5EncoderModel._from_config(UMT5Config.from_dict(config), dtype=dtype).eval()
