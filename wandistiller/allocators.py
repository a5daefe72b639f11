"""How memory is allocated, where the user has not said otherwise; settled before torch is imported."""

import os

TORCH = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where the environment may have the settings of torch's allocators."""
ROUNDED = 1
"""MiB up to which page-locked memory is taken in powers of two."""
SETTINGS = f"expandable_segments:True,pinned_max_round_threshold_mb:{ROUNDED}"
"""Segments that grow leave no pieces too small to be used; larger page-locked blocks take what they need, not the next power of
two, which for an offloaded optimizer is many GiB (torch 2.13)."""


def settle() -> None:
    """Settle them for this process and those that it starts."""
    if not any(name in os.environ for name in TORCH):
        os.environ[TORCH[0]] = SETTINGS
