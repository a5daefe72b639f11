"""The parts of a pipeline, of their known classes: without weights from their JSON files, or loaded."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.utils.files import read_json
from wandistiller.wan.known import known_text_config, load_tokenizer, scheduler_class, unused

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


def load_text_encoder(folder: Path, dtype: torch.dtype, **more: Any) -> UMT5EncoderModel:
    """Load the text encoder in `folder` from its safetensors, with further arguments of `from_pretrained`."""
    config = UMT5Config.from_dict(known_text_config(read_json(folder / "config.json")))
    more |= {"config": config, "use_safetensors": True, "trust_remote_code": False}
    return UMT5EncoderModel.from_pretrained(folder, dtype=dtype, **more).eval()


def load_vae(folder: Path) -> AutoencoderKLWan:
    """Load the VAE in `folder` from its safetensors, in float32; of a batch it takes one sample at a time.

    An image of 480x832 takes 2.6 GiB to decode, 81 frames 7.6.
    """
    vae = AutoencoderKLWan.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
    vae.enable_slicing()
    return vae


def load_pipeline(folder: Path, dtype: torch.dtype) -> WanPipeline:
    """Load a WanPipeline part by part, each of its known class, the VAE in float32.

    Not by its own from_pretrained, which takes a file such as vae/diffusers.py for the code of a component
    (diffusers 0.42.1).
    """
    index = read_json(folder / "model_index.json")
    config = read_json(folder / "scheduler" / "scheduler_config.json")
    given = {"dtype": dtype, "use_safetensors": True}
    experts = {
        part: WanTransformer3DModel.from_pretrained(folder / part, **given).eval()
        for part in ("transformer", "transformer_2")
        if not unused(index.get(part))
    }
    return WanPipeline(
        tokenizer=load_tokenizer(folder / "tokenizer"),
        text_encoder=load_text_encoder(folder / "text_encoder", dtype),
        vae=load_vae(folder / "vae"),
        scheduler=scheduler_class(config["_class_name"]).from_config(config),
        **experts,
        boundary_ratio=index.get("boundary_ratio") if len(experts) == 2 else None,  # else None is called
        expand_timesteps=index.get("expand_timesteps", False),
    )
