"""Weights of the blocks' linear layers in 8 or 4 bits, by torchao; parameters as they lie in memory."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from wandistiller.engine.ds_schema import BLOCK
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.network.names import is_in_block, parameter_dtype
from wandistiller.network.weight_reader import WeightReader
from wandistiller.utils.validation import write

KEY = f"{BLOCK}.weights"
Weights = Annotated[
    Literal["int8", "float8", "nf4"] | None, write("int8, float8 or nf4, which takes 4 bits, or leave it out")
]
"""Format of the linear layers of `blocks.*`; None: the JSON's precision, as all other parameters.

`int8` and `float8` (e4m3) have a scale for each row. `nf4` is the 4-bit format of Dettmers et al. 2023,
arXiv:2305.14314: 16 levels, a scale for each 64 elements, and these scales in 8 bits. torchao's int4 formats
are laid out for one kind of device each (tinygemm's tiles, mslk, oneDNN), so that they cannot lie in CPU
memory and be computed on a GPU, or take 8 bits (torchao 0.18).
"""
TORCHAO = "0.18"
NF4_BLOCK = 64
"""Elements with a scale of their own."""
NF4_SCALES = 256
"""Such scales, at most, with a factor of their own."""


def is_quantized(name: str, shape: torch.Size | list[int], weights: Weights) -> bool:
    """Return whether a parameter is the weight of a linear layer in a block, which `weights` can hold."""
    if not (weights and is_in_block(name) and name.endswith(".weight") and len(shape) == 2):
        return False
    return weights != "nf4" or math.prod(shape) % NF4_BLOCK == 0


def stored_sizes(shape: torch.Size | list[int], weights: Weights, item: int) -> list[tuple[int, int]]:
    """Return elements, and bytes of each, of the tensors that a weight is stored as.

    Args:
        shape: the weight's.
        item: bytes of an element in the JSON's precision.
    """
    rows, n = shape[0], math.prod(shape)
    if weights == "int8":
        return [(n, 1), (rows, 4), (rows, 1)]  # with scale and zero point
    if weights == "float8":
        return [(n, 1), (rows, 4)]
    scales = n // NF4_BLOCK
    # two to a byte; the scales' mean, their factors, the scales, and the 16 levels
    return [(n // 2, 1), (1, item), (scales // _nf4_scales(n), item), (scales, 1), (16, item)]


def unpacked_bytes(n: int, weights: Weights, item: int) -> int:
    """Return the most bytes that a linear layer of `n` weights takes for them in its call (torchao 0.18).

    int8 becomes the JSON's precision; float8 comes there through two copies in float32; nf4 through the
    numbers of its levels, in 8 bytes, and three copies.
    """
    if weights == "int8":
        return n * item
    return n * (8 + item % 4) if weights == "float8" else n * (8 + 3 * item)


def unpacked_until_backward(n: int, weights: Weights, item: int) -> int:
    """Return the bytes of them that autograd keeps where the layer's input has a gradient (torchao 0.18).

    nf4 is unpacked anew in the backward pass.
    """
    return 0 if weights == "nf4" else n * item


def missing_problems(engine: EngineConfig, weights: Weights) -> list[str]:
    if not weights:
        return []
    remedy = f'Run: pip install "torchao=={TORCHAO}.*"'
    try:
        installed = version("torchao")
    except PackageNotFoundError:
        return [engine.problem(KEY, weights, f"It needs torchao. {remedy}")]
    if installed.startswith(f"{TORCHAO}."):
        return []
    return [engine.problem(KEY, weights, f"It needs torchao {TORCHAO}, and here is {installed}. {remedy}")]


def quantized(value: Tensor, weights: Weights) -> Tensor:
    """Quantise a weight as torchao's own configurations do; the result is a subclass of Tensor."""
    from torchao.quantization import Float8Tensor, Int8Tensor, NF4Tensor, PerRow

    if weights == "int8":
        return Int8Tensor.from_hp(value, granularity=PerRow())
    if weights == "float8":
        return Float8Tensor.from_hp(value, float8_dtype=torch.float8_e4m3fn, granularity=PerRow())
    return NF4Tensor.from_tensor(value, NF4_BLOCK, _nf4_scales(value.numel()))


def tensors_of(weight: Tensor) -> list[Tensor]:
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


@cache
def on_meta(shape: torch.Size, dtype: torch.dtype, weights: Weights) -> Tensor:
    """Return a quantised weight without memory."""
    return quantized(torch.empty(shape, dtype=dtype, device="meta"), weights)


def made_of(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Return a quantised weight that is made of these tensors, which it shares; all else as in `like`."""
    names, context = like.__tensor_flatten__()
    if "tensor_meta" in context:  # nf4 keeps a device apart from its tensors' (torchao 0.18)
        context = context | {"tensor_meta": replace(context["tensor_meta"], device=tensors[0].device)}
    named = dict(zip(names, tensors, strict=True))
    return type(like).__tensor_unflatten__(named, context, like.shape, like.stride())


def _nf4_scales(n: int) -> int:
    """Scales with one factor: torchao 0.18 takes no rest, and small layers have fewer than 256."""
    return math.gcd(n // NF4_BLOCK, NF4_SCALES)


LoadShare = tuple[int, int]
"""A rank's number among those that load one copy together, and how many they are."""
WHOLE: LoadShare = (0, 1)


class StoredWeight:
    """A parameter in its own dtype; each rank reads a part of it."""

    def __init__(self, meta: Tensor):
        self.pieces = [meta]
        """Meta tensors of the shapes and dtypes that it is stored as."""

    def assembled(self, pieces: list[Tensor]) -> Tensor:
        """Return the parameter that `pieces` are, which it shares."""
        return pieces[0]

    def read(
        self, reader: WeightReader, name: str, pieces: list[Tensor], share: LoadShare, device: torch.device
    ) -> None:
        """Fill `pieces`, or the share of a rank; what is computed for it is computed on `device`."""
        (value,), (number, ranks) = pieces, share
        part = -(-value.numel() // ranks)
        first = part * number
        reader.read(name, value.view(-1)[first : first + part], first)


class Quantized(StoredWeight):
    """A quantised weight; one rank reads and quantises all of it, as its scales belong to many elements."""

    def __init__(self, meta: Tensor, weights: Weights, reads: int):
        """`reads`: the number of that rank."""
        self._meta, self._weights, self._reads = meta, weights, reads
        self._like = on_meta(meta.shape, meta.dtype, weights)
        self.pieces = tensors_of(self._like)

    def assembled(self, pieces: list[Tensor]) -> Tensor:
        return made_of(pieces, self._like)

    def read(
        self, reader: WeightReader, name: str, pieces: list[Tensor], share: LoadShare, device: torch.device
    ) -> None:
        if share[0] == self._reads:
            value = torch.empty_like(self._meta, device=device)
            reader.read(name, value)
            for piece, made in zip(pieces, tensors_of(quantized(value, self._weights)), strict=True):
                piece.copy_(made)


def stored_weights_of(
    model: nn.Module, dtype: torch.dtype, weights: Weights, ranks: int = 1
) -> dict[str, StoredWeight]:
    """Return how each parameter of a meta model is stored, by name.

    Args:
        ranks: ranks that load one copy together; each quantises about as many elements.
    """
    stored: dict[str, StoredWeight] = {}
    loads = [0] * ranks
    for name, meta in parameters_of(model, dtype):
        if is_quantized(name, meta.shape, weights):
            reads = loads.index(min(loads))
            loads[reads] += meta.numel()
            stored[name] = Quantized(meta, weights, reads)
        else:
            stored[name] = StoredWeight(meta)
    return stored


def parameters_of(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, p in list(model.named_parameters()):
        yield name, p.to(parameter_dtype(model, name, dtype))
