"""The config of a Wan transformer."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class TransformerConfig:
    """A config.json of diffusers' WanTransformer3DModel, checked by `checks.transformer_problems`."""

    raw: dict[str, Any]
    """All of its keys."""
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    ffn_dim: int
    text_dim: int
    in_channels: int
    """Channels of a latent."""
    out_channels: int
    rope_max_seq_len: int
    """The most patches along an axis."""
    patch_size: tuple[int, int, int]
    """Of time, height and width, in latent pixels."""
    cross_attn_norm: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Take the values of a config.json, or of a network's own config."""
        return cls(dict(values), **{f.name: values[f.name] for f in fields(cls) if f.name != "raw"})

    def replaced(self, **values: Any) -> Self:
        """Return the config with other values of some keys."""
        return self.of(self.raw | values)

    @property
    def width(self) -> int:
        """Width of a hidden state."""
        return self.num_attention_heads * self.attention_head_dim
