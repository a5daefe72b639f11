"""Sources of the weights of blocks that are there only while they compute, forward and backward."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

SOURCE = "block_source"
"""Attribute of a network whose blocks' weights come from a source."""


class BlockSource(ABC):
    """Gives blocks their weights when they are called, those of all networks that share the weights.

    It follows the direction of travel: up in a forward pass, down in a backward pass.
    """

    def __init__(self, layers: int):
        self._layers, self._last, self._turns = layers, -1, False

    @abstractmethod
    def enter(self, number: int, ahead: list[int]) -> None:
        """Have the weights of a block there, and begin to fetch those `ahead`, the next one first."""

    def serve(self, network: nn.Module) -> None:
        for number, block in enumerate(network.blocks):
            block.register_forward_pre_hook(partial(self._enter, number))
        setattr(network, SOURCE, self)

    def turn(self) -> None:
        """Announce that a backward pass follows the last block, which is entered next."""
        self._turns = True

    def saved(self, number: int, block: nn.Module) -> AbstractContextManager[None]:
        """Let autograd, for what is computed within, take the block's weights from where they are then."""
        plain = (p for p in block.parameters() if type(p) is nn.Parameter)  # others' places do not change
        by_place = {(p.untyped_storage().data_ptr(), p.dtype): p for p in plain}

        def pack(t: Tensor) -> Tensor | tuple[Any, ...]:
            is_plain = type(t) in (Tensor, nn.Parameter)
            p = by_place.get((t.untyped_storage().data_ptr(), t.dtype)) if is_plain else None
            return t if p is None else (p, t.shape, t.stride(), t.storage_offset())

        def unpack(saved: Tensor | tuple[Any, ...]) -> Tensor:
            self._enter(number)
            return saved if isinstance(saved, Tensor) else saved[0].data.as_strided(*saved[1:])

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _enter(self, number: int, *_: Any) -> None:
        turns, self._turns = self._turns, False
        falls = number == self._last - 1 or number == self._last == self._layers - 1
        self._last = number
        if turns or falls:
            ahead = range(number - 1, -1, -1)
        else:  # after the last the first, for the next call
            ahead = ((number + i) % self._layers for i in range(1, self._layers))
        self.enter(number, list(ahead))


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
