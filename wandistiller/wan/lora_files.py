"""LoRA files that others made: for diffusers, for ComfyUI and the original Wan, and of other trainers."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.wan.lora_keys import ALPHA, DIFFERENCE, KEY, NO_WEIGHT, A, B, kind, lora_key, other_method

IN_A_FOLDER = "pytorch_lora_weights.safetensors"
"""As diffusers saves it."""
SETTINGS = "lora_adapter_metadata"
"""Where diffusers keeps peft's settings in a file's metadata."""
OF_PEFT, BESIDE = "base_model.model.", "adapter_config.json"
"""What peft's own keys begin with, and where it keeps the settings."""
PARTS_OF_SETTINGS = "transformer."


class LowRank(NamedTuple):
    """A change of a linear layer's weight: B A."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank], with the factor of alpha and rank in it."""

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
    """Say that keys of a file are left out."""
    kinds = ", ".join(f"{what} {n}" for what, n in sorted(Counter(map(kind, keys)).items()))
    text = "of its keys change no weight of a linear layer and are left out, such as"
    return f"{len(keys)} {text} {keys[0]} ({kinds})"


def read_lora(file: Path, *, weights: bool = True) -> LoraFile:
    """Read a LoRA in the names of diffusers or of the original Wan, with the prefix of any trainer.

    The change of a layer is alpha / rank B A, as of kohya, ComfyUI and peft: alpha is a tensor beside the
    factors, or in peft's settings, and the rank without either; with peft's `use_rslora` it is
    alpha / sqrt(rank) B A (Kalajdzievski 2023, arXiv:2312.03732). A difference of the weight itself, as in
    files that were taken from full models, is B A too.

    Args:
        weights: read them; without, the layers are on the meta device.

    Raises:
        ConfigError: it is no such file, or holds what is no LoRA.
    """
    if file.is_dir() and not (file / IN_A_FOLDER).is_file():
        raise ConfigError(f"{file}: is a folder without {IN_A_FOLDER}. Name the LoRA file.")
    file = file / IN_A_FOLDER if file.is_dir() else file
    try:
        with safe_open(file, "pt") as opened:
            keys_of, left_out = _sorted_keys(file, list(opened.keys()))
            settings = _settings(file, opened.metadata() or {}, list(opened.keys()))
            layers = {}
            for layer, keys in keys_of.items():
                parts = {p: _tensor(opened, key, weights or p == ALPHA) for p, key in keys.items()}
                layers[layer] = _change(file, keys, parts)
                if ALPHA not in parts and DIFFERENCE not in parts:
                    (a, b), names = layers[layer], [layer, KEY.fullmatch(keys[A])["layer"]]
                    layers[layer] = LowRank(a, b * _factor(file, settings, names, len(a)))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read as a .safetensors file: {error}.") from None
    return LoraFile(layers, sorted(left_out))


def _sorted_keys(file: Path, keys: list[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the key of each part of each layer, and the keys that change no weight of a linear layer."""
    layers, left_out, unknown = {}, [], []
    for key in keys:
        layer, part = lora_key(key)
        if method := other_method(key):
            text = f"`{key}` is of {method}, and only LoRA of linear layers is read"
            raise ConfigError(f"{file}: {text}. Give a LoRA, or merge it into the model that it is for.")
        if part == NO_WEIGHT or part == DIFFERENCE and not layer:
            left_out.append(key)
        elif not layer:
            unknown.append(key)
        elif other := layers.setdefault(layer, {}).get(part):
            raise ConfigError(f"{file}: `{other}` and `{key}` are of one layer. Keep one of them.")
        else:
            layers[layer][part] = key
    if not layers:
        first = next(iter(keys), "none")
        raise ConfigError(f"{file}: has no LoRA of a Wan transformer; its first key is {first}.")
    if unknown:
        text = "is no LoRA of a linear layer of a Wan transformer. Give a file without such keys"
        raise ConfigError(f"{file}: `{unknown[0]}` {text}.")
    return layers, left_out


def _tensor(opened: safe_open, key: str, weights: bool) -> Tensor:
    """Read a tensor, float32; its shape alone unless its weights are wanted."""
    if weights:
        return opened.get_tensor(key).float()
    return torch.empty(opened.get_slice(key).get_shape(), device="meta")


def _change(file: Path, keys: dict[str, str], parts: dict[str, Tensor]) -> LowRank:
    """Return the change of a layer, with the factor of its own alpha if there is one.

    Args:
        keys: part -> its key.
        parts: part -> its tensor.
    """
    if keys.keys() not in ({DIFFERENCE}, {A, B}, {A, B, ALPHA}):
        has = " and ".join(f"`{key}`" for key in sorted(keys.values()))
        text = "which is not both factors of a LoRA, nor a difference alone. Fetch the file again"
        raise ConfigError(f"{file}: of a layer it has {has}, {text}.")
    for part, value in parts.items():
        if part != ALPHA and (value.ndim != 2 or 0 in value.shape):
            text = f"`{keys[part]}` is {list(value.shape)}, and a linear layer's is a matrix"
            raise ConfigError(f"{file}: {text}. Give a LoRA of linear layers.")
    if DIFFERENCE in parts:
        return _as_product(parts[DIFFERENCE])
    a, b = parts[A], parts[B]
    if len(a) != b.shape[1]:
        text = f"`{keys[A]}` is {list(a.shape)} and `{keys[B]}` {list(b.shape)}"
        raise ConfigError(f"{file}: {text}: their ranks differ. Fetch the file again.")
    if (alpha := parts.get(ALPHA)) is None:
        return LowRank(a, b)
    if alpha.numel() != 1 or not alpha.isfinite():
        raise ConfigError(f"{file}: `{keys[ALPHA]}` is no finite number. Fetch the file again.")
    return LowRank(a, b * (alpha.item() / len(a)))


def _as_product(difference: Tensor) -> LowRank:
    """Return a difference of a weight, [out, in], as B A with the smallest rank that holds any."""
    outputs, inputs = difference.shape
    one = torch.eye(min(outputs, inputs), device=difference.device)
    return LowRank(difference, one) if outputs < inputs else LowRank(one, difference)


def _settings(file: Path, metadata: dict[str, str], keys: list[str]) -> dict[str, Any]:
    """Return peft's settings in a file's metadata, or in the file that peft writes beside its own.

    diffusers writes them with the prefix `transformer.` for a pipeline, and without for a transformer.
    """
    config, where = {}, f"{file}: its metadata `{SETTINGS}`"
    if SETTINGS in metadata:
        try:
            config = json.loads(metadata[SETTINGS])
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise ConfigError(f"{where} is no JSON object. Save the file again with diffusers.")
    elif any(key.startswith(OF_PEFT) for key in keys) and (beside := file.parent / BESIDE).is_file():
        config, where = read_json(beside), str(beside)
    config = {key.removeprefix(PARTS_OF_SETTINGS): value for key, value in config.items()}
    if config.get("use_dora"):
        text = "has `use_dora`, and only LoRA is read. Give a LoRA, or merge it into the model that it is for"
        raise ConfigError(f"{where} {text}.")
    return config


def _factor(file: Path, settings: dict[str, Any], names: list[str], rank: int) -> float:
    """Return the factor of a layer's B A by peft's settings.

    Args:
        names: diffusers' name of the layer, and its name in the file, which may be the original Wan's.
    """
    of_parts, alpha = settings.get("alpha_pattern") or {}, settings.get("lora_alpha")
    try:
        alpha = next(
            (
                one
                for part, one in of_parts.items()
                if any(re.fullmatch(rf"(.*\.)?({part})", name) for name in names)
            ),
            alpha,
        )
        factor = 1.0 if alpha is None else alpha / (sqrt(rank) if settings.get("use_rslora") else rank)
        if isfinite(factor):
            return factor
    except (AttributeError, TypeError, re.error):
        pass
    given = f"`lora_alpha` {json.dumps(alpha)} and `alpha_pattern` {json.dumps(of_parts)}"
    raise ConfigError(f"{file}: its settings have {given}, which are no numbers. Save the file again.")
