"""LoRA files that others made: for diffusers, for ComfyUI and the original Wan, and of other trainers."""

import json
import re
from functools import cache
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.network.adapters import LowRank
from wandistiller.network.names import SECOND_TIME, in_block, split_name
from wandistiller.network.weight_reader import Stored, damage_in, read_header
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import file_fingerprint, read_json
from wandistiller.wan.original_names import original_name
from wandistiller.wan.structure import ATTENTIONS, IMAGE_MAPS
from wandistiller.wan.transformer_config import TransformerConfig

PREFIX = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?:transformer(?P<low_noise>_2)?\.|pipe\.dit\.|lora_unet__?|lora_transformer_|lycoris_"
    r"|(?:model\.)?(?:diffusion_model\.)?)"
)
"""What stands before a layer's name: peft; diffusers, DiffSynth, kohya and VideoX-Fun, LyCORIS, ComfyUI."""
A, B, ALPHA, DIFFERENCE = "a", "b", "alpha", "difference"
ENDINGS = {
    A: r"(?:lora_A(?:\.[^.]+)?|lora[._]down)\.weight",
    B: r"(?:lora_B(?:\.[^.]+)?|lora[._]up)\.weight",
    ALPHA: "alpha",
    DIFFERENCE: "diff",
}
"""Parts of a layer's change, and their endings; peft has its adapter's name in them."""
KEY = re.compile(rf"(?P<layer>.+)\.(?:{'|'.join(f'(?P<{part}>{end})' for part, end in ENDINGS.items())})")
OTHER_METHODS = {
    "DoRA": re.compile("dora_scale|lora_magnitude_vector"),
    "LoKr": re.compile("lokr_"),
    "LoHa": re.compile("hada_"),
    "OFT": re.compile("oft_"),
    "LoRA of convolutions": re.compile("lora_mid"),
    "weights in 8 bits with a scale": re.compile("scale_weight|weight_scale|scaled_fp8"),
}
"""Methods whose change is no product of two matrices as they are, and what their keys have."""
ATTENTION_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
IN_BLOCKS = (
    *(f"{attention}.{layer}" for attention in ATTENTIONS for layer in ATTENTION_LAYERS),
    *(f"attn2.{layer}" for layer in IMAGE_MAPS),
    *("ffn.net.0.proj", "ffn.net.2"),
)
OUTSIDE = (
    *(f"condition_embedder.{of}_embedder.linear_{n}" for of in ("time", "text") for n in (1, 2)),
    *(f"condition_embedder.image_embedder.ff.net.{layer}" for layer in ("0.proj", "2")),
    *("condition_embedder.time_proj", "proj_out"),
)
"""Linear layers, by diffusers' names."""
FIRST = in_block(0) + "."
IN_BLOCK = re.compile(r"blocks[._](\d+)[._]")
LAYERS = {
    spelling.replace(".", "_"): layer
    for layer in (*(FIRST + layer for layer in IN_BLOCKS), *OUTSIDE)
    for spelling in (layer, original_name(f"{layer}.").removesuffix("."))
}
"""Diffusers' and the original names, with _ for each dot, which kohya's trainers write; the first block's."""


class LoraKey(NamedTuple):
    """The layer that a key is of, and its part of that."""

    layer: str
    """A linear layer by diffusers' name; empty: it is none of a Wan transformer's."""
    part: str
    """Of `ENDINGS`; empty: unknown."""


def lora_key(key: str) -> LoraKey:
    if not (match := KEY.fullmatch(key)):
        return LoraKey("", "")
    name, part = match["layer"], match.lastgroup
    name = name[PREFIX.match(name).end() :]
    if block := IN_BLOCK.match(name):
        layer = LAYERS.get((FIRST + name[block.end() :]).replace(".", "_"), "")
        return LoraKey(layer.replace(FIRST, in_block(int(block[1])) + ".", 1), part)
    return LoraKey(LAYERS.get(name.replace(".", "_"), ""), part)


def is_of_low_noise(key: str) -> bool:
    """Return whether a key is of the low-noise expert, by diffusers' name of that: transformer_2."""
    return bool(PREFIX.match(key)["low_noise"])


def left_out_words(keys: list[str]) -> str:
    """Say that keys of a file are left out."""
    text = f"{len(keys)} of its keys change no weight of a linear layer that is here and are left out"
    return f"{text}, such as {keys[0]}"


SETTINGS = "lora_adapter_metadata"
"""Where diffusers keeps peft's settings in a file's metadata."""
ALPHA_OF_PEFT, ALPHA_OF_KOHYA = "lora_alpha", "ss_network_alpha"
"""Alpha of all layers in a file's metadata. Beside kohya's names alone the latter is a factor: its own
converter to other names multiplies the weights by it, and keeps the metadata."""
OF_PEFT, BESIDE = "base_model.model.", "adapter_config.json"
"""What peft's own keys begin with, and where it keeps the settings."""


class LoraFile(NamedTuple):
    """The changes in a file, by the names of diffusers' layers, and the keys that change no such layer."""

    layers: dict[str, LowRank]
    left_out: list[str]


def read_lora(
    file: Path,
    config: TransformerConfig | None = None,
    expert: Expert = Expert.HIGH_NOISE,
    *,
    weights: bool = True,
) -> LoraFile:
    """Read a LoRA in the names of diffusers or of the original Wan, with the prefix of any trainer.

    The change of a layer is alpha / rank B A, as of kohya, ComfyUI and peft: alpha is a tensor beside the
    factors, or in the settings, and the rank without either; with peft's `use_rslora` it is
    alpha / sqrt(rank) B A (Kalajdzievski 2023, arXiv:2312.03732). A difference of the weight itself, as in
    files that were taken from full models, is B A too.

    Args:
        config: of the network that it is for: keys of layers that it lacks are left out.
        expert: the network, of a file that has layers of both experts.
        weights: read them; without, the layers are on the meta device.

    Raises:
        ConfigError: it is no such file, holds what is no LoRA, or is for another network.
    """
    try:
        with safe_open(file, "pt") as opened:
            keys, layers = list(opened.keys()), {}
            low = {key for key in keys if is_of_low_noise(key)}
            of_expert = [k for k in keys if not low or (k in low) == (expert is Expert.LOW_NOISE)]
            keys_of, left_out = _sorted_keys(file, of_expert)
            settings = _settings(file, opened.metadata() or {}, keys, expert)
            if config:
                left_out += _leave_out_foreign(file, keys_of, config)
            for layer, keys in keys_of.items():
                parts = {p: _tensor(opened, key, weights or p == ALPHA) for p, key in keys.items()}
                layers[layer] = _change(file, keys, parts)
                if ALPHA not in parts and DIFFERENCE not in parts:
                    (a, b), names = layers[layer], [layer, KEY.fullmatch(keys[A])["layer"]]
                    layers[layer] = LowRank(a, b * _factor(file, settings, names, len(a)))
    except (OSError, SafetensorError) as error:
        what = f"cannot be read as a .safetensors file: {error}. Give a LoRA file."
        raise ConfigError(f"{file}: {file.is_file() and damage_in(file) or what}") from None
    here = config.shapes if config else {}
    for layer, (a, b) in layers.items():
        changed = [len(b), a.shape[1]]
        if (shape := here.get(f"{layer}.weight", changed)) != changed:
            text = f"its change of `{layer}` is of shape {changed}, and that is {shape} here"
            raise ConfigError(f"{file}: {text}. Give one that was made for it.")
    left_out = [key for key in left_out if not (SECOND_TIME in key and config and config.has_second_time)]
    return LoraFile(layers, sorted(left_out))


def second_time_in(file: Path) -> dict[str, Stored]:
    """Return the weights of a flow map's second time in a file, by diffusers' names."""
    keys = [key for key in header_of(file)[0] if SECOND_TIME in key]
    return {key[PREFIX.match(key).end() :]: read_header(file)[key] for key in keys}


def header_of(file: Path) -> tuple[list[str], dict[str, str]]:
    """Return keys and metadata of a file; none if it is unreadable, as the reader of its weights says."""
    try:
        with safe_open(file, "np") as opened:
            return list(opened.keys()), opened.metadata() or {}
    except (OSError, SafetensorError):
        return [], {}


def experts_in(file: Path) -> set[Expert]:
    """Return the experts whose layers the keys of a file name; none: it is of one network, or unreadable."""
    are_low = {is_of_low_noise(key) for key in header_of(file)[0] if lora_key(key).layer}
    return {Expert.LOW_NOISE if low else Expert.HIGH_NOISE for low in are_low} if True in are_low else set()


def require_finite(file: Path) -> None:
    """Read all tensors, one at a time; raise ConfigError if one holds numbers that are not finite."""
    if key := _not_finite(file, file_fingerprint(file)):
        text = "holds numbers that are not finite. Fetch or train the LoRA again"
        raise ConfigError(f"{file}: tensor `{key}` {text}.")


@cache
def _not_finite(file: Path, fingerprint: str) -> str:
    """Return the first tensor of a file of this fingerprint with numbers that are not finite; or nothing."""
    with safe_open(file, "pt") as opened:
        tensors = ((key, opened.get_tensor(key).float()) for key in opened.keys())
        return next((key for key, t in tensors if t.numel() and not sum(t.aminmax()).isfinite()), "")


def _sorted_keys(file: Path, keys: list[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the key of each part of each layer, and the keys that change no weight of a linear layer."""
    layers, left_out = {}, []
    for key in keys:
        layer, part = lora_key(key)
        if method := next((method for method, has in OTHER_METHODS.items() if has.search(key)), ""):
            text = f"`{key}` is of {method}, and only LoRA of linear layers is read"
            raise ConfigError(f"{file}: {text}. Give a LoRA, or merge it into the model that it is for.")
        if not layer:
            left_out.append(key)
        elif other := layers.setdefault(layer, {}).get(part):
            raise ConfigError(f"{file}: `{other}` and `{key}` are of one layer. Keep one of them.")
        else:
            layers[layer][part] = key
    if not layers:
        text = f"has no LoRA of a Wan transformer; its first key is {next(iter(keys), 'none')}"
        raise ConfigError(f"{file}: {text}. Give a LoRA of linear layers.")
    return layers, left_out


def _leave_out_foreign(
    file: Path, keys_of: dict[str, dict[str, str]], config: TransformerConfig
) -> list[str]:
    """Take out the layers that a network lacks; return their keys.

    Raises:
        ConfigError: it lacks all of them, or has fewer blocks.
    """
    blocks, here = config.num_layers, config.shapes
    foreign = [layer for layer in keys_of if f"{layer}.weight" not in here]
    deeper = [layer for layer in foreign if (split_name(layer)[0] or 0) >= blocks]
    if deeper or len(foreign) == len(keys_of):
        why = f"the network here has {blocks} blocks" if deeper else "none of its layers is here"
        text = f"changes `{(deeper or foreign)[0]}`, and {why}. Give one that was made for it."
        raise ConfigError(f"{file}: {text}")
    return [key for layer in foreign for key in keys_of.pop(layer).values()]


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
    if (difference := parts.get(DIFFERENCE)) is not None:  # as B A with the smallest rank that holds any
        outputs, inputs = difference.shape
        identity = torch.eye(min(outputs, inputs), device=difference.device)
        return LowRank(difference, identity) if outputs < inputs else LowRank(identity, difference)
    a, b = parts[A], parts[B]
    if len(a) != b.shape[1]:
        text = f"`{keys[A]}` is {list(a.shape)} and `{keys[B]}` {list(b.shape)}"
        raise ConfigError(f"{file}: {text}: their ranks differ. Fetch the file again.")
    if (alpha := parts.get(ALPHA)) is None:
        return LowRank(a, b)
    if alpha.numel() != 1:
        raise ConfigError(f"{file}: `{keys[ALPHA]}` is no number. Fetch the file again.")
    return LowRank(a, b * (alpha.item() / len(a)))


def _settings(file: Path, metadata: dict[str, str], keys: list[str], expert: Expert) -> dict[str, Any]:
    """Return peft's settings in a file's metadata, or in the file that peft writes beside its own.

    diffusers writes them with the prefix `transformer.` for a pipeline, and without for a transformer. Other
    programs write alpha alone.
    """
    config, where = {}, f"{file}: its metadata `{SETTINGS}`"
    of_kohya = any("lora_down" in key for key in keys)
    alone = metadata.get(ALPHA_OF_PEFT) or (metadata.get(ALPHA_OF_KOHYA) if of_kohya else None)
    if SETTINGS in metadata:
        try:
            config = json.loads(metadata[SETTINGS])
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise ConfigError(f"{where} is no JSON object. Save the file again with diffusers.")
    elif any(key.startswith(OF_PEFT) for key in keys) and (beside := file.parent / BESIDE).is_file():
        config, where = read_json(beside), str(beside)
    elif alone:
        config = {ALPHA_OF_PEFT: alone}
    prefix = expert.value if any(key.startswith("transformer_2.") for key in config) else "transformer"
    config = {key.removeprefix(f"{prefix}."): value for key, value in config.items()}
    if config.get("use_dora"):
        text = "has `use_dora`, and only LoRA is read. Give a LoRA, or merge it into the model that it is for"
        raise ConfigError(f"{where} {text}.")
    return config


def _factor(file: Path, settings: dict[str, Any], names: list[str], rank: int) -> float:
    """Return the factor of a layer's B A by peft's settings.

    Args:
        names: diffusers' name of the layer, and its name in the file, which may be the original Wan's.
    """
    of_parts, alpha = settings.get("alpha_pattern") or {}, settings.get(ALPHA_OF_PEFT)
    try:
        fits = (a for part, a in of_parts.items() for n in names if re.fullmatch(rf"(.*\.)?({part})", n))
        alpha = next(fits, alpha)
        factor = 1.0 if alpha is None else float(alpha) / (sqrt(rank) if settings.get("use_rslora") else rank)
        if isfinite(factor):
            return factor
    except (AttributeError, TypeError, ValueError, re.error):
        pass
    wrong = f"`lora_alpha` {json.dumps(alpha)} and `alpha_pattern` {json.dumps(of_parts)}"
    raise ConfigError(f"{file}: its settings have {wrong}, which are no numbers. Save the file again.")
