"""VAE, text encoder and tokenizer of a Wan pipeline: what their files say, before anything is loaded."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.config import read_json
from wandistiller.problems import ConfigError, problem
from wandistiller.weights import WeightReader

UNFIT = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""What diffusers and transformers raise for settings that do not fit together."""
TIED = "encoder.embed_tokens.weight"
"""Another name of UMT5's `shared.weight`; a file has either or both."""

UMT5_XXL = {"d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24, "vocab_size": 256384}
"""Wan's text encoder. Source: text_encoder/config.json of Wan-AI/Wan2.1-T2V-14B-Diffusers."""


def unfit(where: str | Path, error: Exception) -> str:
    """The message for one of `UNFIT`."""
    return f"{where}: it cannot be built from this: {error or type(error).__name__}. Fetch this file again, or mend it."


def part_problems(folder: Path, vae: dict[str, Any], text_dim: int) -> list[str]:
    """Every tensor of VAE and text encoder that is missing, cut off or misshapen, and a tokenizer that is not there.

    Args:
        text_dim: width of the text states that the transformer takes.
    """
    found = []
    if not any((folder / "tokenizer" / name).is_file() for name in ("tokenizer.json", "spiece.model")):
        found.append(f"{folder / 'tokenizer'}: no tokenizer.json or spiece.model in it. Give the whole pipeline.")
    elif (about := folder / "tokenizer" / "tokenizer_config.json").is_file():
        try:
            read_json(about)
        except ConfigError as error:
            found += error.problems
    try:
        with torch.device("meta"):
            model = vae_of(vae)
        found += _weight_problems(folder / "vae", "diffusion_pytorch_model", model)
    except UNFIT as error:
        found.append(unfit(folder / "vae" / "config.json", error))
    return found + _text_problems(folder / "text_encoder", text_dim)


def _text_problems(folder: Path, text_dim: int) -> list[str]:
    file = folder / "config.json"
    try:
        config = read_json(file)
        if config.get("d_model") != text_dim:
            return [problem(file, "d_model", config.get("d_model"), f"The transformer takes text of width {text_dim}; give the "
                            "text encoder that belongs to it.")]  # fmt: skip
        with torch.device("meta"):
            model = text_encoder_of(config)
        return _weight_problems(folder, "model", model)
    except ConfigError as error:
        return error.problems
    except UNFIT as error:
        return [unfit(file, error)]


def _weight_problems(folder: Path, stem: str, model: nn.Module) -> list[str]:
    try:
        reader = WeightReader(folder, stem)
    except ConfigError as error:
        return error.problems
    expected = {name: p.shape for name, p in model.named_parameters()}
    if TIED in reader.stored and "shared.weight" in expected:
        expected[TIED] = expected["shared.weight"]
        if "shared.weight" not in reader.stored:
            del expected["shared.weight"]
    return reader.problems(folder, expected, model._keys_to_ignore_on_load_unexpected)


def text_config(folder: Path) -> dict[str, Any]:
    """The text encoder's config; of a pipeline without one, Wan's own."""
    file = folder / "text_encoder" / "config.json"
    return read_json(file) if file.is_file() else UMT5_XXL


def vae_of(config: dict[str, Any]) -> AutoencoderKLWan:
    """The VAE that `config` describes, untrained, in float32, on the current default device."""
    return AutoencoderKLWan.from_config(config).eval()


def text_encoder_of(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> UMT5EncoderModel:
    """The text encoder that `config` describes, untrained, on the current default device."""
    return UMT5EncoderModel._from_config(UMT5Config.from_dict(config), dtype=dtype).eval()
