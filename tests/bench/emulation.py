"""Milliseconds of square products on one core in bf16 and float32, and whether this CPU emulates bf16.

python tests/bench/emulation.py
"""

import time

from common import head, on_cpu, row

on_cpu()

import torch

from wandistiller.distributed.device import emulates_bf16


def milliseconds(size: int, dtype: torch.dtype, *, transposed: bool) -> float:
    """The best of three, in CPU time."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    times = []
    for _ in range(3):
        began = time.thread_time()
        a @ (b.T if transposed else b)
        times.append(time.thread_time() - began)
    return 1000 * min(times)


def main() -> None:
    print(f"bf16 is {'emulated' if emulates_bf16() else 'computed by instructions'} here\n")
    head("size, product", "float32 ms", "bf16 ms", "ratio")
    for size in (256, 512, 1024):
        for product, transposed in (("a b", False), ("a b^T", True)):
            one, other = (
                milliseconds(size, dtype, transposed=transposed) for dtype in (torch.float32, torch.bfloat16)
            )
            row(f"{size}, {product}", f"{one:.1f}", f"{other:.1f}", f"{other / one:.0f}")


if __name__ == "__main__":
    main()
