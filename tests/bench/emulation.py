"""Milliseconds of square products on one core in bf16 and float32, and whether this CPU emulates bf16.

python tests/bench/emulation.py
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
for name, value in {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}.items():
    os.environ.setdefault(name, value)

import torch

from wandistiller.engine.kernels import emulates_bf16


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
    print("| size, product | float32 ms | bf16 ms | ratio |\n|---|---|---|---|")
    for size in (256, 512, 1024):
        for product, transposed in (("a b", False), ("a b^T", True)):
            one, other = (
                milliseconds(size, dtype, transposed=transposed) for dtype in (torch.float32, torch.bfloat16)
            )
            print(f"| {size}, {product} | {one:.1f} | {other:.1f} | {other / one:.0f} |")


if __name__ == "__main__":
    main()
