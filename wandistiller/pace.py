"""How fast a rank is at the same piece of work as all others, which it does alone: so that the slow one can be named."""

import time

import torch

from wandistiller.distributed import device

SIZE, TIMES = {"cpu": 512, "cuda": 2048}, {"cpu": 4, "cuda": 16}
"""Of the products: some 20 ms of a core, longer than the turns in which a system shares it out; 2 ms of a GPU."""


class Pace:
    """Products of matrices, and on a GPU copies to it; in a step itself all wait for the slowest, in many places."""

    def __init__(self) -> None:
        self._device = device()
        self._cuda, n = self._device.type == "cuda", SIZE[self._device.type]
        dtype = torch.bfloat16 if self._cuda else torch.float32
        self._given = torch.zeros(n, n, dtype=dtype, pin_memory=self._cuda)
        self._a, self._product = (torch.zeros(n, n, dtype=dtype, device=self._device) for _ in range(2))

    def measure(self) -> float:
        """Seconds for it, now."""
        if not self._cuda:
            began = time.perf_counter()
            self._work()
            return time.perf_counter() - began
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        self._work()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1000

    def _work(self) -> None:
        for _ in range(TIMES[self._device.type]):
            self._a.copy_(self._given, non_blocking=True)
            torch.mm(self._a, self._a, out=self._product)
