"""The config of a Wan transformer."""

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.modeling_utils import no_init_weights
from torch import Tensor, nn

from wandistiller.batch import Conditioning, State
from wandistiller.experts import Expert
from wandistiller.network.config import NetworkConfig
from wandistiller.wan import transformer
from wandistiller.wan.kernels import share_sequences, use_kernels
from wandistiller.wan.structure import BLOCK_CLASS, IMAGE_MAPS, PARTS
from wandistiller.wan.text_padding import TEXT_TOKENS, merge_text_padding
from wandistiller.wan.two_times import GATE, add_second_time, begin_second_time

IMAGE_ROWS = 257
"""States of a frame: of 16 x 16 patches, and of the whole; CLIP's ViT-H/14 at 224 pixels."""


@dataclass(frozen=True)
class TransformerConfig(NetworkConfig):
    """A config.json of diffusers' WanTransformer3DModel, checked by `checks.part_problems`."""

    kind: ClassVar[type[nn.Module]] = WanTransformer3DModel
    block_class: ClassVar[str] = BLOCK_CLASS
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = PARTS
    adapted_together: ClassVar[tuple[str, ...]] = IMAGE_MAPS
    text_tokens: ClassVar[int] = TEXT_TOKENS

    raw: dict[str, Any]
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    ffn_dim: int
    text_dim: int
    in_channels: int
    """Channels of a latent, and of what is joined to it."""
    out_channels: int
    rope_max_seq_len: int
    """The most patches along an axis."""
    patch_size: tuple[int, int, int]
    cross_attn_norm: bool
    image_dim: int | None = None
    """Width of the states of given frames; None: it takes none."""
    pos_embed_seq_len: int | None = None
    """Rows of these states where two frames are given, the first and the last; None: the first alone."""
    gate_value: float | None = None
    """Share of the second time in the embedding of a flow map; None: a Wan of one time."""
    expands_time: bool = False
    """Latents begin with the given frame, whose time is 0; not in config.json, but in model_index.json."""

    velocity = staticmethod(transformer.velocity)
    complete = staticmethod(begin_second_time)
    merge_text_padding = staticmethod(merge_text_padding)
    share_sequences = staticmethod(share_sequences)
    use_kernels = staticmethod(use_kernels)
    called_in_turn = staticmethod(transformer.called_in_turn)
    share_tables = staticmethod(transformer.share_rope)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        known = {f.name: values[f.name] for f in fields(cls) if f.name != "raw" and f.name in values}
        return cls(dict(values), **known)

    @classmethod
    def usual(cls, **sizes: Any) -> Self:
        """Return diffusers' default config, that of Wan2.1 14B, with other sizes."""
        parameters = inspect.signature(WanTransformer3DModel.__init__).parameters.values()
        return cls.of({p.name: p.default for p in parameters if p.name != "self"} | sizes)

    def replaced(self, **values: Any) -> Self:
        return replace(self.of(self.raw | values), expands_time=self.expands_time)

    @property
    def one_time(self) -> dict[str, Any]:
        return {key: value for key, value in self.raw.items() if key not in GATE}

    def with_second_time(self, has: bool = True) -> Self:
        raw = GATE | self.raw if has else self.one_time
        return replace(self.of(raw), expands_time=self.expands_time)

    @property
    def joined_channels(self) -> int:
        """Channels that are joined to a latent: a mask of the given frames, and their latents."""
        return self.in_channels - self.out_channels

    @property
    def takes_image(self) -> bool:
        return self.expands_time or self.joined_channels > 0

    @property
    def given_places(self) -> list[int]:
        return [0, -1] if self.pos_embed_seq_len else [0]

    @property
    def given_fields(self) -> list[str]:
        names = ["first_BCFHW" if self.expands_time else "joined_BCFHW"]
        return [*names, "image_BLD"] if self.image_dim else names

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    def meta(self, device: torch.device | None = None) -> WanTransformer3DModel:
        # torch draws even numbers that have no memory, half of the time
        with no_init_weights(), torch.device("meta"):
            model = self.new()
        transformer.renew_rope(model, device)
        return model

    def new(self) -> WanTransformer3DModel:
        model = WanTransformer3DModel.from_config(self.one_time)
        if self.gate_value is not None:
            add_second_time(model, self.gate_value)
        return model

    def blank_state(
        self,
        latent: tuple[int, ...],
        samples: int = 1,
        text_tokens: int | None = None,
        device: str | torch.device = "cpu",
    ) -> State:
        def empty(*shape: int) -> Tensor:
            return torch.empty(samples, *shape, device=device)

        channels, _, *sides = latent
        joined, rows = self.joined_channels, self.pos_embed_seq_len or IMAGE_ROWS
        conditioning = Conditioning(
            empty(text_tokens or self.text_tokens, self.text_dim),
            joined_BCFHW=empty(joined, *latent[1:]) if joined else None,
            first_BCFHW=empty(channels, 1, *sides) if self.expands_time else None,
            image_BLD=empty(rows, self.image_dim) if self.image_dim else None,
        )
        x_t_BCFHW, sigma_B, expert = empty(*latent), empty(), Expert.HIGH_NOISE
        return State(x_t_BCFHW=x_t_BCFHW, sigma_B=sigma_B, conditioning=conditioning, expert=expert)


NEEDED = [f.name for f in fields(TransformerConfig) if f.default is MISSING and f.name != "raw"]
"""Keys of a config.json without which the numbers here are not known."""
