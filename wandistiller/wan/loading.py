"""The parts of a pipeline, loaded with their weights, each of its known class."""

from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.utils.files import read_json
from wandistiller.wan.component_classes import known_text_config, load_tokenizer, scheduler_class, unused
from wandistiller.wan.vae import FittingVae
from wandistiller.wan.weight_reader import require_sound


def load_text_encoder(folder: Path, dtype: torch.dtype, **more: Any) -> UMT5EncoderModel:
    """Load the text encoder in `folder` from its safetensors, with further arguments of `from_pretrained`.

    Raises:
        ConfigError: weights that cannot be right.
    """
    config = UMT5Config.from_dict(known_text_config(read_json(folder / "config.json")))
    more |= {"config": config, "use_safetensors": True, "trust_remote_code": False}
    model = UMT5EncoderModel.from_pretrained(folder, dtype=dtype, **more).eval()
    require_sound(model, folder)
    return model


def load_vae(folder: Path) -> FittingVae:
    """Load the VAE in `folder` from its safetensors, in float32; of a batch it takes one sample at a time.

    An image of 480x832 takes 3.1 GiB to decode, 81 frames 8.8; in tiles, where that is not free, 2.0.

    Raises:
        ConfigError: weights that cannot be right.
    """
    vae = FittingVae.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
    require_sound(vae, folder)
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
