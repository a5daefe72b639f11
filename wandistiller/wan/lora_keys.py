"""Keys of LoRA files, as trainers write them: which layer of diffusers' Wan each is of, and what of it."""

import re
from collections import Counter
from typing import NamedTuple

from wandistiller.network.names import in_block
from wandistiller.wan.original_names import original_name
from wandistiller.wan.structure import ATTENTIONS, IMAGE_MAPS

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
KINDS = {
    "norms": "norm",
    "biases": r"(?:diff_b|bias)$",
    "layers of images": r"[kv]_img|img_emb|add_[kv]_proj|image_embedder",
    "tables": "modulation|scale_shift_table",
    "convolutions": "patch_embedding",
    "text encoders": "lora_te|text_encoder",
}
"""What keys change that are left out, and what they have."""
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
    """Say that keys of a file are left out, and how many of which kind."""
    kinds = (next((kind for kind, has in KINDS.items() if re.search(has, key)), "others") for key in keys)
    listed = ", ".join(f"{kind} {number}" for kind, number in sorted(Counter(kinds).items()))
    text = f"{len(keys)} of its keys change no weight of a linear layer that is here and are left out"
    return f"{text}, such as {keys[0]} ({listed})"
