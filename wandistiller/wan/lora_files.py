"""LoRA files that others made: for diffusers, for ComfyUI and the original Wan, and of kohya's trainers."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers import WanPipeline
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wandistiller.utils.errors import ConfigError

PREFIX = "transformer."
A, B = ".lora_A.weight", ".lora_B.weight"
IN_A_FOLDER = "pytorch_lora_weights.safetensors"
"""As diffusers saves it."""
KOHYA = re.compile(r"lora_unet_blocks_(\d+)_(self_attn|cross_attn|ffn)_(\w+)")


class LowRank(NamedTuple):
    """A change of a linear layer's weight: B A."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank], with the factor alpha / rank in it."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class LoraFile:
    """The changes in a file, by the names of diffusers' layers."""

    layers: dict[str, LowRank]
    left_out: list[str] = field(default_factory=list)
    """Keys that are no change of a linear layer's weight, such as differences of biases and norms."""

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(one.rank for one in self.layers.values())

    def other_layer(self, shapes: dict[str, list[int]]) -> str:
        """Return the first layer that a network of these parameters' shapes lacks; empty if it has all."""
        given = {layer: [len(b), a.shape[1]] for layer, (a, b) in self.layers.items()}
        return next((layer for layer in given if shapes.get(f"{layer}.weight") != given[layer]), "")


def left_out_words(keys: list[str]) -> str:
    return f"{len(keys)} of its keys change no weight of a linear layer and are left out, such as {keys[0]}"


def read_lora(file: Path, *, weights: bool = True) -> LoraFile:
    """Read a LoRA by diffusers' own rules of names.

    Args:
        weights: read them; without, the layers are on the meta device.

    Raises:
        ConfigError: it is no such file.
    """
    file = file / IN_A_FOLDER if file.is_dir() else file
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            state = {key: _tensor(opened, key, weights) for key in opened.keys()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read as a .safetensors file: {error}.") from None
    try:
        converted = WanPipeline.lora_state_dict({_original(key): value for key, value in state.items()})
    except (KeyError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ConfigError(f"{file}: is no LoRA of a Wan that diffusers can read: {error}.") from None
    layers, left_out = {}, [key for key in state if key.endswith((".diff", ".diff_b"))]
    for key, value in converted.items():
        name = key.removeprefix(PREFIX)
        layer = name.removesuffix(A)
        if name.endswith(A) and f"{key.removesuffix(A)}{B}" in converted:
            factor = _factor(metadata, layer, len(value))
            layers[layer] = LowRank(value, converted[f"{key.removesuffix(A)}{B}"] * factor)
        elif not name.endswith((A, B)):
            left_out.append(name)
    if not layers:
        first = next(iter(state), "none")
        raise ConfigError(f"{file}: has no LoRA of a Wan transformer; its first key is {first}.")
    return LoraFile(layers, sorted(set(left_out)))


def _original(key: str) -> str:
    """Return a key of kohya's trainers as the original Wan's: of the former diffusers 0.42.1 wants all."""
    layer, _, rest = key.partition(".")
    if not (found := KOHYA.fullmatch(layer)):
        return key
    number, part, leaf = found.groups()
    return f"diffusion_model.blocks.{number}.{part}.{leaf}.{rest}"


def _tensor(opened: safe_open, key: str, weights: bool) -> Tensor:
    """Read a tensor, float32; of its weights the shape alone unless they are wanted."""
    if weights or key.endswith(".alpha"):
        return opened.get_tensor(key).float()
    return torch.empty(opened.get_slice(key).get_shape(), device="meta")


def _factor(metadata: dict[str, str], layer: str, rank: int) -> float:
    """Return alpha / rank of a layer in a file for diffusers, which has peft's settings in its metadata."""
    config = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    of_parts = (config.get(f"{PREFIX}alpha_pattern") or {}).items()
    alpha = config.get(f"{PREFIX}lora_alpha")
    alpha = next((one for part, one in of_parts if re.fullmatch(rf"(.*\.)?({part})", layer)), alpha)
    return alpha / rank if alpha else 1.0
