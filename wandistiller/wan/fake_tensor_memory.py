"""Memory of text encoder and VAE, traced without taking any, through our own calls."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import product
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wandistiller.network.activation_memory import META, FusedAttention, Live
from wandistiller.network.folder import Need
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.components import decoded, encoded, states, text_encoder_of, vae_of
from wandistiller.wan.text_padding import TEXT_TOKENS

ON_CPU = 1.4
"""Margin for memory of the C library and the CPU's convolutions next to tensors: in all 1.2 to 1.4 times
as much at 480x832, up to 1.9 times at 256x256, which is below half a GiB more (tests/bench/vae_memory.py)."""
TILES_ON_CPU = 448 * 2**20
"""Bytes on top of that for tiles: their many sizes of tensors leave more freed memory with the C library; in
all up to twice as much at 480x832 (tests/bench/vae_memory.py)."""
CHUNKS = 3
"""Calls after which memory repeats: the VAE codes four frames after four, and keeps two."""

STRIDE, OVERLAP, UNIT = 192, 64, 16
"""Pixels between tiles of the VAE, about, and of two tiles blended, as in diffusers; strides' divisor."""
JOINED = 3
"""Copies of the result of a call in tiles, or of a batch, at its end."""
Config = dict[str, Any]
"""The VAE's."""
OF_VAE = signature(AutoencoderKLWan.__init__).parameters
USUAL: Config = {key: p.default for key, p in OF_VAE.items() if p.default is not p.empty}
"""What a VAE has where its config names nothing."""
Shape = tuple[int, ...]


@once_for_each
def text_encoding(config: dict[str, Any], dtype: str, *, accelerator: bool) -> Need:
    """Memory of the text encoder of this config for one prompt.

    Its second layer and all after it take the same, one after the other, so two are traced.
    """
    layers = config.get("num_layers", 0)
    with FakeTensorMode(), torch.no_grad():
        two = config | {"num_layers": 2} if layers > 2 else config
        encoder = text_encoder_of(two, getattr(torch, dtype))
        with Live() as live:
            token_BL = torch.zeros(1, TEXT_TOKENS, dtype=torch.long)
            states(encoder, token_BL, torch.ones_like(token_BL))
    need, block = _need(encoder, live, accelerator), encoder.encoder.block[-1]
    others = max(0, layers - 2) * sum(p.nbytes for p in block.parameters())
    return need._replace(weights=need.weights + others)


def coding(call: str, config: Config, shape: Shape, *, accelerator: bool, tiles: bool = False) -> Need:
    """Memory of a call of the VAE, whole or in tiles; of a batch it takes one sample at a time.

    Args:
        call: `encode` or `decode`.
        shape: of its input, pixels_BCFHW or latents_BCFHW.
    """
    # as read from a file and as of a VAE that is loaded: one key of what is cached below
    config = USUAL | {key: value for key, value in config.items() if not key.startswith("_")}
    batch, sample, part = shape[0], (1, *shape[1:]), f"{call}r"
    weights, work = (_in_tiles if tiles else _coding)(config, part, sample, accelerator)
    taken, made = 4 * math.prod(sample), _result(config, part, sample)
    work = max(work + (batch - 1) * (taken + made), batch * (taken + JOINED * made))
    return Need(weights, work if accelerator else int(ON_CPU * work) + (TILES_ON_CPU if tiles else 0))


@once_for_each
def _coding(config: Config, part: str, shape: Shape, accelerator: bool) -> Need:
    """Memory of one part of the VAE, which is called for every four frames."""
    calls = shape[2] if part == "decoder" else 1 + (shape[2] - 1) // 4
    with META, FusedAttention(), torch.no_grad():
        vae = vae_of(config)
        with shortened(getattr(vae, part), calls), Live(cudnn=accelerator) as live:
            (decoded if part == "decoder" else encoded)(vae, torch.empty(shape))
    return _need(vae, live, accelerator=True)  # the margin of a CPU is of a whole batch


@once_for_each
def _in_tiles(config: Config, part: str, shape: Shape, accelerator: bool) -> Need:
    """Memory of one part of the VAE in diffusers' overlapping tiles; that of the whole if it is one tile.

    All finished tiles are held, of the last its parts too, and at the end three copies of the result: tiles
    without their overlap, joined, and with its values limited.
    """
    *ends, height, width = shape
    patch = config.get("patch_size") or 1
    pixels = 1 if part == "encoder" else config.get("scale_factor_spatial", 8)
    tall, wide = (_tiles(n * pixels, pixels) for n in (height, width))
    if len(tall) == len(wide) == 1:
        return _coding(config, part, shape, accelerator)
    copies = 2 if part == "encoder" and patch > 1 else 1  # pixels, and patches of them
    held = peak = copies * 4 * math.prod(shape)
    last = 0
    for h, w in product(tall, wide):
        weights, work = _coding(config, part, (*ends, h, w), accelerator)
        peak = max(peak, held + last + work - copies * 4 * math.prod((*ends, h, w)))  # a view of all
        last = _result(config, part, (*ends, h, w))
        held += last
    return Need(weights, max(peak, held + last + JOINED * _result(config, part, shape)))


def tile(length: int) -> tuple[int, int]:
    """Return side and stride, in pixels, of the tiles along an axis of so many; at least that if it is one.

    The strides are nearly equal, so that the last tile, which begins at the last stride, is no sliver, in
    which the VAE's attention would find little to compare.
    """
    stride = -(-length // max(1, round(length / STRIDE)) // UNIT) * UNIT
    return stride + OVERLAP, stride


def _tiles(length: int, unit: int) -> list[int]:
    """Return the lengths of the tiles along an axis of so many pixels, in units of so many."""
    side, stride = tile(length)
    if length <= side:
        return [length // unit]
    return [min(side, length - start) // unit for start in range(0, length, stride)]


def _result(config: Config, part: str, shape: Shape) -> int:
    """Count the bytes of the pixels or of the posterior's parameters that a call gives, in float32."""
    batch, _, frames, height, width = shape
    factor, side = config.get("scale_factor_temporal", 4), config.get("scale_factor_spatial", 8)
    if part == "decoder":
        return 4 * batch * 3 * (1 + factor * (frames - 1)) * height * side * width * side
    return 4 * batch * 2 * config["z_dim"] * (1 + (frames - 1) // factor) * (height // side) * (width // side)


def _need(model: nn.Module, live: Live, accelerator: bool) -> Need:
    weights = sum(p.nbytes for p in model.parameters())
    return Need(weights, live.most if accelerator else int(ON_CPU * live.most))


@contextmanager
def shortened(network: nn.Module, calls: int) -> Iterator[None]:
    """Run only the first CHUNKS calls and the last of the `calls` that code a video; skip the others."""
    forward, shapes = network.forward, []

    def call(x: Tensor, **cache: Any) -> Tensor:
        skipped = CHUNKS <= len(shapes) < calls - 1
        out = x.new_empty(shapes[-1]) if skipped else forward(x, **cache)
        shapes.append(out.shape)
        return out

    network.forward = call
    yield
    network.forward = forward
