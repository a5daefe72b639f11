"""Names of the original Wan's weights, which ComfyUI reads, for diffusers' names."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from wandistiller.wan.transformer_config import TransformerConfig

NAMES = (
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
    (r"^condition_embedder\.image_embedder\.pos_embed$", "img_emb.emb_pos"),
    (r"\.add_([kv])_proj\.", r".\1_img."),
    (r"\.norm_added_k\.", ".norm_k_img."),
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^proj_out\.", "head.head."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.norm2\.", ".norm3."),  # diffusers numbers norms in the order of use; only this one has weights
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
)
"""Patterns of diffusers' names, and the original ones."""
VAE_NAMES = """
    .norm1. .residual.0.   .conv1. .residual.2.   .norm2. .residual.3.   .conv2. .residual.6.
    .conv_shortcut. .shortcut.   .norm_out. .head.0.   .conv_out. .head.2.   .conv_in. .conv1.
    .mid_block.resnets.0. .middle.0.   .mid_block.attentions.0. .middle.1.   .mid_block.resnets.1. .middle.2.
    post_quant_conv. conv2.   quant_conv. conv1.
""".split()
"""Parts of names of diffusers' VAE, each with the original one behind it; numbers of blocks differ too."""
VAE_PART = re.compile(
    r"\.(?P<way>down|up)_blocks\.(?P<block>\d+)\.(?:resnets\.(?P<n>\d+)|\w+sampler(?:s\.0)?)\."
)
"""A part of one of a VAE's blocks: of its residual blocks one, or the change of size after them."""
PREFIXES = ("", "model.", "diffusion_model.", "model.diffusion_model.")
"""What may stand before the names in a single file; the last two ComfyUI writes."""
FIXED = {
    "attention_head_dim": 128,
    "patch_size": [1, 2, 2],
    "freq_dim": 256,
    "text_dim": 4096,
    "cross_attn_norm": True,
}
"""Settings that ComfyUI assumes for every Wan and does not read from the file."""


@cache
def original_name(name: str) -> str:
    """Return the original name of a parameter of diffusers' model, or of a module, with a dot at its end."""
    for pattern, becomes in NAMES:
        name = re.sub(pattern, becomes, name)
    return name


def original_vae_name(name: str, config: dict[str, Any]) -> str:
    """Return the original name of a parameter of diffusers' AutoencoderKLWan.

    Wan2.1's numbers all parts of a way in their order; Wan2.2's numbers them in each block.
    """

    def numbered(match: re.Match[str]) -> str:
        way, block = match["way"], int(match["block"])
        last = config.get("num_res_blocks", 2) + (way == "up")  # a decoder's blocks have one part more
        number = int(match["n"] or last)
        if config.get("is_residual"):
            return f".{way}samples.{block}.{way}samples.{number}."
        return f".{way}samples.{block * (last + 1) + number}."

    for part, becomes in zip(VAE_NAMES[::2], VAE_NAMES[1::2], strict=True):
        name = name.replace(part, becomes)
    return VAE_PART.sub(numbered, name).replace(".down_blocks.", ".downsamples.")


def names_in(
    file: Iterable[str],
    names: Iterable[str],
    spellings: Iterable[Callable[[str], str]] = (original_name, str),
) -> dict[str, str]:
    """Return the name in a file of each of diffusers' names, by the prefix and spelling that fit most."""
    there, spelled = {*file}, [(prefix, spell) for prefix in PREFIXES for spell in spellings]
    ways = [{name: prefix + spell(name) for name in names} for prefix, spell in spelled]
    return max(ways, key=lambda way: len(there & {*way.values()}))


def unlike_published(config: TransformerConfig) -> list[str]:
    """List the settings that differ from ComfyUI's assumptions; with any, only diffusers opens the file."""
    fixed = FIXED | ({"image_dim": 1280} if config.image_dim else {})
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in config.raw.items()}
    return [
        f"`{key}` is {json.dumps(settings[key])}; ComfyUI reads every Wan with {json.dumps(value)}, so it "
        "cannot open this file"
        for key, value in fixed.items()
        if settings.get(key, value) != value
    ]
