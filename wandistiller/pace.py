"""How fast a rank is at the same piece of work as all others, which it does alone: so that the slow one can be named."""

import time

import torch

from wandistiller.distributed import device

SIZE, TIMES = {"cpu": 512, "cuda": 2048}, {"cpu": 4, "cuda": 16}
"""Of the products: some 20 ms of a core, longer than the turns in which a system shares it out; 2 ms of a GPU."""


def pace() -> float:
    """Seconds that products of matrices take now, and on a GPU copies to it; in a step itself all wait for the slowest."""
    home = device()
    cuda, n = home.type == "cuda", SIZE[home.type]
    dtype = torch.bfloat16 if cuda else torch.float32
    given = torch.zeros(n, n, dtype=dtype, pin_memory=cuda)
    a, product = (torch.zeros(n, n, dtype=dtype, device=home) for _ in range(2))

    def work() -> None:
        for _ in range(TIMES[home.type]):
            a.copy_(given, non_blocking=True)
            torch.mm(a, a, out=product)

    if not cuda:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1000
