"""The same bits in every run on GPUs, whose kernels may add in any order."""

import os

import torch


def make_deterministic() -> None:
    """Let torch take kernels with one order of additions alone; before the first product on a GPU.

    Attention's backward passes, for one, add with atomics else. Source: torch 2.13, notes on randomness.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS, on several streams
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
