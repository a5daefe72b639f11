"""Settings of torch's memory allocators, unless the user has set them."""

import os

TORCH = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that hold them."""
ROUNDED = 1
"""MiB up to which page-locked memory is allocated in powers of two."""
SETTINGS = f"expandable_segments:True,pinned_max_round_threshold_mb:{ROUNDED}"
"""Segments that grow leave no fragments too small to use. Page-locked blocks over 1 MiB take their own size,
not the next power of two, which for an offloaded optimizer is many GiB more (torch 2.13)."""


def set_defaults() -> None:
    """Set them for this process and those that it starts; before torch is imported."""
    if not any(name in os.environ for name in TORCH):
        os.environ[TORCH[0]] = SETTINGS
