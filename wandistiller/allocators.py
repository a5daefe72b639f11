"""How memory is allocated, where the user has not said otherwise; settled before torch is imported."""

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
"""Larger blocks have pages of their own, which go back to the system when they are freed. glibc (2.36) by itself comes to keep
those of up to 32 MiB, most of a network's tensors, and holds about as much in holes between them as is in use."""


def settle() -> None:
    """Settle them for this process, and torch's for those that it starts."""
    if not any(name in os.environ for name in TORCH):
        os.environ[TORCH[0]] = SETTINGS
    if not any(name.startswith(GLIBC) for name in os.environ):
        with suppress(AttributeError):  # another C library
            for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
                ctypes.CDLL(None).mallopt(threshold, RETURNED)
