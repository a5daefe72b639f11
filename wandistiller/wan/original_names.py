"""Names of the original Wan's weights, which ComfyUI reads, for diffusers' names."""

import json
import re

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
FIXED = {
    "attention_head_dim": 128,
    "patch_size": [1, 2, 2],
    "freq_dim": 256,
    "text_dim": 4096,
    "cross_attn_norm": True,
}
"""Settings that ComfyUI assumes for every Wan and does not read from the file."""


def original_name(name: str) -> str:
    """Return the original name of a parameter of diffusers' model, or of a module, with a dot at its end."""
    for pattern, becomes in NAMES:
        name = re.sub(pattern, becomes, name)
    return name


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
