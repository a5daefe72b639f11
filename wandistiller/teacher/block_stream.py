"""A network whose blocks lie in CPU memory and come to the device one after the other, into two buffers."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BUFFERS = 2
"""One for the block that is computed, one for the next, which arrives meanwhile."""


class BlockStream:
    """Copies the blocks' weights to the device just before they are needed, each once for a sweep.

    A block's parameters are views of one of the buffers, so nothing is allocated in a call. While the device
    computes a block, the next one is copied into the other buffer, whose block was computed before.
    """

    def __init__(self, blocks: nn.ModuleList, stored: list[Tensor], buffers: list[Tensor]):
        """Hook `blocks`, whose parameters are views of the buffers in turn.

        Args:
            stored: the weights of each block in CPU memory, bytes as they lie in a buffer.
            buffers: bytes on the device.
        """
        self._stored, self.buffers = stored, buffers
        self.held: list[int | None] = [None] * BUFFERS
        """Number of the block in each buffer, or on its way there."""
        self._now: int | None = None
        on_gpu = buffers[0].is_cuda
        self._copies = torch.cuda.Stream(buffers[0].device) if on_gpu else None
        self._arrived = [torch.cuda.Event() if on_gpu else None for _ in buffers]
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, number))

    def _enter(self, number: int, *_: Any) -> None:
        if number == self._now:  # another batch of a sweep
            return
        self._now, buffer = number, number % BUFFERS
        if self.held[buffer] != number:
            self._fetch(number)
        if self._copies:
            torch.cuda.current_stream().wait_event(self._arrived[buffer])
        following = (number + 1) % len(self._stored)  # after the last the first, for the next call
        if following % BUFFERS != buffer and self.held[following % BUFFERS] != following:
            self._fetch(following)

    def _fetch(self, number: int) -> None:
        """Copy a block once the device has computed all that it was given, which used the buffer before."""
        buffer, stored = number % BUFFERS, self._stored[number]
        self.held[buffer] = number
        if self._copies:
            self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies) if self._copies else nullcontext():
            self.buffers[buffer][: len(stored)].copy_(stored, non_blocking=True)
            if self._copies:
                self._arrived[buffer].record()
