"""The config of a Wan transformer."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Self


@dataclass(frozen=True)
class TransformerConfig:
    """A config.json of diffusers' WanTransformer3DModel, checked by `checks.part_problems`."""

    raw: dict[str, Any]
    """All of its keys."""
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    ffn_dim: int
    text_dim: int
    in_channels: int
    """Channels of a latent, and of what is joined to it."""
    out_channels: int
    """Channels of a latent."""
    rope_max_seq_len: int
    """The most patches along an axis."""
    patch_size: tuple[int, int, int]
    """Of time, height and width, in latent pixels."""
    cross_attn_norm: bool
    image_dim: int | None = None
    """Width of the states of given frames; None: it takes none."""
    pos_embed_seq_len: int | None = None
    """Rows of these states where two frames are given, the first and the last; None: the first alone."""
    expands_time: bool = False
    """Latents begin with the given frame, whose time is 0; not in config.json, but in model_index.json."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Take the values of a config.json, or of a network's own config."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name != "raw" and f.name in values}
        return cls(dict(values), **known)

    def replaced(self, **values: Any) -> Self:
        """Return the config with other values of some keys."""
        return replace(self.of(self.raw | values), expands_time=self.expands_time)

    @property
    def joined_channels(self) -> int:
        """Channels that are joined to a latent: a mask of the given frames, and their latents."""
        return self.in_channels - self.out_channels

    @property
    def takes_image(self) -> bool:
        """True of an image-to-video Wan."""
        return self.expands_time or self.joined_channels > 0

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


NEEDED = [f.name for f in fields(TransformerConfig) if f.default is MISSING and f.name != "raw"]
"""Keys of a config.json without which the numbers here are not known."""
