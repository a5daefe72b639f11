"""Memory of text encoder and VAE, from traces of our own calls on tensors without memory."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wandistiller.wan.activation_memory import Live
from wandistiller.wan.components import text_encoder_of, vae_of
from wandistiller.wan.encoders import decoded, encoded, states
from wandistiller.wan.transformer import TEXT_TOKENS

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


def text_encoding(config: dict[str, Any], dtype: torch.dtype, *, accelerator: bool) -> Need:
    """Memory of the text encoder of this config for one prompt."""
    return _with_margin(_text_encoding(json.dumps(config, sort_keys=True), dtype), accelerator)


def encoding(vae: dict[str, Any], pixels: tuple[int, ...], *, accelerator: bool) -> Need:
    """Memory of the VAE of this config to encode pixels_BCFHW of this shape."""
    return _with_margin(_coding(json.dumps(vae, sort_keys=True), "encoder", pixels), accelerator)


def decoding(vae: dict[str, Any], latents: tuple[int, ...], *, accelerator: bool) -> Need:
    """Memory of the VAE of this config to decode latents of this shape, (B, C, F, H, W)."""
    return _with_margin(_coding(json.dumps(vae, sort_keys=True), "decoder", latents), accelerator)


def _with_margin(need: Need, accelerator: bool) -> Need:
    return need if accelerator else Need(need.weights, int(ON_CPU * need.work))


@cache
def _text_encoding(config: str, dtype: torch.dtype) -> Need:
    with FakeTensorMode(), torch.no_grad():
        encoder = text_encoder_of(json.loads(config), dtype)
        with Live() as live:
            token_BL = torch.zeros(1, TEXT_TOKENS, dtype=torch.long)
            states(encoder, token_BL, torch.ones_like(token_BL))
    return Need(_weights(encoder), live.most)


@cache
def _coding(config: str, part: str, shape: tuple[int, ...]) -> Need:
    with FakeTensorMode(), torch.no_grad():
        vae = vae_of(json.loads(config))
        calls = shape[2] if part == "decoder" else 1 + (shape[2] - 1) // 4
        with shortened(getattr(vae, part), calls), Live() as live:
            (decoded if part == "decoder" else encoded)(vae, torch.empty(shape))
    return Need(_weights(vae), live.most)


def _weights(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@contextmanager
def shortened(network: nn.Module, calls: int) -> Iterator[None]:
    """Run only the first CHUNKS calls and the last of those that code a video; skip the others."""
    forward, shapes = network.forward, []

    def call(x: Tensor, **more: Any) -> Tensor:
        skipped = CHUNKS <= len(shapes) < calls - 1
        out = x.new_empty(shapes[-1]) if skipped else forward(x, **more)
        shapes.append(out.shape)
        return out

    network.forward = call
    yield
    network.forward = forward
