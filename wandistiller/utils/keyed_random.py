"""Random numbers that depend on a key alone: a run is the same on any number of ranks and after a resume."""

import hashlib

import torch
from torch import Tensor


def keyed_generator(*key: int | str) -> torch.Generator:
    """Return a CPU generator that depends on nothing but `key`: no rank, no world size, no earlier draw."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def keyed_normal(shape: torch.Size | tuple[int, ...], *key: int | str) -> Tensor:
    """Draw standard normal float32 numbers on the CPU, so that CPU and GPU runs see the same."""
    return torch.randn(shape, generator=keyed_generator(*key))
