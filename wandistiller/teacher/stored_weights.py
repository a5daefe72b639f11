"""Parameters of a network as they are stored in memory: plain, or quantised, as several tensors."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from wandistiller.teacher.quantized import Weights, is_quantized, made_of, on_meta, quantized, tensors_of
from wandistiller.wan.transformer import parameter_dtype
from wandistiller.wan.weight_reader import WeightReader

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
        yield name, p.to(parameter_dtype(name, dtype))
