"""Settings of torch's memory allocators and of the C library's, unless the user has set them."""

import ctypes
import os
from contextlib import suppress

TORCH = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that hold them."""
ROUNDED = 1
"""MiB up to which page-locked memory is allocated in powers of two."""
SETTINGS = f"expandable_segments:True,pinned_max_round_threshold_mb:{ROUNDED}"
"""Segments that grow leave no fragments too small to use. Page-locked blocks over 1 MiB take their own size,
not the next power of two, which for an offloaded optimizer is many GiB more (torch 2.13)."""
KEPT = 512 * 2**20
"""Bytes of freed memory that the C library keeps at most, at the end of its heap."""
C_LIBRARY = {-3: 32 * 2**20, -1: KEPT}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's mallopt(3), in bytes: smaller blocks are reused, and freed
memory at the end of the heap is kept up to the second. By its own rules a training step on a CPU gives its
activations back to the system and takes them again: up to 60,000 page faults a step of the quick start, which
is 5 to 20 % of its time (glibc 2.36, tests/bench/overhead.py). The end of a phase returns all of it."""


def set_defaults() -> None:
    """Set them for this process, torch's also for those that it starts; before torch is imported."""
    if not any(name in os.environ for name in TORCH):
        os.environ[TORCH[0]] = SETTINGS
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        with suppress(OSError, AttributeError):  # another C library
            for parameter, value in C_LIBRARY.items():
                ctypes.CDLL(None).mallopt(parameter, value)
