"""How memory is allocated, where the user has not said otherwise."""

import ctypes
import os
from contextlib import suppress

TORCH = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where the environment may have the settings of torch's allocators."""
ROUNDED = 1
"""MiB up to which page-locked memory is taken in powers of two."""
SETTINGS = f"expandable_segments:True,pinned_max_round_threshold_mb:{ROUNDED}"
"""Segments that grow leave no pieces too small to be used; larger page-locked blocks take what they need, not the next power of
two, which for an offloaded optimizer is many GiB (torch 2.13)."""
GLIBC = ("MALLOC_", "GLIBC_TUNABLES")
"""How the settings of the C library's allocator begin in the environment."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
RETURNED = 2**20
"""Bytes of a block from which it has pages of its own, which go back to the system when it is freed. glibc (2.36) by itself comes
to keep those of up to 32 MiB, most of a network's tensors, and holds about as much in holes between them as is in use."""
LARGE = 16_000_000
"""Parameters of a network from which that is worth its price: the kernel empties each new page, which halves the speed of a small
network's steps, whose holes are small too, and costs a large one's a sixth at most (tests/bench/allocator.py)."""


def settle() -> None:
    """Settle torch's for this process and those that it starts."""
    if not any(name in os.environ for name in TORCH):
        os.environ[TORCH[0]] = SETTINGS


def settle_for(parameters: int) -> None:
    """Settle the C library's for this process, whose largest network has so many parameters."""
    if parameters < LARGE or any(name.startswith(GLIBC) for name in os.environ):
        return
    with suppress(AttributeError):  # another C library
        for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, RETURNED)
