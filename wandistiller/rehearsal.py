"""The memory that text encoder and VAE take at work: our own calls of them, on tensors that have sizes but no memory."""

import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wandistiller.conditioning import states
from wandistiller.latents import decoded, encoded
from wandistiller.pipeline_parts import text_encoder_of, vae_of
from wandistiller.wan import TEXT_TOKENS

HEAP = 32 * 2**20
"""Bytes from which glibc asks the system for a block and gives it back at once; smaller ones come out of its heap."""
HOLES = 1.5
"""What that heap grows to, times the most that was in it at once (tests/bench/vae_memory.py)."""
CHUNKS = 3
"""Calls after which every further one finds and leaves the same: the VAE codes four frames after four, and keeps two."""


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside, each storage once and for as long as anything holds it."""

    def __init__(self, *, accelerator: bool = True):
        """Without an accelerator what the CPU's convolutions and the C library take beside tensors is counted too."""
        super().__init__()
        self.accelerator, self.most = accelerator, 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._large = self._small = self._heap = 0

    @property
    def now(self) -> int:
        """Bytes of the tensors that are there."""
        return self._large + self._small

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known.update(_storages((args, kwargs)))  # weights, of which a view may come out
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage not in self._known:
                self._known.add(storage)
                weakref.finalize(storage, self._add, -storage.nbytes())
                self._add(storage.nbytes())
        if func is torch.ops.aten.convolution.default and not self.accelerator:
            taken = _workspace(args[0], args[1], out)
            self._add(taken)
            self._add(-taken)
        return out

    def _add(self, nbytes: int) -> None:
        if self.accelerator or abs(nbytes) >= HEAP:
            self._large += nbytes
        else:
            self._small += nbytes
            self._heap = max(self._heap, self._small)
        self.most = max(self.most, self._large + int(HOLES * self._heap))


def _storages(tensors: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, Tensor)]


def _workspace(source: Tensor, weight: Tensor, out: Tensor) -> int:
    """Bytes that oneDNN's convolution takes beside its tensors (measured, on a CPU with AVX-512).

    A kernel of a single point takes nothing; another one a copy, in oneDNN's own order, of the weights and of the larger of
    input and output; where channels fill no register, all inputs of each output side by side.
    """
    points, channels = math.prod(weight.shape[2:]), weight.shape[1]
    if points == 1:
        return 0
    if channels > 4 and channels % 8:
        return out.nbytes // weight.shape[0] * channels * points
    return weight.nbytes + max(source.nbytes, out.nbytes)


class Need(NamedTuple):
    """Bytes."""

    weights: int
    work: int
    """The most of all else at once, input and output included."""


def text_encoding(config: dict[str, Any], dtype: torch.dtype, *, accelerator: bool) -> Need:
    """What the text encoder of this config takes for a prompt."""
    return _text_encoding(json.dumps(config, sort_keys=True), dtype, accelerator)


def encoding(vae: dict[str, Any], pixels: tuple[int, ...], *, accelerator: bool) -> Need:
    """What the VAE of this config takes to encode pixels_BCFHW of this shape."""
    return _coding(json.dumps(vae, sort_keys=True), "encoder", pixels, accelerator)


def decoding(vae: dict[str, Any], latents: tuple[int, ...], *, accelerator: bool) -> Need:
    """What the VAE of this config takes to decode latents of this shape, (B, C, F, H, W)."""
    return _coding(json.dumps(vae, sort_keys=True), "decoder", latents, accelerator)


@cache
def _text_encoding(config: str, dtype: torch.dtype, accelerator: bool) -> Need:
    with FakeTensorMode(), torch.no_grad():
        encoder = text_encoder_of(json.loads(config), dtype)
        with Live(accelerator=accelerator) as live:
            token_BL = torch.zeros(1, TEXT_TOKENS, dtype=torch.long)
            states(encoder, token_BL, torch.ones_like(token_BL))
    return Need(_weights(encoder), live.most)


@cache
def _coding(config: str, part: str, shape: tuple[int, ...], accelerator: bool) -> Need:
    with FakeTensorMode(), torch.no_grad():
        vae = vae_of(json.loads(config))
        calls = shape[2] if part == "decoder" else 1 + (shape[2] - 1) // 4
        with shortened(getattr(vae, part), calls), Live(accelerator=accelerator) as live:
            (decoded if part == "decoder" else encoded)(vae, torch.empty(shape))
    return Need(_weights(vae), live.most)


def _weights(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@contextmanager
def shortened(network: nn.Module, calls: int) -> Iterator[None]:
    """Of the many calls of a VAE's encoder or decoder for one video, let only the first CHUNKS and the last really happen."""
    forward, shapes = network.forward, []

    def call(x: Tensor, **more: Any) -> Tensor:
        skipped = CHUNKS <= len(shapes) < calls - 1
        out = x.new_empty(shapes[-1]) if skipped else forward(x, **more)
        shapes.append(out.shape)
        return out

    network.forward = call
    yield
    network.forward = forward
