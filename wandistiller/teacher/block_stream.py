"""Networks whose blocks lie in CPU memory and come to the device one after the other, into two buffers."""

import torch
from torch import Tensor

from wandistiller.network.block_source import BlockSource

BUFFERS = 2
"""One for the block that is computed, one for the next, which arrives meanwhile."""


class Buffers:
    """Memory on the device for two blocks of any of several networks, which are called in turn."""

    def __init__(self, nbytes: int, device: torch.device):
        """`nbytes`: of the largest block."""
        self.tensors = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self.held: list[Tensor | None] = [None] * BUFFERS
        """The block in each buffer, or on its way there, as it is stored in CPU memory."""
        self.current: Tensor | None = None
        """The block that was fetched last."""
        self._streams = torch.get_device_module(device)
        self._copies = self._streams.Stream(device)
        self._arrived = [self._streams.Event() for _ in self.tensors]

    def fetch(self, stored: Tensor, place: int) -> None:
        """Copy a block once the device has computed all that it was given, which used the buffer before."""
        self.held[place] = stored
        self._copies.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._copies):
            self.tensors[place][: len(stored)].copy_(stored, non_blocking=True)
            self._arrived[place].record()

    def wait(self, place: int) -> None:
        """Let the device wait for what was fetched last to this place; the host goes on."""
        self._streams.current_stream().wait_event(self._arrived[place])


class BlockStream(BlockSource):
    """Copies a network's blocks to the device just before they are needed, each once for a sweep.

    A block's parameters are views of one of the buffers, so nothing is allocated in a call. While the device
    computes a block, the next one is copied into the other buffer, whose block was computed before.
    """

    def __init__(self, stored: list[Tensor], buffers: Buffers):
        """`stored`: the weights of each block in CPU memory, bytes as they lie in a buffer."""
        super().__init__(len(stored))
        self._stored, self._buffers = stored, buffers

    def enter(self, number: int, ahead: list[int]) -> None:
        buffers, block, place = self._buffers, self._stored[number], number % BUFFERS
        if buffers.current is block:  # another batch of a sweep, or its recomputation
            return
        buffers.current = block
        if buffers.held[place] is not block:
            buffers.fetch(block, place)
        buffers.wait(place)
        for following in ahead[:1]:
            other = following % BUFFERS
            if other != place and buffers.held[other] is not self._stored[following]:
                buffers.fetch(self._stored[following], other)
