"""Memory of text encoder and VAE, traced with fake tensors, which take no memory, through our own calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.activation_memory import Live
from wandistiller.wan.components import text_encoder_of, vae_of
from wandistiller.wan.encoders import decoded, encoded, states
from wandistiller.wan.text_padding import TEXT_TOKENS

ON_CPU = 1.4
"""Margin for memory of the C library and the CPU's convolutions next to tensors: in all 1.2 to 1.4 times
as much at 480x832, up to 1.9 times at 256x256, which is below half a GiB more (tests/bench/vae_memory.py)."""
CHUNKS = 3
"""Calls after which memory repeats: the VAE codes four frames after four, and keeps two."""


class Need(NamedTuple):
    """Bytes."""

    weights: int
    work: int
    """Peak of all else, input and output included."""


@once_for_each
def text_encoding(config: dict[str, Any], dtype: str, *, accelerator: bool) -> Need:
    """Memory of the text encoder of this config for one prompt."""
    with FakeTensorMode(), torch.no_grad():
        encoder = text_encoder_of(config, getattr(torch, dtype))
        with Live() as live:
            token_BL = torch.zeros(1, TEXT_TOKENS, dtype=torch.long)
            states(encoder, token_BL, torch.ones_like(token_BL))
    return _need(encoder, live, accelerator)


def encoding(vae: dict[str, Any], pixels: tuple[int, ...], *, accelerator: bool) -> Need:
    """Memory of the VAE of this config to encode pixels_BCFHW of this shape."""
    return _coding(vae, "encoder", pixels, 1 + (pixels[2] - 1) // 4, accelerator)


def decoding(vae: dict[str, Any], latents: tuple[int, ...], *, accelerator: bool) -> Need:
    """Memory of the VAE of this config to decode latents of this shape, (B, C, F, H, W)."""
    return _coding(vae, "decoder", latents, latents[2], accelerator)


@once_for_each
def _coding(config: dict[str, Any], part: str, shape: tuple[int, ...], calls: int, accelerator: bool) -> Need:
    """Memory of one part of the VAE, which is called for every four frames."""
    with FakeTensorMode(), torch.no_grad():
        vae = vae_of(config)
        with shortened(getattr(vae, part), calls), Live() as live:
            (decoded if part == "decoder" else encoded)(vae, torch.empty(shape))
    return _need(vae, live, accelerator)


def _need(model: nn.Module, live: Live, accelerator: bool) -> Need:
    weights = sum(p.nbytes for p in model.parameters())
    return Need(weights, live.most if accelerator else int(ON_CPU * live.most))


@contextmanager
def shortened(network: nn.Module, calls: int) -> Iterator[None]:
    """Run only the first CHUNKS calls and the last of the `calls` that code a video; skip the others."""
    forward, shapes = network.forward, []

    def call(x: Tensor, **more: Any) -> Tensor:
        skipped = CHUNKS <= len(shapes) < calls - 1
        out = x.new_empty(shapes[-1]) if skipped else forward(x, **more)
        shapes.append(out.shape)
        return out

    network.forward = call
    yield
    network.forward = forward
